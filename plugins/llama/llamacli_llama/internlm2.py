"""InternLM2 and InternLM2.5 (Cai et al. 2024, arXiv:2403.17297).

Llama's decoder with a separate output matrix.
"""

from llamacli.plugin import Decoder, hookimpl

LLAMACLI_API = 1


class InternLM2(Decoder):
    """`general.architecture = internlm2`."""

    name = "internlm2"
    output = "required"


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(InternLM2())
