"""SmolLM3 (Bakouch et al. 2025): no RoPE in every fourth layer.

NoPE layers as in RNoPE (Yang et al. 2025, arXiv:2501.18795); files have no key for the period.
"""

from llamacli.plugin import Graph, Value, Weights, hookimpl
from llamacli_llama import LlamaConfig
from llamacli_llama.decoder import Decoder

LLAMACLI_API = 1

NOPE_PERIOD = 4


class SmolLM3(Decoder):
    """`general.architecture = smollm3`."""

    name = "smollm3"

    def rotate(self, g: Graph, c: LlamaConfig, w: Weights, layer: int, heads: Value) -> Value:
        """Queries or keys of a layer, rotated in three of four layers."""
        return heads if (layer + 1) % NOPE_PERIOD == 0 else super().rotate(g, c, w, layer, heads)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(SmolLM3())
