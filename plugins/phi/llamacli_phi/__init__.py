"""Phi family: Phi-1 to Phi-4, one module per generation."""

from llamacli.plugin import hookimpl
from llamacli_phi.chat import FORMATS
from llamacli_phi.phi2 import Phi2
from llamacli_phi.phi3 import Phi3
from llamacli_phi.phimoe import PhiMoE

LLAMACLI_API = 1


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (Phi2(), Phi3(), PhiMoE()):
        register(architecture)


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat formats of this family."""
    for chat_format in FORMATS:
        register(chat_format)
