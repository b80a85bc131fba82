"""Kimi Linear and Ling 3.

Delta attention with a decay a channel (KDA), and latent attention in some layers. Kimi Team 2025 (arXiv:2510.26692),
Ling Team 2026. Layers without heads of keys and values have a recurrent state: short convolutions of queries, keys and
values, a gated delta rule whose decay is a number a row of the state, and a gated norm. The others have the absorbed
latent attention of DeepSeek-V2.
"""

import functools
from typing import Any, Literal

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    exp,
    hookimpl,
    network,
    sigmoid,
    silu,
    softplus,
    swiglu_late_clamped,
)
from llamacli_deepseek.clamps import limits

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class KdaConfig(DecoderConfig):
    """Hyperparameters of delta and latent attention.

    Heads of delta attention are `kda_dim` wide, behind convolutions of `n_taps`; `bound` is that of the logarithm of
    decays, 0 without one. Queries of latent attention are compressed to `rank_q` (0: not), keys and values to
    `rank_kv`; keys have `nope_dim` numbers a head without positions and `n_rope` more, values are `value_dim_mla` wide.
    `limits` bound the factors of SwiGLU in experts by layer, `limits_shared` those of other networks; 0 does not.
    """

    kda_dim: int
    n_taps: int
    bound: float
    rank_q: int
    rank_kv: int
    nope_dim: int
    n_rope: int
    value_dim_mla: int
    limits: tuple[float, ...]
    limits_shared: tuple[float, ...]


