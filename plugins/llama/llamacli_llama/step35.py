"""Step 3.5 Flash (StepFun 2026).

Mixture of experts with sliding windows and attention gated by head. Full layers rotate half of each head. SwiGLU is
clamped in some layers.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
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
    network,
    sigmoid,
    swiglu_late_clamped,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class StepConfig(DecoderConfig):
    """Bounds of the factors of SwiGLU by layer.

    `limits` are those of experts, `limits_shared` those of other networks; 0 does not bound.
    """

    limits: tuple[float, ...]
    limits_shared: tuple[float, ...]


class Step35(Decoder):
    """`general.architecture = step35`."""

    name = "step35"
    interleaved = False
    output = "required"
    has_rope_freqs = True
    has_nextn = True
    chooses_experts = True
    by_layer = ("attention.head_count", "attention.head_count_kv")
    period = 4
    needs_pattern = True
    has_value_dim = True

    def configure(self, metadata: Metadata) -> StepConfig:
        """Read the hyperparameters."""
        fields = self.fields(metadata)
        n_blocks = fields["n_layer"] + fields["n_nextn"]

        def limits(key: str) -> tuple[float, ...]:
            name = f"{self.name}.{key}"
            return metadata.get_floats(name, n_blocks, minimum=0.0) if name in metadata else (0.0,) * n_blocks

        shared = limits("swiglu_clamp_shexp")
        return StepConfig.from_gguf(metadata, **fields, limits=limits("swiglu_clamp_exp"), limits_shared=shared)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of each layer: of half as many dimensions in full ones."""
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=False)
        n_dims = metadata.get_int(f"{self.name}.rope.dimension_count_swa", default=rope.n_dims, minimum=2)
        plain = attrs.evolve(rope, n_dims=n_dims, freq_scale=1.0, base=10000.0)
        sliding = self.sliding_rope(metadata, plain)
        full = attrs.evolve(rope, n_dims=rope.n_dims // 2)
        return tuple(sliding if window else full for window in windows)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of the blocks that have a router."""
        return Mixture.from_gguf(
            metadata, self.name, default_scoring=Scoring.SIGMOID, n_shared=1, bias="exp_probs_b.bias"
        )

    def add_head_norms(self, block: TensorTable, c: Any) -> None:
        """Norms of queries and keys, which files may lack."""
        block.add("attn_q_norm", c.head_dim, optional=True)
        block.add("attn_k_norm", c.head_dim, optional=True)

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with its gate."""
        super().add_attention(block, c, i)
        block.add("attn_gate", c.heads[i], c.n_embd, optional=True)

    def project(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> tuple[Value, Value, Value]:
        """Queries and keys, normalised by head and rotated, and values."""
        q, k, v = (g.linear(h, param) for param in self.projections(c, i, block))
        q = g.rms_norm(q, block.attn_q_norm, c.eps, c.head_dim) if block.attn_q_norm else q
        k = g.rms_norm(k, block.attn_k_norm, c.eps, c.head_dim) if block.attn_k_norm else k
        return self.rotate(g, c, w, i, q), self.rotate(g, c, w, i, k), v

    def rotate(self, g: Graph, c: Any, w: Weights, i: int, heads: Value) -> Value:
        """Queries or keys of block i behind RoPE.

        Factors are those of full layers.
        """
        return g.rope(heads, c.ropes[i], c.head_dim, None if c.windows[i] else w.rope_freqs)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        if block.attn_gate:
            a = g.mul(a, g.map(g.linear(h, block.attn_gate), sigmoid), c.value_dim)
        return g.linear(a, block.attn_output)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network or experts of block i, clamped."""
        routed, shared = (
            swiglu_late_clamped(limits[i]) if limits[i] else Activation.SWIGLU for limits in (c.limits, c.limits_shared)
        )
        if not block.ffn_gate_inp:
            return network(g, block, h, activation=shared)
        result: Value = c.mixture.layer(g, block, h, shared, activation=routed)
        return result


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Step35())
