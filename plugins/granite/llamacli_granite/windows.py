"""Granite with sliding windows and attention sinks (IBM 2026).

The text half of Granite Vision 4.1.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GraniteSwaConfig(DecoderConfig):
    """Factors of LongRoPE, and the width of the shared expert.

    With `longrope`, frequencies are divided by factors that depend on the length of the context. The shared expert is
    `n_ff_shared` wide, 0 without one.
    """

    longrope: bool
    n_ff_shared: int


class GraniteSwa(Decoder):
    """`general.architecture = granite_swa`."""

    name = "granite_swa"
    may_have_bias = ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    has_rope_freqs = True
    period = 4
    needs_pattern = True

    def configure(self, metadata: Metadata) -> GraniteSwaConfig:
        """Read the hyperparameters; scales of 0 are those that are not set."""
        fields = self.fields(metadata)

        def scale(key: str, default: float) -> float:
            return metadata.get_float(f"{self.name}.{key}", default=0.0, minimum=0.0) or default

        changed = {
            "embedding_scale": scale("embedding_scale", 1.0),
            "residual_scale": scale("residual_scale", 1.0),
            "attention_scale": scale("attention.scale", fields["attention_scale"]),
            "logit_scale": 1 / metadata.get_float(f"{self.name}.logit_scale", minimum=1e-9),
        }
        shared = f"{self.name}.expert_shared_feed_forward_length"
        return GraniteSwaConfig.from_gguf(
            metadata,
            **fields | changed,
            longrope=metadata.get_str(f"{self.name}.rope.scaling.type", default="") == "longrope",
            n_ff_shared=metadata.get_int(shared, default=0, minimum=0, maximum=1 << 24),
        )

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of the layers that have one.

        All, if the key is one number.
        """
        rope, key = (
            Rope.from_gguf(metadata, self.name, head_dim, interleaved=True),
            f"{self.name}.attention.rope_pattern",
        )
        single = isinstance(metadata.get(key, 1), int)
        rotates = (True,) * len(windows) if single else metadata.get_bools(key, len(windows))
        return tuple(rope if rotated else None for rotated in rotates)

    def mixture(self, metadata: Metadata) -> Mixture | None:
        """Experts of all blocks, as wide as a network."""
        if not metadata.get_int(f"{self.name}.expert_count", default=0, minimum=0):
            return None
        width = metadata.get_int(f"{self.name}.feed_forward_length", minimum=1)
        mixture = Mixture.from_gguf(metadata, self.name, scoring=Scoring.SOFTMAX, renormalize=True, n_ff=width)
        return attrs.evolve(mixture, n_dense=0, n_ff=width, n_ff_shared=0)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file, with factors of LongRoPE."""
        c, table = config, super().tensors(config)
        rope = next((rope for rope in c.ropes if rope), None)
        if c.longrope and rope:
            table.add("rope_factors_long", rope.n_dims // 2)
            table.add("rope_factors_short", rope.n_dims // 2)
        return table

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with sinks."""
        super().add_attention(block, c, i)
        block.add("attn_sinks", c.n_head)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network or the experts.

        The shared one has gate and up in one.
        """
        super().add_feed_forward(block, c, i)
        if c.mixture and c.n_ff_shared:
            block.add("ffn_up_shexp", 2 * c.n_ff_shared, c.n_embd)
            block.add("ffn_down_shexp", c.n_embd, c.n_ff_shared)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Sinks of a block."""
        return {"sinks": block.attn_sinks}

    def rotate(self, g: Graph, c: Any, w: Weights, i: int, heads: Value) -> Value:
        """Queries or keys of block i behind RoPE, if it has one."""
        if c.longrope and c.ropes[i]:
            return g.rope(heads, c.ropes[i], c.head_dim, w.rope_factors_short, w.rope_factors_long)
        return super().rotate(g, c, w, i, heads)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network, or routed experts plus the shared one."""
        x = super().feed_forward(g, c, i, block, h)
        if not (c.mixture and c.n_ff_shared):
            return x
        gate, up = (g.linear(h, part) for part in block.ffn_up_shexp.split(c.n_ff_shared, c.n_ff_shared))
        return x + g.linear(g.swiglu(gate, up), block.ffn_down_shexp)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(GraniteSwa())
