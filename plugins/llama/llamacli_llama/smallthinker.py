"""SmallThinker 4B-A0.6B and 21B-A3B (Song et al. 2025, arXiv:2507.20984).

Mixtures of experts for local devices. The router reads the input of the layer, experts have ReGLU. With sliding
windows, every fourth layer has no RoPE.
"""

from typing import Any

from llamacli.plugin import (
    Activation,
    Decoder,
    Graph,
    Metadata,
    Mixture,
    Params,
    Rope,
    Value,
    Weights,
    hookimpl,
)

LLAMACLI_API = 1

WINDOW = 4096
"""Sliding window in tokens, whatever number files have."""

NOPE_PERIOD = 4


class SmallThinker(Decoder):
    """`general.architecture = smallthinker`."""

    name = "smallthinker"
    interleaved = False
    period = 4
    full_first = True

    def window(self, metadata: Metadata, key: str) -> int:
        """Sliding window; 0 where files have none."""
        return WINDOW if metadata.get_int(key, default=0, minimum=0) else 0

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of each layer.

        As by llama.cpp, all layers of a model with four have it.
        """
        ropes = super().ropes(metadata, head_dim, windows)
        every = not any(windows) or len(windows) == NOPE_PERIOD
        return tuple(rope if every or i % NOPE_PERIOD else None for i, rope in enumerate(ropes))

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of every layer."""
        return Mixture.from_gguf(metadata, self.name, renormalize=True, activation=Activation.REGLU)

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i."""
        router = g.linear(x, block.ffn_gate_inp)
        x = x + self.attention(g, c, w, i, block, g.rms_norm(x, block.attn_norm, c.eps))
        parts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        return x + g.moe(g.rms_norm(x, block.ffn_norm, c.eps), router, **parts, **c.mixture.routing)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(SmallThinker())
