"""ERNIE 4.5: dense models and mixtures of experts.

Baidu 2025 (ERNIE 4.5 Technical Report). A pre-norm decoder: RMSNorm, rotary attention with grouped heads, a SwiGLU
feed-forward network. In mixtures the blocks after the first ones have routed experts, which are chosen by their
probability plus a learned bias, and a shared expert.
"""

import attrs

from llamacli.plugin import (
    SHARED,
    Architecture,
    Config,
    Graph,
    Metadata,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_experts,
    add_network,
    experts,
    hookimpl,
    network,
    read_mrope,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class ErnieConfig(Config):
    """Hyperparameters of ERNIE 4.5.

    `rope` rotates adjacent pairs. The first `n_dense` blocks have no experts; `n_ff_expert` and `n_ff_shared` are the
    widths of a routed expert and of the shared one, which is absent if 0.
    """

    rope: Rope
    n_dense: int
    n_ff_expert: int = 0
    n_ff_shared: int = 0


class Ernie(Architecture):
    """`general.architecture = ernie4_5`."""

    name = "ernie4_5"

    def configure(self, metadata: Metadata) -> ErnieConfig:
        """Read the hyperparameters."""
        metadata.get_int(f"{self.name}.nextn_predict_layers", default=0, maximum=0)
        common = Config.from_gguf(metadata)
        rope = self.rope(metadata, common.head_dim)
        return ErnieConfig.from_gguf(metadata, rope=rope, n_dense=common.n_layer)

    def rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """RoPE of adjacent pairs."""
        return Rope.from_gguf(metadata, self.name, head_dim, interleaved=True)

    def tensors(self, config: ErnieConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for i in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q, bias=True)
            block.add("ffn_norm", c.n_embd)
            if i < c.n_dense:
                add_network(block, c, c.n_ff)
            else:
                self.add_experts(block, c)
        return table

    def add_experts(self, block: TensorTable, c: ErnieConfig) -> None:
        """Router, routed experts and the shared one."""
        block.add_tensor("exp_probs_b.bias", c.n_expert, optional=True)
        add_experts(block, c, c.n_ff_expert)
        if c.n_ff_shared:
            add_network(block, c, c.n_ff_shared, SHARED)

    def forward(self, g: Graph, config: ErnieConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k = (g.rope(g.linear(h, param), c.rope, c.head_dim) for param in (block.attn_q, block.attn_k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)

            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + (network(g, block, h) if i < c.n_dense else self.experts(g, c, block, h))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def experts(self, g: Graph, c: ErnieConfig, block: Params, h: Value) -> Value:
        """Routed experts plus the shared one."""
        routed = experts(g, block, h, n_used=c.n_expert_used, selection_bias=block.exp_probs_b_bias)
        return routed + network(g, block, h, SHARED) if c.n_ff_shared else routed


class PaddleOcr(Ernie):
    """`general.architecture = paddleocr`: positions have components (M-RoPE)."""

    name = "paddleocr"

    def rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """RoPE of halves, in sections."""
        return read_mrope(metadata, self.name, head_dim, alternate=False)


class ErnieMoe(Ernie):
    """`general.architecture = ernie4_5-moe`."""

    name = "ernie4_5-moe"

    def configure(self, metadata: Metadata) -> ErnieConfig:
        """Read the hyperparameters.

        Dense blocks between those with experts (`interleave_moe_layer_step` above 1) and groups of experts are refused.
        The width of the shared expert is that of all `expert_shared_count` ones together.
        """
        for key in ("expert_count", "expert_used_count"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        metadata.get_int(f"{self.name}.expert_shared_count", default=0, minimum=0)
        metadata.get_int(f"{self.name}.interleave_moe_layer_step", minimum=1, maximum=1)
        metadata.get_int(f"{self.name}.expert_group_count", default=0, minimum=0, maximum=1)
        dense = super().configure(metadata)
        return attrs.evolve(
            dense,
            n_dense=metadata.get_int(f"{self.name}.leading_dense_block_count", minimum=0, maximum=dense.n_layer),
            n_ff_expert=metadata.get_int(f"{self.name}.expert_feed_forward_length", minimum=1, maximum=1 << 24),
            n_ff_shared=metadata.get_int(
                f"{self.name}.expert_shared_feed_forward_length", default=0, minimum=0, maximum=1 << 24
            ),
        )


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(Ernie())
    register(ErnieMoe())
    register(PaddleOcr())
