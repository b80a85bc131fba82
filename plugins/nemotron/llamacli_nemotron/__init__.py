"""Nemotron-4 and Minitron: LayerNorm, partial RoPE, squared ReLU.

Parmar et al. 2024 (arXiv:2402.16819), Muralidharan et al. 2024 (arXiv:2407.14679). The feed-forward network has no gate
(So et al. 2021). Weights of the norms are stored with 1 added (`layernorm1p`).
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    relu_squared,
)
from llamacli_nemotron.hybrid import NemotronH, NemotronHMoe

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class NemotronConfig(Config):
    """Hyperparameters of Nemotron.

    `rope` rotates halves of the first dimensions of each head.
    """

    rope: Rope


class Nemotron(Architecture):
    """`general.architecture = nemotron`."""

    name = "nemotron"

    def configure(self, metadata: Metadata) -> NemotronConfig:
        """Read the hyperparameters."""
        norm: dict[str, Any] = {
            "layer_norm_eps": metadata.get_float("nemotron.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        }
        common = Config.from_gguf(metadata, **norm)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        return NemotronConfig.from_gguf(metadata, rope=rope, **norm)

    def tensors(self, config: NemotronConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd, needs_bias=True)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd, needs_bias=True)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q, bias=True)
            block.add("ffn_norm", c.n_embd, needs_bias=True)
            block.add("ffn_up", c.n_ff, c.n_embd, bias=True)
            block.add("ffn_down", c.n_embd, c.n_ff, bias=True)
        return table

    def forward(self, g: Graph, config: NemotronConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.layer_norm(x, block.attn_norm, c.layer_norm_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = x + g.linear(a, block.attn_output)

            h = g.layer_norm(x, block.ffn_norm, c.layer_norm_eps)
            h = g.map(g.linear(h, block.ffn_up, scale_last=True), relu_squared)
            x = x + g.linear(h, block.ffn_down, scale_last=True)
        return g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (Nemotron, NemotronH, NemotronHMoe):
        register(architecture())
