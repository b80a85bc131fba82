"""PLaMo 2 and 3 (Preferred Networks 2025).

Decoders with fused projections whose branches are normalised before and after; in PLaMo 2 every second layer is a state
space layer (Samba, arXiv:2406.07522).
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    exp,
    hookimpl,
    silu,
    softplus,
)

LLAMACLI_API = 1


class Plamo3(Decoder):
    """`general.architecture = plamo3`."""

    name = "plamo3"
    is_fused = True
    interleaved = False
    qk_norm = "before"
    post_norms = True
    has_value_dim = True
    may_have_bias = ()
    by_layer: tuple[str, ...] = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    period = 8

    def window(self, metadata: Metadata, key: str) -> int:
        """Length of the sliding window in tokens; 0 for none."""
        return metadata.get_int(key, default=0, minimum=0)

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers, unscaled."""
        return super().sliding_rope(metadata, attrs.evolve(rope, freq_scale=1.0, base=10000.0))

    def add_norm(self, table: TensorTable, name: str, width: int) -> None:
        """Add a norm; names of those behind a branch have no suffix."""
        if name.startswith("post_"):
            table.add_tensor(name, width)
        else:
            super().add_norm(table, name, width)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network, whose gate and up are one matrix."""
        self.add_norm(block, "ffn_norm", c.n_embd)
        block.add("ffn_up", 2 * c.widths[i], c.n_embd)
        block.add("ffn_down", c.n_embd, c.widths[i])
        self.add_norm(block, "post_ffw_norm", c.n_embd)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """SwiGLU network."""
        gate, up = (g.linear(h, half) for half in block.ffn_up.split(c.widths[i], c.widths[i]))
        return g.linear(g.swiglu(gate, up), block.ffn_down)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Plamo2Config(DecoderConfig):
    """Hyperparameters of PLaMo 2.

    State space layers have `n_ssm` heads of `d_ssm` numbers, `d_state` rows of state, and convolve `n_taps` tokens.
    """

    n_ssm: int
    d_ssm: int
    d_state: int
    n_taps: int

    @property
    def d_step(self) -> int:
        """Numbers that step sizes come from."""
        return max(64, self.n_embd // 16)


class Plamo2(Plamo3):
    """`general.architecture = plamo2`: layers without heads of keys are state space layers."""

    name = "plamo2"
    by_layer = ("attention.head_count", "attention.head_count_kv")
    period = 0

    def configure(self, metadata: Metadata) -> Plamo2Config:
        """Read the hyperparameters."""
        prefix, fields = f"{self.name}.ssm.", self.fields(metadata)
        d_inner = metadata.get_int(prefix + "inner_size", minimum=1, maximum=1 << 22)
        n_ssm = metadata.get_int(prefix + "time_step_rank", minimum=1, maximum=1 << 14)
        metadata.get_int(prefix + "group_count", minimum=0, maximum=0)
        if d_inner % (16 * n_ssm):
            raise ModelFormatError(
                f"{metadata.source}: {prefix}inner_size = {d_inner}, expected time_step_rank = {n_ssm} heads in "
                "multiples of 16"
            )
        return Plamo2Config.from_gguf(
            metadata,
            **fields | {"attention_scale": fields["value_dim"] ** -0.5},
            n_ssm=n_ssm,
            d_ssm=d_inner // n_ssm,
            d_state=metadata.get_int(prefix + "state_size", minimum=1, maximum=1 << 12),
            n_taps=metadata.get_int(prefix + "conv_kernel", minimum=2, maximum=64),
        )

    def add_head_norms(self, block: TensorTable, c: Any) -> None:
        """Leave the norms, a vector a head, to `add_attention`."""

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention or of the state space layer."""
        if c.heads_kv[i]:
            super().add_attention(block, c, i)
            block.add("attn_q_norm", c.heads[i], c.head_dim)
            block.add("attn_k_norm", c.heads_kv[i], c.head_dim)
            return
        d_inner = c.n_ssm * c.d_ssm
        self.add_norm(block, "attn_norm", c.n_embd)
        block.add("ssm_in", 2 * d_inner, c.n_embd)
        block.add("ssm_conv1d", d_inner, c.n_taps)
        block.add("ssm_x", c.d_step + 2 * c.d_state, d_inner)
        block.add("ssm_dt", c.n_ssm, c.d_step, needs_bias=True)
        widths = {"a": c.n_ssm, "d": c.n_ssm, "dt_norm": c.d_step, "b_norm": c.d_state, "c_norm": c.d_state}
        for name, width in widths.items():
            block.add_tensor(f"ssm_{name}", width)
        block.add("ssm_out", c.n_embd, d_inner)
        self.add_norm(block, "post_attention_norm", c.n_embd)

    def attention(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Attention of block i, or its state space layer with normalised parts."""
        if c.heads_kv[i]:
            return super().attention(g, c, w, i, block, h)
        d = c.d_ssm
        mixed = g.linear(h, block.ssm_in)
        gate, x = (g.columns(mixed, first, d, of=2 * d) for first in (0, d))
        x = g.map(g.short_conv(x, block.ssm_conv1d), silu)
        parts = g.linear(x, block.ssm_x)
        write = g.rms_norm(g.columns(parts, 0, c.d_state), block.ssm_b_norm, c.eps)
        read = g.rms_norm(g.columns(parts, c.d_state, c.d_state), block.ssm_c_norm, c.eps)
        step = g.rms_norm(g.columns(parts, 2 * c.d_state, c.d_step), block.ssm_dt_norm, c.eps)
        step = g.map(g.linear(step, block.ssm_dt), softplus)
        decay = g.map(g.mul(step, block.ssm_a), exp)
        y = g.linear_state(read, write, g.mul(x, step, d), decay, n_head=c.n_ssm, n_head_k=1)
        return g.linear(g.swiglu(gate, g.add(y, g.mul(x, block.ssm_d, d))), block.ssm_out)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    register(Plamo2())
    register(Plamo3())
