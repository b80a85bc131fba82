"""Mixtures of experts: GLM-4.5 to 4.7 (GLM-4.5 Team 2025, arXiv:2508.06471).

The first blocks are dense. Others have a shared expert beside the routed ones, which are chosen by sigmoid scores plus
a bias; the bias is not part of their weights.
"""

from llamacli.plugin import (
    SHARED,
    Config,
    Graph,
    Metadata,
    Params,
    Scoring,
    TensorTable,
    Value,
    add_experts,
    add_network,
    experts_and_shared,
    network,
)
from llamacli_glm.dense import ChatGlm, GlmConfig, layers, read_rope


class Glm4Moe(ChatGlm):
    """`general.architecture = glm4moe`: GLM-4.5, 4.6 and 4.7, the text part of GLM-4.5V."""

    name = "glm4moe"

    def configure(self, metadata: Metadata) -> GlmConfig:
        """Read the hyperparameters."""

        def number(key: str, **limits: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", **limits)

        number("expert_count", minimum=1)
        number("expert_used_count", minimum=1)
        for key in ("expert_group_count", "expert_group_used_count"):
            number(key, default=1, minimum=0, maximum=1)
        common = Config.from_gguf(metadata)
        n_ff_expert = number("expert_feed_forward_length", minimum=1, maximum=1 << 24)
        return GlmConfig.from_gguf(
            metadata,
            rope=read_rope(metadata, self.name, common.head_dim, interleaved=False),
            n_dense=number("leading_dense_block_count", default=0, minimum=0),
            n_ff_expert=n_ff_expert,
            n_ff_shared=n_ff_expert * number("expert_shared_count", minimum=1, maximum=1 << 10),
            routing={
                "n_used": common.n_expert_used,
                "scoring": Scoring(number("expert_gating_func", default=0, minimum=0, maximum=4) or Scoring.SIGMOID),
                "renormalize": metadata.get_bool(f"{self.name}.expert_weights_norm", default=False),
                "weight_scale": metadata.get_float(f"{self.name}.expert_weights_scale", default=1.0) or 1.0,
            },
            **layers(metadata, self.name),
        )

    def add_block(self, block: TensorTable, c: GlmConfig, i: int) -> None:
        """Tensors of block `i`."""
        self.add_attention(block, c)
        block.add("attn_q_norm", c.head_dim, optional=True)
        block.add("attn_k_norm", c.head_dim, optional=True)
        block.add("post_attention_norm", c.n_embd)
        if i < c.n_dense:
            add_network(block, c, c.n_ff)
            return
        block.add_tensor("exp_probs_b.bias", c.n_expert)
        add_experts(block, c, c.n_ff_expert)
        add_network(block, c, c.n_ff_shared, SHARED)

    def queries_and_keys(self, g: Graph, c: GlmConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Queries and keys, normalised per head where the block has norms."""
        q, k = super().queries_and_keys(g, c, block, h)
        if block.attn_q_norm:
            q = g.rms_norm(q, block.attn_q_norm, c.rms_eps, c.head_dim)
        if block.attn_k_norm:
            k = g.rms_norm(k, block.attn_k_norm, c.rms_eps, c.head_dim)
        return q, k

    def compute_block(self, g: Graph, c: GlmConfig, block: Params, x: Value, i: int) -> Value:
        """Output of block `i`."""
        x = x + self.attention(g, c, block, x)
        h = g.rms_norm(x, block.post_attention_norm, c.rms_eps)
        if i < c.n_dense:
            return x + network(g, block, h)
        return x + experts_and_shared(g, block, h, selection_bias=block.exp_probs_b_bias, **c.routing)
