"""Hunyuan family: dense models and Hunyuan-A13B with experts.

Sun et al. 2024 (arXiv:2411.02265). A pre-norm decoder whose queries and keys are normalised per head after RoPE. The
experts' model adds a shared expert to those that the router chooses.
"""

from typing import Any

import attrs
import numpy as np

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
    hookimpl,
    read_mrope,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class HunyuanConfig(Config):
    """Hyperparameters of Hunyuan.

    `rope` rotates halves of heads (NeoX order). `n_ff_shared` is the width of the shared expert.
    """

    rope: Rope
    n_ff_shared: int = 0


class HunyuanDense(Architecture):
    """`general.architecture = hunyuan-dense`."""

    name = "hunyuan-dense"

    def configure(self, metadata: Metadata) -> HunyuanConfig:
        """Read the hyperparameters.

        Files may count a single expert, which is the feed-forward network. `rope.scaling.alpha` raises the base of RoPE
        to alpha^(d / (d - 2)) times its value, d the width of a head (NTK-aware scaling).
        """
        for key in ("expert_count", "expert_used_count"):
            metadata.get_int(f"{self.name}.{key}", default=0, minimum=0)
        dense: dict[str, Any] = {"n_expert": 0, "n_expert_used": 0}
        metadata.get_int(f"{self.name}.nextn_predict_layers", default=0, maximum=0)
        common = Config.from_gguf(metadata, **dense)
        rope = self.rope(metadata, common.head_dim)
        key = f"{self.name}.rope.scaling.alpha"
        if alpha := metadata.get_float(key, default=0.0, minimum=0.0, maximum=1e6):
            if common.head_dim <= 2:
                raise ModelFormatError(f"{metadata.source}: {key} needs heads wider than {common.head_dim}")
            exponent = np.float32(common.head_dim / (common.head_dim - 2))
            rope = attrs.evolve(rope, base=float(np.float32(rope.base) * np.float32(alpha) ** exponent))
        return HunyuanConfig.from_gguf(metadata, rope=rope, **dense)

    def rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """RoPE without scaling by `alpha`."""
        return Rope.from_gguf(metadata, self.name, head_dim, interleaved=False)

    def tensors(self, config: HunyuanConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_q_norm", c.head_dim)
            block.add("attn_k_norm", c.head_dim)
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            self.add_feed_forward(block, c)
        return table

    def add_feed_forward(self, block: TensorTable, c: HunyuanConfig) -> None:
        """Feed-forward network of one block."""
        block.add("ffn_gate", c.n_ff, c.n_embd)
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def forward(self, g: Graph, config: HunyuanConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rope(g.linear(h, block.attn_q), c.rope, c.head_dim)
            k = g.rope(g.linear(h, block.attn_k), c.rope, c.head_dim)
            q = g.rms_norm(q, block.attn_q_norm, c.rms_eps, c.head_dim)
            k = g.rms_norm(k, block.attn_k_norm, c.rms_eps, c.head_dim)
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
            x = x + self.feed_forward(g, c, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def feed_forward(self, g: Graph, c: HunyuanConfig, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network."""
        return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)


class HunyuanVL(HunyuanDense):
    """`general.architecture = hunyuan_vl`: positions have components (M-RoPE)."""

    name = "hunyuan_vl"

    def rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """RoPE in sections, where a file has them."""
        key = f"{self.name}.rope.dimension_sections"
        sections = metadata.get_ints(key, 4, default=(0, 0, 0, 0), minimum=0, maximum=head_dim)
        if not all(sections[:2]):
            return super().rope(metadata, head_dim)
        return read_mrope(metadata, self.name, head_dim, alternate=False)


class HunyuanMoe(HunyuanDense):
    """`general.architecture = hunyuan-moe`: routed experts and a shared one."""

    name = "hunyuan-moe"

    def configure(self, metadata: Metadata) -> HunyuanConfig:
        """Read the hyperparameters.

        Files must have `expert_feed_forward_length`, but the width of an expert is `feed_forward_length`.
        """
        for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        metadata.get_int(f"{self.name}.expert_group_count", default=0, minimum=0, maximum=1)
        metadata.get_int(f"{self.name}.nextn_predict_layers", default=0, maximum=0)
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        key = f"{self.name}.expert_shared_feed_forward_length"
        n_ff_shared = metadata.get_int(key, default=0, minimum=0, maximum=1 << 24) or common.n_ff
        return HunyuanConfig.from_gguf(metadata, rope=rope, n_ff_shared=n_ff_shared)

    def add_feed_forward(self, block: TensorTable, c: HunyuanConfig) -> None:
        """Router, routed experts and the shared one."""
        block.add("ffn_gate_inp", c.n_expert, c.n_embd)
        block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
        block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
        block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)
        block.add("ffn_gate_shexp", c.n_ff_shared, c.n_embd)
        block.add("ffn_up_shexp", c.n_ff_shared, c.n_embd)
        block.add("ffn_down_shexp", c.n_embd, c.n_ff_shared)

    def feed_forward(self, g: Graph, c: HunyuanConfig, block: Params, h: Value) -> Value:
        """Routed experts plus the shared one."""
        experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        routed = g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used)
        shared = g.swiglu(g.linear(h, block.ffn_gate_shexp), g.linear(h, block.ffn_up_shexp))
        return routed + g.linear(shared, block.ffn_down_shexp)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(HunyuanDense())
    register(HunyuanMoe())
    register(HunyuanVL())
