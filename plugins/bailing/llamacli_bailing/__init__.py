"""Bailing MoE 2: a decoder with fine-grained experts in groups.

Ling Team 2025 (arXiv:2510.22115): Ling 2.0 and Ring 2.0. RMSNorm, rotary attention with grouped heads and queries and
keys normalised per head; the first blocks have a SwiGLU feed-forward network, the others routed experts and shared
ones.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    SHARED,
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    Weights,
    add_experts,
    add_network,
    add_nextn,
    expert_groups,
    experts_and_shared,
    hookimpl,
    network,
    nextn_input,
    nextn_logits,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class BailingConfig(Config):
    """Hyperparameters of Bailing MoE 2.

    `rope` rotates halves of heads (NeoX order). The first `n_dense` blocks have no experts; `n_ff_expert` and
    `n_ff_shared` are the widths of a routed expert and of the shared ones together. `routing` are options of the
    mixture. `n_nextn` blocks behind the others are multi-token-prediction heads; the first of them is computed.
    """

    rope: Rope
    n_dense: int
    n_ff_expert: int
    n_ff_shared: int
    n_nextn: int
    routing: dict[str, Any]


class BailingMoe2(Architecture):
    """`general.architecture = bailingmoe2`."""

    name = "bailingmoe2"

    def configure(self, metadata: Metadata) -> BailingConfig:
        """Read the hyperparameters.

        The factor `expert_weights_scale` = 0 means 1.
        """

        def count(key: str, minimum: int, maximum: int, **default: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", minimum=minimum, maximum=maximum, **default)

        n_blocks = count("block_count", 1, 1 << 10)
        n_nextn = count("nextn_predict_layers", 0, n_blocks - 1, default=0)
        n_ff_expert = count("expert_feed_forward_length", 1, 1 << 24)
        n_ff_shared = count("expert_shared_feed_forward_length", 0, 1 << 24, default=0) or n_ff_expert
        n_expert = count("expert_count", 1, 1 << 14)
        common = Config.from_gguf(metadata, n_layer=n_blocks - n_nextn)
        if common.n_head * common.head_dim != common.n_embd:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.attention.head_count = {common.n_head} heads of "
                f"{self.name}.attention.key_length = {common.head_dim} numbers are not "
                f"{self.name}.embedding_length = {common.n_embd}"
            )
        return BailingConfig.from_gguf(
            metadata,
            n_layer=common.n_layer,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False),
            n_dense=count("leading_dense_block_count", 0, common.n_layer, default=0),
            n_ff_expert=n_ff_expert,
            n_ff_shared=n_ff_shared * count("expert_shared_count", 1, 1 << 14),
            n_nextn=n_nextn,
            routing={
                "n_used": common.n_expert_used,
                "scoring": Scoring(count("expert_gating_func", min(Scoring), max(Scoring))),
                "renormalize": metadata.get_bool(f"{self.name}.expert_weights_norm", default=False),
                "weight_scale": metadata.get_float(f"{self.name}.expert_weights_scale", default=0.0, minimum=0.0)
                or 1.0,
                "groups": expert_groups(metadata, self.name, n_expert),
            },
        )

    def tensors(self, config: BailingConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for i in range(c.n_layer):
            self.add_block(table.block(), c, i)
        for _ in range(c.n_nextn):
            block = table.block(nextn=True)
            self.add_block(block, c, c.n_dense)
            add_nextn(block, c)
            block.add("layer_output_norm", c.n_embd, optional=True)
        return table

    def add_block(self, block: TensorTable, c: BailingConfig, i: int) -> None:
        """Tensors of block `i`."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add("attn_norm", c.n_embd)
        block.add("attn_qkv", n_q + 2 * n_kv, c.n_embd)
        block.add("attn_q_norm", c.head_dim)
        block.add("attn_k_norm", c.head_dim)
        block.add("attn_output", c.n_embd, n_q)
        block.add("ffn_norm", c.n_embd)
        if i < c.n_dense:
            add_network(block, c, c.n_ff)
            return
        block.add_tensor("exp_probs_b.bias", c.n_expert, optional=True)
        add_experts(block, c, c.n_ff_expert)
        add_network(block, c, c.n_ff_shared, SHARED)

    def forward(self, g: Graph, config: BailingConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            x = self.compute_block(g, c, block, x, i)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)

    def nextn(self, g: Graph, config: BailingConfig, weights: Weights) -> Value:
        """Token ids and hidden states to logits of the multi-token-prediction head.

        The block ends in a norm of its own, as in SGLang's `bailing_moe_nextn.py`.
        """
        c, block = config, weights.nextn[0]
        x = self.compute_block(g, c, block, nextn_input(g, c, weights, block), c.n_layer)
        return nextn_logits(g, c, weights, block, x, block.layer_output_norm)

    def compute_block(self, g: Graph, c: BailingConfig, block: Params, x: Value, i: int) -> Value:
        """Output of block `i`."""
        h = g.rms_norm(x, block.attn_norm, c.rms_eps)
        q, k, v = block.attn_qkv.split(*(n * c.head_dim for n in (c.n_head, c.n_head_kv, c.n_head_kv)))
        queries, keys = (
            g.rope(g.rms_norm(g.linear(h, param), norm, c.rms_eps, c.head_dim), c.rope, c.head_dim)
            for param, norm in ((q, block.attn_q_norm), (k, block.attn_k_norm))
        )
        kv = g.store(keys, g.linear(h, v), head_dim=c.head_dim)
        x = x + g.linear(g.attention(queries, kv, scale=c.head_dim**-0.5), block.attn_output)
        h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
        if i < c.n_dense:
            return x + network(g, block, h)
        return x + experts_and_shared(g, block, h, selection_bias=block.exp_probs_b_bias, **c.routing)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(BailingMoe2())
