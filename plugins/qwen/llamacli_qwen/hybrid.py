"""Qwen hybrids: layers of gated delta nets and of gated attention.

Qwen3-Next, Qwen3.5 and Qwen3.6; Yang et al. 2024 (Gated Delta Networks, arXiv:2412.06464). A layer of the first kind
mixes tokens by a short convolution and a recurrence with the delta rule; one of the second kind normalises queries and
keys, rotates a part of each head, and multiplies the result by a sigmoid gate.
"""

from typing import Literal

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_nextn,
    exp,
    nextn_input,
    nextn_logits,
    read_mrope,
    sigmoid,
    silu,
    softplus,
)


@attrs.frozen
class DeltaNet:
    """Sizes of gated delta nets.

    `n_head_k` heads of queries and keys, `n_head_v` of values, all `head_dim` wide; the convolution has `n_taps`.
    """

    n_head_k: int
    n_head_v: int
    head_dim: int
    n_taps: int

    @property
    def n_k(self) -> int:
        """Width of keys."""
        return self.n_head_k * self.head_dim

    @property
    def n_v(self) -> int:
        """Width of values."""
        return self.n_head_v * self.head_dim

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str) -> "DeltaNet":
        """Read `{architecture}.ssm.*`.

        Raises ModelFormatError naming the key that is missing, of a wrong type or does not fit.
        """

        def count(key: str, maximum: int) -> int:
            return metadata.get_int(f"{architecture}.ssm.{key}", minimum=1, maximum=maximum)

        n_k, n_v, width = count("group_count", 1 << 12), count("time_step_rank", 1 << 12), count("state_size", 1 << 10)
        if count("inner_size", 1 << 22) != n_v * width or n_v % n_k or width % 16:
            raise ModelFormatError(
                f"{metadata.source}: {architecture}.ssm.inner_size = {count('inner_size', 1 << 22)}, expected "
                f"time_step_rank x state_size = {n_v} x {width}, a multiple of group_count = {n_k} heads that are "
                "multiples of 16 wide"
            )
        taps = metadata.get_int(f"{architecture}.ssm.conv_kernel", minimum=2, maximum=64)
        return cls(n_k, n_v, width, taps)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class HybridConfig(Config):
    """Hyperparameters of Qwen hybrids.

    - `recurrent`: layers that are gated delta nets, one boolean a layer; the others have attention.
    - `n_nextn`: blocks behind the others that are multi-token-prediction heads, with attention; the first is computed.
    - `n_ff_expert`, `n_ff_shared`: widths of routed and shared experts.
    """

    rope: Rope
    delta: DeltaNet
    recurrent: tuple[bool, ...]
    n_nextn: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0


