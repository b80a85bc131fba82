"""LFM2 family: short convolutions and attention, dense or with experts."""

from llamacli.plugin import hookimpl
from llamacli_lfm.chat import FORMATS
from llamacli_lfm.decoder import Lfm2, Lfm2Moe

LLAMACLI_API = 1


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(Lfm2())
    register(Lfm2Moe())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat format of this family."""
    for chat_format in FORMATS:
        register(chat_format)
