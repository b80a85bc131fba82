"""EXAONE 3 and K-EXAONE.

Decoders that normalise the inputs of attention and network.
"""

from typing import Any

from llamacli.plugin import Decoder, Metadata, Mixture, Rope


class Exaone(Decoder):
    """`general.architecture = exaone`: EXAONE 3.0, 3.5 and Deep."""

    name = "exaone"
    interleaved = False
    has_rope_freqs = True


class ExaoneMoe(Exaone):
    """`general.architecture = exaone-moe`: K-EXAONE.

    Three of four layers slide; the others have no RoPE. Blocks for multi-token prediction slide and have no experts,
    as in vLLM's `exaone_moe_mtp.py`.
    """

    name = "exaone-moe"
    qk_norm = "before"
    output = "required"
    has_nextn = True
    drafts = True
    period = 4

    def windows(self, metadata: Metadata, n_blocks: int, n_layer: int) -> tuple[int | None, ...]:
        """Sliding windows; those of multi-token-prediction heads too."""
        window = self.window(metadata, f"{self.name}.attention.sliding_window")
        return super().windows(metadata, n_layer, n_layer) + (window,) * (n_blocks - n_layer)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of sliding layers, by the one base that files have."""
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=False)
        return tuple(rope if window else None for window in windows)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks, and one shared."""
        return Mixture.from_gguf(metadata, self.name, n_shared=1, bias="exp_probs_b.bias")

    def has_experts(self, c: Any, i: int) -> bool:
        """True for a block with experts."""
        return super().has_experts(c, i) and i < c.n_layer
