"""Mistral Small 4 (Mistral AI 2026).

DeepSeek-V2's graph and tensors under another name.
"""

from llamacli.plugin import hookimpl
from llamacli_deepseek.deepseek2 import DeepSeek2

LLAMACLI_API = 1


class Mistral4(DeepSeek2):
    """`general.architecture = mistral4`."""

    name = "mistral4"


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Mistral4())
