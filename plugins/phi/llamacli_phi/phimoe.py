"""Phi-3.5-MoE: Phi-3's attention with a mixture of experts.

Abdin et al. 2024 (arXiv:2404.14219). Norms, attention and the output have biases. Weights of the chosen experts are
their probabilities scaled to sum to 1, as in llama.cpp.
"""

from llamacli.plugin import Graph, Metadata, ModelFormatError, TensorTable, Value, Weights
from llamacli_phi.phi3 import Phi3, PhiConfig


class PhiMoE(Phi3):
    """`general.architecture = phimoe`."""

    name = "phimoe"

    def configure(self, metadata: Metadata) -> PhiConfig:
        """Read the hyperparameters; a file must have experts."""
        config = super().configure(metadata)
        if not config.n_expert:
            raise ModelFormatError(f"{metadata.source}: phimoe.expert_count is missing or 0, expected experts")
        return config

    def tensors(self, config: PhiConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd, needs_bias=True)
        table.add("output", c.n_vocab, c.n_embd, needs_bias=True)
        for factors in ("rope_factors_long", "rope_factors_short"):
            table.add(factors, c.rope.n_dims // 2, optional=not c.longrope)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd, needs_bias=True)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q, needs_bias=True)
            block.add("ffn_norm", c.n_embd, needs_bias=True)
            block.add("ffn_gate_inp", c.n_expert, c.n_embd)
            block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
            block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
            block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: PhiConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            x = x + self.attend(g, c, w, block, g.rms_norm(x, block.attn_norm, c.rms_eps))
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
            x = x + g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)