class KimiLinear(Decoder):
    """`general.architecture = kimi-linear`: latent attention without RoPE."""

    name = "kimi-linear"
    output: Literal["required", "optional", "none"] = "required"
    by_layer = ("attention.head_count", "attention.head_count_kv")
    has_value_dim = True
    config: type[KdaConfig] = KdaConfig
    a_shape: tuple[int, ...] = (1,)
    """Further axes of the factors of decays."""
    always_renormalizes = True
    has_gate = False
    decay_sign = 1.0
    """Sign of the factors within a bound."""
    l2_eps: float | None = None
    """Epsilon of the L2 norms of queries and keys, None for that of the other norms."""
    rope_dims: tuple[int, int] = (2, 1 << 20)
    """Fewest and most dimensions of a head that have positions."""

    def configure(self, metadata: Metadata) -> KdaConfig:
        """Read the hyperparameters."""
        key, count = f"{self.name}.attention", functools.partial(self.count, metadata)
        rank_kv, n_rope = (
            count("attention.kv_lora_rank"),
            count("rope.dimension_count", minimum=self.rope_dims[0], maximum=self.rope_dims[1]),
        )
        key_dim = count("attention.key_length_mla", minimum=n_rope + 1)
        fields = self.fields(metadata) | {"value_dim": rank_kv}  # files of Kimi Linear have another value_length
        if fields["head_dim"] != rank_kv + n_rope:
            raise ModelFormatError(
                f"{metadata.source}: {key}.key_length = {fields['head_dim']}, expected {rank_kv + n_rope}, "
                f"by {key}.kv_lora_rank"
            )
        changed = {"attention_scale": key_dim**-0.5, "n_head_kv": 1}
        return self.config.from_gguf(
            metadata,
            **fields | changed,
            kda_dim=count("kda.head_dim"),
            n_taps=count("ssm.conv_kernel", minimum=2, maximum=64),
            rank_kv=rank_kv,
            nope_dim=key_dim - n_rope,
            n_rope=n_rope,
            value_dim_mla=count("attention.value_length_mla"),
            **self.other_fields(metadata, fields["n_layer"] + fields["n_nextn"]),
        )

    def count(self, metadata: Metadata, key: str, **limits: int) -> int:
        """Number under a key, at least 1 unless `limits` say."""
        return metadata.get_int(f"{self.name}.{key}", **{"minimum": 1, "maximum": 1 << 20} | limits)

    def other_fields(self, metadata: Metadata, n_blocks: int) -> dict[str, Any]:
        """Fields that architectures differ in."""
        return {"bound": 0.0, "rank_q": 0, "limits": (0.0,) * n_blocks, "limits_shared": (0.0,) * n_blocks}

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """No RoPE."""
        return (None,) * len(windows)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks, beside shared ones."""
        renormalize = self.always_renormalizes or None
        return Mixture.from_gguf(
            metadata, self.name, renormalize=renormalize, n_shared=None, bias="exp_probs_b.bias", needs_bias=True
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the attention of block i."""
        block.add("attn_norm", c.n_embd)
        if c.heads_kv[i]:
            self.add_latent(block, c)
        else:
            self.add_delta(block, c)

    def add_latent(self, block: TensorTable, c: Any) -> None:
        """Tensors of latent attention."""
        n_q = c.n_head * (c.nope_dim + c.n_rope)
        if c.rank_q:
            block.add("attn_q_a", c.rank_q, c.n_embd)
            block.add("attn_q_a_norm", c.rank_q)
            block.add("attn_q_b", n_q, c.rank_q)
        else:
            block.add("attn_q", n_q, c.n_embd)
        block.add("attn_kv_a_mqa", c.rank_kv + c.n_rope, c.n_embd)
        block.add("attn_kv_a_norm", c.rank_kv)
        block.add("attn_k_b", c.n_head, c.rank_kv, c.nope_dim)
        block.add("attn_v_b", c.n_head, c.value_dim_mla, c.rank_kv)
        block.add("attn_output", c.n_embd, c.n_head * c.value_dim_mla)

    def add_delta(self, block: TensorTable, c: Any) -> None:
        """Tensors of delta attention.

        Biases of the projections are not read, as by llama.cpp.
        """
        width = c.n_head * c.kda_dim
        shape = (width, c.n_embd)
        block.add_fused("attn_qkv", attn_q=shape, attn_k=shape, attn_v=shape)
        for name in ("q", "k", "v"):
            block.add_unused(f"attn_{name}", width, kind="bias")
            block.add(f"ssm_conv1d_{name}", width, 1, c.n_taps)
        self.add_gates(block, c, width)
        block.add("ssm_beta", c.n_head, c.n_embd)
        block.add_tensor("ssm_a", c.n_head, *self.a_shape)
        block.add_tensor("ssm_dt.bias", width)
        block.add("ssm_norm", c.kda_dim)
        block.add("attn_output", c.n_embd, width)

    def add_gates(self, block: TensorTable, c: Any, width: int) -> None:
        """Matrices of decays and gates, in two steps."""
        for name in ("f", "g"):
            block.add(f"ssm_{name}_a", c.kda_dim, c.n_embd)
            block.add(f"ssm_{name}_b", width, c.kda_dim)

    def attention(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Attention of block i to the normalised input."""
        return self.latent(g, c, i, block, h) if c.heads_kv[i] else self.delta(g, c, block, h)

    def delta(self, g: Graph, c: Any, block: Params, h: Value) -> Value:
        """Gated delta rule with a decay a channel."""
        d, n_head, width = c.kda_dim, c.n_head, c.n_head * c.kda_dim
        convolved = (
            (block.attn_q, block.ssm_conv1d_q),
            (block.attn_k, block.ssm_conv1d_k),
            (block.attn_v, block.ssm_conv1d_v),
        )
        q, k, v = (
            g.map(g.short_conv(g.linear(h, param), taps.reshaped(width, c.n_taps)), silu) for param, taps in convolved
        )
        eps = c.eps if self.l2_eps is None else self.l2_eps
        q, k = (g.scale(g.rms_norm(x, None, eps / d, d), d**-0.5) for x in (q, k))
        decay, gate = self.decay_and_gate(g, c, block, h)
        beta = g.map(g.linear(h, block.ssm_beta), sigmoid)
        out = g.linear_state(q, k, v, g.map(decay, exp), n_head=n_head, beta=beta, scale=d**-0.5)
        out = g.rms_norm(out, block.ssm_norm, c.eps, d)
        return g.linear(g.mul(out, g.map(gate, sigmoid)), block.attn_output)

    def decay_and_gate(self, g: Graph, c: Any, block: Params, h: Value) -> tuple[Value, Value]:
        """Logarithms of decays, and the input of the gate."""
        decay, gate = self.inputs(g, block, h)
        decay, factors = g.add(decay, block.ssm_dt_bias), block.ssm_a.reshaped(c.n_head)
        if not c.bound:
            return g.mul(g.map(decay, softplus), factors, c.kda_dim), gate
        decay = g.mul(decay, factors, c.kda_dim)
        decay = g.scale(decay, self.decay_sign) if self.decay_sign != 1 else decay
        return g.scale(g.map(decay, sigmoid), c.bound), gate

    def inputs(self, g: Graph, block: Params, h: Value) -> tuple[Value, Value]:
        """Inputs of decays and gate."""
        return tuple(  # type: ignore[return-value]
            g.linear(g.linear(h, getattr(block, f"ssm_{name}_a")), getattr(block, f"ssm_{name}_b")) for name in "fg"
        )

    def latent(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Multi-head latent attention, absorbed."""
        dims, d, rope = (c.rank_kv, c.n_rope), c.nope_dim + c.n_rope, c.ropes[i]
        h_q = g.rms_norm(g.linear(h, block.attn_q_a), block.attn_q_a_norm, c.eps) if c.rank_q else h
        q = g.linear(h_q, block.attn_q_b if c.rank_q else block.attn_q)
        compressed = g.linear(h, block.attn_kv_a_mqa)
        latent = g.rms_norm(g.columns(compressed, 0, c.rank_kv), block.attn_kv_a_norm, c.eps)
        k = g.concat(latent, self.shared_key(g, c, block, g.columns(compressed, c.rank_kv, c.n_rope)), of=dims)
        absorbed = g.batched_linear(g.columns(q, 0, c.nope_dim, of=d), block.attn_k_b)
        q = g.concat(absorbed, g.columns(q, c.nope_dim, c.n_rope, of=d), of=dims)
        if rope:
            q, k = (g.rope(x, attrs.evolve(rope, first=c.rank_kv), sum(dims)) for x in (q, k))
        kv = g.store(k, None, head_dim=sum(dims), value_dim=c.rank_kv, window=c.windows[i])
        cells = self.select(g, c, i, block, h, h_q)
        a = g.batched_linear(g.attention(q, kv, scale=c.attention_scale, cells=cells), block.attn_v_b)
        return self.project_out(g, c, i, block, h, a)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of latent attention, behind its gate if it has one."""
        if self.has_gate and block.attn_gate:
            gate = g.map(g.linear(h, block.attn_gate), sigmoid)
            a = g.mul(a, gate, a.width // gate.width)
        return g.linear(a, block.attn_output)

    def shared_key(self, g: Graph, c: Any, block: Params, k: Value) -> Value:
        """Part of the key that RoPE rotates, before it."""
        return k

    def select(self, g: Graph, c: Any, i: int, block: Params, h: Value, h_q: Value) -> Any:
        """Cells that attention of block i reads, None for all."""
        return None

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network or experts of block i, clamped."""
        routed, shared = (
            swiglu_late_clamped(limits[i]) if limits[i] else Activation.SWIGLU for limits in (c.limits, c.limits_shared)
        )
        if not self.has_experts(c, i):
            return network(g, block, h, activation=shared)
        result: Value = c.mixture.layer(g, block, h, shared, activation=routed)
        return result


class BailingMoe3(KimiLinear):
    """`general.architecture = bailingmoe3`.

    Ling 3.0, whose latent attention has RoPE and a gate a head. Decays are bounded. Blocks for multi-token prediction
    are not computed.
    """

    name = "bailingmoe3"
    output = "optional"
    has_nextn = True
    always_renormalizes = False
    has_gate = True

    def other_fields(self, metadata: Metadata, n_blocks: int) -> dict[str, Any]:
        """Bounds, and the width of compressed queries."""
        if not metadata.get_bool(f"{self.name}.kda.safe_gate", default=True):
            raise ModelFormatError(f"{metadata.source}: {self.name}.kda.safe_gate = false is not supported")

        return {
            "bound": metadata.get_float(f"{self.name}.kda.gate_lower_bound", maximum=0.0),
            "rank_q": metadata.get_int(f"{self.name}.attention.q_lora_rank", default=0, minimum=0, maximum=1 << 20),
            "limits": limits(metadata, f"{self.name}.swiglu_clamp_exp", n_blocks),
            "limits_shared": limits(metadata, f"{self.name}.swiglu_clamp_shexp", n_blocks),
        }

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of adjacent pairs.

        Of halves in files with sections of positions.
        """
        key = f"{self.name}.rope.dimension_sections"
        sections = metadata.get_ints(key, 4, default=(0,), minimum=0, maximum=head_dim)
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=not any(sections))
        parts = [i for i, n in enumerate(sections) for _ in range(n)]
        components = tuple(parts[i % len(parts)] for i in range(rope.n_dims // 2)) if parts else ()
        return (attrs.evolve(rope, components=components),) * len(windows)

    def add_latent(self, block: TensorTable, c: Any) -> None:
        """Tensors of latent attention, with its gate."""
        super().add_latent(block, c)
        block.add("attn_gate", c.n_head, c.n_embd)

    def add_gates(self, block: TensorTable, c: Any, width: int) -> None:
        """Matrices of decays and gates."""
        block.add("ssm_f_a", width, c.n_embd)
        block.add("ssm_g_a", width, c.n_embd)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network; heads of multi-token prediction have one more norm."""
        super().add_feed_forward(block, c, i)
        if i >= c.n_layer:
            block.add("layer_output_norm", c.n_embd)

    def inputs(self, g: Graph, block: Params, h: Value) -> tuple[Value, Value]:
        """Inputs of decays and gate, in one step."""
        return g.linear(h, block.ssm_f_a), g.linear(h, block.ssm_g_a)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    register(KimiLinear())
    register(BailingMoe3())
