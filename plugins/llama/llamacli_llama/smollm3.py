"""SmolLM3 (Bakouch et al. 2025): no RoPE in every fourth layer.

NoPE layers as in RNoPE (Yang et al. 2025, arXiv:2501.18795); files have no key for the period.
"""

from llamacli.plugin import Decoder, Metadata, Rope, hookimpl

LLAMACLI_API = 1

NOPE_PERIOD = 4


class SmolLM3(Decoder):
    """`general.architecture = smollm3`."""

    name = "smollm3"

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of three of four layers."""
        ropes = super().ropes(metadata, head_dim, windows)
        return tuple(rope if (i + 1) % NOPE_PERIOD else None for i, rope in enumerate(ropes))


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(SmolLM3())
