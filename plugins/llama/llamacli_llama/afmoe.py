"""Arcee Trinity and Poolside Laguna: mixtures of experts with gated attention.

Arcee AI 2025 (Trinity Nano, Mini, Large) and Poolside 2026 (Laguna XS, M, S). Experts are chosen by sigmoid scores with
a bias, beside a shared one; windows slide in three of four layers, and a gate of the input multiplies what is attended
to: by element, or in Laguna by head.
"""

from typing import Any

from llamacli.plugin import (
    Decoder,
    Graph,
    Metadata,
    Mixture,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    hookimpl,
    sigmoid,
    softplus,
)

LLAMACLI_API = 1

NOPE_PERIOD = 4


class Afmoe(Decoder):
    """`general.architecture = afmoe`: Trinity; every fourth layer has no RoPE."""

    name = "afmoe"
    interleaved = False
    qk_norm = "before"
    post_norms = True
    period = 4

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration, with the scale of embeddings."""
        fields = super().fields(metadata)
        n_embd = metadata.get_int(f"{self.name}.embedding_length")
        return fields | {"embedding_scale": n_embd**0.5}

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of each layer."""
        ropes = super().ropes(metadata, head_dim, windows)
        return tuple(rope if (i + 1) % NOPE_PERIOD else None for i, rope in enumerate(ropes))

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks."""
        return Mixture.from_gguf(
            metadata,
            self.name,
            default_scoring=Scoring.SIGMOID,
            n_shared=None,
            bias="exp_probs_b.bias",
            needs_bias=True,
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with its gate."""
        super().add_attention(block, c, i)
        block.add("attn_gate", c.heads[i] * c.head_dim, c.n_embd)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        return g.linear(g.mul(a, g.map(g.linear(h, block.attn_gate), sigmoid)), block.attn_output)


class Laguna(Afmoe):
    """`general.architecture = laguna`.

    Layers have numbers of heads of their own. RoPE is scaled in layers without a window only, and may rotate other
    dimensions there.
    """

    name = "laguna"
    post_norms = False
    full_first = True
    by_layer = ("attention.head_count", "attention.head_count_kv")

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration."""
        return Decoder.fields(self, metadata)

    def window(self, metadata: Metadata, key: str) -> int:
        """Length of the sliding window; 0 for none."""
        return metadata.get_int(key, default=0, minimum=0)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of each layer."""
        return Decoder.ropes(self, metadata, head_dim, windows)

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers, without YaRN."""
        n_dims = metadata.get_int(f"{self.name}.rope.dimension_count_swa", default=rope.n_dims, minimum=2)
        plain = Rope(n_dims=n_dims, interleaved=False, base=rope.base, n_ctx_orig=rope.n_ctx_orig)
        return super().sliding_rope(metadata, plain)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks.

        With one shared expert, unless files say otherwise.
        """
        return Mixture.from_gguf(
            metadata, self.name, default_scoring=Scoring.SIGMOID, n_shared=1, bias="exp_probs_b.bias", needs_bias=True
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with a gate by head or by element."""
        Decoder.add_attention(self, block, c, i)
        block.add("attn_gate", c.heads[i], c.n_embd, other=(c.heads[i] * c.head_dim, c.n_embd))

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        gate = g.map(g.linear(h, block.attn_gate), softplus)
        gated = g.mul(a, gate, c.head_dim) if gate.width == c.heads[i] else g.mul(a, gate)
        return g.linear(gated, block.attn_output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    register(Afmoe())
    register(Laguna())
