"""DeepSeekMoE: a decoder with fine-grained routed experts and shared ones.

Dai et al. 2024 (arXiv:2401.06066). RMSNorm, rotary attention with grouped heads; the first blocks have a SwiGLU
feed-forward network, the others experts. Weights of routed experts are their probabilities as they are, times a factor.
"""

import attrs

from llamacli.plugin import (
    SHARED,
    Architecture,
    Config,
    Graph,
    Metadata,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_experts,
    add_network,
    expert_options,
    experts_and_shared,
    hookimpl,
    network,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class DeepSeekConfig(Config):
    """Hyperparameters of DeepSeekMoE.

    `rope` rotates adjacent pairs. The first `n_dense` blocks have no experts; `n_ff_expert` and `n_ff_shared` are the
    widths of a routed expert and of the shared ones together. `weight_scale` multiplies the weights of routed experts.
    """

    rope: Rope
    n_dense: int
    n_ff_expert: int
    n_ff_shared: int
    weight_scale: float


class DeepSeek(Architecture):
    """`general.architecture = deepseek`."""

    name = "deepseek"

    def configure(self, metadata: Metadata) -> DeepSeekConfig:
        """Read the hyperparameters; groups of experts are refused."""
        experts = expert_options(metadata, self.name)
        head_dim = Config.from_gguf(metadata).head_dim
        return DeepSeekConfig.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, head_dim, interleaved=True),
            **experts,
        )

    def tensors(self, config: DeepSeekConfig) -> TensorTable:
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
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            if i < c.n_dense:
                add_network(block, c, c.n_ff)
            else:
                add_experts(block, c, c.n_ff_expert)
                add_network(block, c, c.n_ff_shared, SHARED)
        return table

    def forward(self, g: Graph, config: DeepSeekConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k = (g.rope(g.linear(h, param), c.rope, c.head_dim) for param in (block.attn_q, block.attn_k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)

            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            if i < c.n_dense:
                x = x + network(g, block, h)
            else:
                routing = {"n_used": c.n_expert_used, "renormalize": False, "weight_scale": c.weight_scale}
                x = x + experts_and_shared(g, block, h, **routing)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(DeepSeek())
