"""MiniMax-M2: a decoder whose blocks all have experts.

MiniMax 2025 (model card of MiniMax-M2). RMSNorm, rotary attention with grouped heads on part of each head;
queries and keys are normalised over their whole width. Experts are chosen by the sigmoid of their logit plus a bias.
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, Scoring, TensorTable, Value, Weights, hookimpl

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class MiniMaxConfig(Config):
    """Hyperparameters of MiniMax-M2.

    `rope` rotates halves (NeoX order) of the first `rope.n_dims` numbers of a head. `scoring` is the router's.
    """

    rope: Rope
    scoring: Scoring


class MiniMaxM2(Architecture):
    """`general.architecture = minimax-m2`."""

    name = "minimax-m2"

    def configure(self, metadata: Metadata) -> MiniMaxConfig:
        """Read the hyperparameters.

        Files must have `expert_feed_forward_length`, but the width of an expert is `feed_forward_length`. Groups of
        experts are refused.
        """
        for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        metadata.get_int(f"{self.name}.expert_group_count", default=0, minimum=0, maximum=1)
        metadata.get_int(f"{self.name}.nextn_predict_layers", default=0, maximum=0)
        common = Config.from_gguf(metadata)
        scoring = metadata.get_int(f"{self.name}.expert_gating_func", minimum=min(Scoring), maximum=max(Scoring))
        return MiniMaxConfig.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False),
            scoring=Scoring(scoring),
        )

    def tensors(self, config: MiniMaxConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_q_norm", n_q)
            block.add("attn_k_norm", n_kv)
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            block.add("ffn_gate_inp", c.n_expert, c.n_embd)
            block.add_tensor("exp_probs_b.bias", c.n_expert)
            block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
            block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
            block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: MiniMaxConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps)
            k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps)
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)

            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + g.moe(
                h,
                g.linear(h, block.ffn_gate_inp),
                gate=block.ffn_gate_exps,
                up=block.ffn_up_exps,
                down=block.ffn_down_exps,
                n_used=c.n_expert_used,
                scoring=c.scoring,
                selection_bias=block.exp_probs_b_bias,
            )
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(MiniMaxM2())
