"""Gemma family: Gemma 1 to 4 and EmbeddingGemma, a module each."""

from llamacli.plugin import hookimpl
from llamacli_gemma.assistant import Gemma4Assistant
from llamacli_gemma.chat import FORMATS
from llamacli_gemma.embedding import GemmaEmbedding
from llamacli_gemma.gemma1 import Gemma1
from llamacli_gemma.gemma2 import Gemma2
from llamacli_gemma.gemma3 import Gemma3
from llamacli_gemma.gemma3n import Gemma3n
from llamacli_gemma.gemma4 import Gemma4

LLAMACLI_API = 1
LLAMACLI_KERNEL_API = 2


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for kind in (Gemma1, Gemma2, Gemma3, Gemma3n, Gemma4, Gemma4Assistant, GemmaEmbedding):
        register(kind())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat formats of this family."""
    for chat_format in FORMATS:
        register(chat_format)
