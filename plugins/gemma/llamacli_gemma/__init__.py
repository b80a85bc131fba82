"""The Gemma family: Gemma 1, 2, 3 and 4, each in a module of its own; what they share is in `family`."""

from llamacli import hookimpl
from llamacli_gemma.chat import FORMATS
from llamacli_gemma.gemma1 import Gemma1
from llamacli_gemma.gemma2 import Gemma2
from llamacli_gemma.gemma3 import Gemma3
from llamacli_gemma.gemma4 import Gemma4

LLAMACLI_API = 1


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (Gemma1(), Gemma2(), Gemma3(), Gemma4()):
        register(architecture)


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register how the family's models are talked to."""
    for chat_format in FORMATS:
        register(chat_format)