class Qwen35(Architecture):
    """`general.architecture = qwen35`: Qwen3.5 and Qwen3.6, dense."""

    name = "qwen35"
    moe = False
    shared: Literal["blocks", "tiled"] = "tiled"

    def configure(self, metadata: Metadata) -> HybridConfig:
        """Read the hyperparameters; `block_count` includes the blocks of `n_nextn`."""
        name = self.name
        n_ff = metadata.get_int(f"{name}.feed_forward_length", default=0, minimum=0, maximum=1 << 24)
        family = {"n_ff": n_ff} if self.moe else {}
        common = Config.from_gguf(metadata, **family)
        n_nextn = metadata.get_int(f"{name}.nextn_predict_layers", default=0, minimum=0, maximum=common.n_layer - 1)
        n_layer = common.n_layer - n_nextn
        experts = self.read_experts(metadata, common) if self.moe else {}
        return HybridConfig.from_gguf(
            metadata,
            **family,
            **experts,
            n_layer=n_layer,
            n_nextn=n_nextn,
            rope=self.read_rope(metadata, common.head_dim),
            delta=DeltaNet.from_gguf(metadata, name),
            recurrent=self.read_recurrent(metadata, n_layer, n_nextn),
        )

    def read_rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """Read M-RoPE over a part of each head."""
        return read_mrope(metadata, self.name, head_dim, alternate=True, partial=True)

    def read_recurrent(self, metadata: Metadata, n_layer: int, n_nextn: int) -> tuple[bool, ...]:
        """Layers that are gated delta nets: all but every n-th."""
        key = f"{self.name}.attention.recurrent_layers"
        if key in metadata:
            return metadata.get_bools(key, n_layer + n_nextn)[:n_layer]
        interval = metadata.get_int(f"{self.name}.full_attention_interval", default=4, minimum=1, maximum=1 << 16)
        return tuple((i + 1) % interval != 0 for i in range(n_layer))

    def read_experts(self, metadata: Metadata, common: Config) -> dict[str, int]:
        """Widths of the experts."""
        for key in ("expert_count", "expert_used_count"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        routed, shared = (
            metadata.get_int(f"{self.name}.{key}feed_forward_length", default=0, minimum=0, maximum=1 << 24)
            for key in ("expert_", "expert_shared_")
        )
        widths = {"n_ff_expert": routed or common.n_ff // common.n_expert_used, "n_ff_shared": shared or common.n_ff}
        if not all(widths.values()):
            key = f"{self.name}.expert_feed_forward_length"
            raise ModelFormatError(f"{metadata.source}: {key} is missing, and so is {self.name}.feed_forward_length")
        return widths

    def tensors(self, config: HybridConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for i in range(c.n_layer + c.n_nextn):
            block = table.block(nextn=i >= c.n_layer)
            block.add("attn_norm", c.n_embd)
            block.add("post_attention_norm", c.n_embd)
            if i < c.n_layer and c.recurrent[i]:
                self.add_delta_net(block, c)
            else:
                self.add_attention(block, c)
            self.add_feed_forward(block, c)
            if i >= c.n_layer:
                add_nextn(block, c)
        return table

    def add_attention(self, block: TensorTable, c: HybridConfig) -> None:
        """Projections and norms of attention; queries and gates alternate head by head."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        q, k = (2 * n_q, c.n_embd), (n_kv, c.n_embd)
        block.add_fused("attn_qkv", bias=True, attn_q=q, attn_k=k, attn_v=k)
        block.add("attn_output", c.n_embd, n_q)
        block.add("attn_q_norm", c.head_dim)
        block.add("attn_k_norm", c.head_dim)

    def add_delta_net(self, block: TensorTable, c: HybridConfig) -> None:
        """Projections, convolution and decay of a gated delta net."""
        d = c.delta
        block.add("attn_qkv", 2 * d.n_k + d.n_v, c.n_embd)
        block.add("attn_gate", d.n_v, c.n_embd)
        self.add_beta_alpha(block, c)
        block.add("ssm_conv1d", 2 * d.n_k + d.n_v, d.n_taps)
        block.add_tensor("ssm_dt.bias", d.n_head_v)
        block.add_tensor("ssm_a", d.n_head_v)
        block.add("ssm_norm", d.head_dim)
        block.add("ssm_out", c.n_embd, d.n_v)

    def add_beta_alpha(self, block: TensorTable, c: HybridConfig) -> None:
        """Projections to the step size and the decay of each head."""
        block.add("ssm_beta", c.delta.n_head_v, c.n_embd)
        block.add("ssm_alpha", c.delta.n_head_v, c.n_embd)

    def add_feed_forward(self, block: TensorTable, c: HybridConfig) -> None:
        """Feed-forward network of one block, or its experts."""
        if not self.moe:
            block.add("ffn_gate", c.n_ff, c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
            return
        block.add("ffn_gate_inp", c.n_expert, c.n_embd)
        block.add_fused(
            "ffn_gate_up_exps",
            ffn_gate_exps=(c.n_expert, c.n_ff_expert, c.n_embd),
            ffn_up_exps=(c.n_expert, c.n_ff_expert, c.n_embd),
        )
        block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff_expert)
        block.add("ffn_gate_inp_shexp", c.n_embd)
        block.add("ffn_gate_shexp", c.n_ff_shared, c.n_embd)
        block.add("ffn_up_shexp", c.n_ff_shared, c.n_embd)
        block.add("ffn_down_shexp", c.n_embd, c.n_ff_shared)

    def forward(self, g: Graph, config: HybridConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block, recurrent in zip(w.blk, c.recurrent, strict=False):
            x = self.compute_block(g, c, block, x, recurrent=recurrent)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def nextn(self, g: Graph, config: HybridConfig, weights: Weights) -> Value:
        """Token ids and hidden states to logits of the multi-token-prediction head."""
        c, block = config, weights.nextn[0]
        x = self.compute_block(g, c, block, nextn_input(g, c, weights, block), recurrent=False)
        return nextn_logits(g, c, weights, block, x)

    def compute_block(self, g: Graph, c: HybridConfig, block: Params, x: Value, *, recurrent: bool) -> Value:
        """Output of a block: gated delta net or attention, then feed-forward."""
        mix = self.delta_net if recurrent else self.attention
        x = x + mix(g, c, block, g.rms_norm(x, block.attn_norm, c.rms_eps))
        return x + self.feed_forward(g, c, block, g.rms_norm(x, block.post_attention_norm, c.rms_eps))

    def attention(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> Value:
        """Attention with normalised queries and keys and a gate for each element."""
        mixed, k = g.linear(h, block.attn_q), g.linear(h, block.attn_k)
        q, gate = (g.columns(mixed, first, c.head_dim, of=2 * c.head_dim) for first in (0, c.head_dim))
        q = g.rope(g.rms_norm(q, block.attn_q_norm, c.rms_eps, c.head_dim), c.rope, c.head_dim)
        k = g.rope(g.rms_norm(k, block.attn_k_norm, c.rms_eps, c.head_dim), c.rope, c.head_dim)
        kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
        out = g.attention(q, kv, scale=c.head_dim**-0.5)
        return g.linear(g.mul(out, g.map(gate, sigmoid)), block.attn_output)

    def delta_net(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> Value:
        """Gated delta net.

        For each head, S = decay S + beta k (v - decay S^T k)^T.
        """
        d = c.delta
        mixed, gate = self.delta_net_inputs(g, c, block, h)
        mixed = g.map(g.short_conv(mixed, block.ssm_conv1d), silu)
        q, k = (_l2_norm(g, g.columns(mixed, first, d.n_k), c.rms_eps, d.head_dim) for first in (0, d.n_k))
        v = g.columns(mixed, 2 * d.n_k, d.n_v)
        beta, alpha = self.beta_alpha(g, c, block, h)
        decay = g.map(g.mul(g.map(g.add(alpha, block.ssm_dt_bias), softplus), block.ssm_a), exp)
        out = g.linear_state(
            q, k, v, decay, n_head=d.n_head_v, n_head_k=d.n_head_k, beta=g.map(beta, sigmoid),
            scale=d.head_dim**-0.5, shared=self.shared,
        )  # fmt: skip
        normed = g.rms_norm(out, block.ssm_norm, c.rms_eps, d.head_dim)
        return g.linear(g.swiglu(gate, normed), block.ssm_out)

    def delta_net_inputs(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Queries, keys and values side by side, and the output's gate."""
        return g.linear(h, block.attn_qkv), g.linear(h, block.attn_gate)

    def beta_alpha(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Step size and decay of each head, before sigmoid and softplus."""
        return g.linear(h, block.ssm_beta), g.linear(h, block.ssm_alpha)

    def feed_forward(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network, or routed experts and a gated shared one."""
        if not self.moe:
            return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)
        experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        routed = g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used, renormalize=True)
        shared = g.swiglu(g.linear(h, block.ffn_gate_shexp), g.linear(h, block.ffn_up_shexp))
        return routed + g.sigmoid_gate(g.linear(shared, block.ffn_down_shexp), g.linear(h, block.ffn_gate_inp_shexp))


class Qwen35Moe(Qwen35):
    """`general.architecture = qwen35moe`: Qwen3.5 and Qwen3.6 with experts."""

    name = "qwen35moe"
    moe = True


class Qwen3Next(Qwen35Moe):
    """`general.architecture = qwen3next`: ordinary RoPE, step size and decay in one.

    Files of the first converters have queries, keys, values and gates in one too, `ssm_in`.
    """

    name = "qwen3next"
    shared = "blocks"

    def read_rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """Read RoPE over a part of each head."""
        return Rope.from_gguf(metadata, self.name, head_dim, interleaved=False)

    def add_delta_net(self, block: TensorTable, c: HybridConfig) -> None:
        """Projections, convolution and decay of a gated delta net."""
        super().add_delta_net(block, c)
        block.add("ssm_in", 2 * c.delta.n_k + 2 * c.delta.n_v, c.n_embd)
        block.choose(["attn_qkv", "attn_gate"], ["ssm_in"])

    def delta_net_inputs(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Queries, keys and values side by side, and the output's gate."""
        if not block.ssm_in:
            return super().delta_net_inputs(g, c, block, h)
        mixed, n_k, n_v = g.linear(h, block.ssm_in), c.delta.head_dim, c.delta.n_v // c.delta.n_head_k
        q, k, v, gate = (
            g.columns(mixed, first, width, of=2 * n_k + 2 * n_v)  # of a head of keys
            for first, width in ((0, n_k), (n_k, n_k), (2 * n_k, n_v), (2 * n_k + n_v, n_v))
        )
        return g.concat(g.concat(q, k), v), gate

    def add_beta_alpha(self, block: TensorTable, c: HybridConfig) -> None:
        """Projection to the step size and the decay, by head of keys."""
        block.add("ssm_ba", 2 * c.delta.n_head_v, c.n_embd)

    def beta_alpha(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Step size and decay of each head, before sigmoid and softplus."""
        mixed, each = g.linear(h, block.ssm_ba), c.delta.n_head_v // c.delta.n_head_k
        return g.columns(mixed, 0, each, of=2 * each), g.columns(mixed, each, each, of=2 * each)


def _l2_norm(g: Graph, x: Value, eps: float, head_dim: int) -> Value:
    """Divide each head by its length: x / sqrt(sum x^2 + eps)."""
    return g.scale(g.rms_norm(x, None, eps / head_dim, head_dim), head_dim**-0.5)


ARCHITECTURES = (Qwen35, Qwen35Moe, Qwen3Next)
