"""InternLM2 and InternLM2.5 (Cai et al. 2024, arXiv:2403.17297).

Llama's decoder with a separate output matrix.
"""

from llamacli.plugin import TensorTable, hookimpl
from llamacli_llama import LlamaConfig
from llamacli_llama.decoder import Decoder

LLAMACLI_API = 1


class InternLM2(Decoder):
    """`general.architecture = internlm2`."""

    name = "internlm2"

    def tensors(self, config: LlamaConfig) -> TensorTable:
        """The tensors of a file, which must have the output matrix."""
        table = super().tensors(config)
        table.add("output", config.n_vocab, config.n_embd)
        return table


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(InternLM2())
