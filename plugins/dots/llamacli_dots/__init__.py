"""dots.llm1: a decoder with routed experts and shared ones.

Huo et al. 2025 (arXiv:2506.05767). RMSNorm, rotary attention with queries and keys normalised per head; the first
blocks have a SwiGLU feed-forward network, the others experts, which are chosen by the sigmoid of their logit plus a
bias.
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
    Scoring,
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
class DotsConfig(Config):
    """Hyperparameters of dots.llm1.

    `rope` rotates halves of heads (NeoX order). The first `n_dense` blocks have no experts; `n_ff_expert` and
    `n_ff_shared` are the widths of a routed expert and of the shared ones together. The router's scores are scaled to
    sum to 1 with `renormalize`, and multiplied by `weight_scale`.
    """

    rope: Rope
    n_dense: int
    n_ff_expert: int
    n_ff_shared: int
    scoring: Scoring
    renormalize: bool
    weight_scale: float


class Dots(Architecture):
    """`general.architecture = dots1`."""

    name = "dots1"

    def configure(self, metadata: Metadata) -> DotsConfig:
        """Read the hyperparameters; groups of experts are refused."""
        experts = expert_options(metadata, self.name)
        head_dim = Config.from_gguf(metadata).head_dim
        return DotsConfig.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, head_dim, interleaved=False),
            scoring=Scoring(
                metadata.get_int(f"{self.name}.expert_gating_func", minimum=min(Scoring), maximum=max(Scoring))
            ),
            renormalize=metadata.get_bool(f"{self.name}.expert_weights_norm", default=False),
            **experts,
        )

    def tensors(self, config: DotsConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for i in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_q_norm", c.head_dim)
            block.add("attn_k_norm", c.head_dim)
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            if i < c.n_dense:
                add_network(block, c, c.n_ff)
            else:
                block.add_tensor("exp_probs_b.bias", c.n_expert, optional=True)
                add_experts(block, c, c.n_ff_expert)
                add_network(block, c, c.n_ff_shared, SHARED)
        return table

    def forward(self, g: Graph, config: DotsConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
            k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)

            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + (network(g, block, h) if i < c.n_dense else self.experts(g, c, block, h))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)

    def experts(self, g: Graph, c: DotsConfig, block: Params, h: Value) -> Value:
        """Routed experts plus the shared ones."""
        return experts_and_shared(
            g,
            block,
            h,
            n_used=c.n_expert_used,
            scoring=c.scoring,
            selection_bias=block.exp_probs_b_bias,
            renormalize=c.renormalize,
            weight_scale=c.weight_scale,
        )


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(Dots())
