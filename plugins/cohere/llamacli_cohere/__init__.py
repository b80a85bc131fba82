"""Cohere family: Command R, Command R+, Aya, Command R7B and Command A.

Cohere 2024 (Command R), Cohere 2025 (Command A, arXiv:2504.00698). Attention and a SwiGLU feed-forward network side by
side after one LayerNorm without bias; the embedding is the output matrix, and logits are scaled.
"""

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
    sliding_layers,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class CohereConfig(Config):
    """Hyperparameters of Cohere.

    `rope` rotates pairs of neighbours. `sliding` says of each layer whether it attends to a `window`; if so, it alone
    has RoPE. Without it, all layers attend to everything and have RoPE. Logits are multiplied by `logit_scale`.
    """

    rope: Rope
    logit_scale: float
    query_key_norm: bool = False
    window: int | None = None
    sliding: tuple[bool, ...] | None = None


class CommandR(Architecture):
    """`general.architecture = command-r`: full attention."""

    name = "command-r"

    def configure(self, metadata: Metadata) -> CohereConfig:
        """Read the hyperparameters.

        Command R+ is recognised as in llama.cpp: from 64 layers on, queries and keys are normalised.
        """
        config = self._read(metadata, metadata.get_float("command-r.logit_scale", default=0.0))
        return attrs.evolve(config, query_key_norm=config.n_layer >= 64)

    def _read(self, metadata: Metadata, logit_scale: float) -> CohereConfig:
        eps = metadata.get_float(f"{self.name}.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        common = Config.from_gguf(metadata, layer_norm_eps=eps)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=True)
        return CohereConfig.from_gguf(metadata, layer_norm_eps=eps, rope=rope, logit_scale=logit_scale or 1.0)

    def tensors(self, config: CohereConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            if c.query_key_norm:
                block.add("attn_q_norm", c.n_head, c.head_dim)
                block.add("attn_k_norm", c.n_head_kv, c.head_dim)
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_gate", c.n_ff, c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: CohereConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.layer_norm(x, block.attn_norm, c.layer_norm_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            if c.query_key_norm:
                q = g.layer_norm(q, block.attn_q_norm, c.layer_norm_eps, c.head_dim)
                k = g.layer_norm(k, block.attn_k_norm, c.layer_norm_eps, c.head_dim)
            if c.sliding is None or c.sliding[i]:
                q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            kv = g.store(k, v, head_dim=c.head_dim, window=c.window if c.sliding and c.sliding[i] else None)
            a = g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
            f = g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)
            x = f + x + a
        return g.scale(g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.token_embd), c.logit_scale)


class Cohere2(CommandR):
    """`general.architecture = cohere2`: sliding windows, and no RoPE in the other layers."""

    name = "cohere2"

    def configure(self, metadata: Metadata) -> CohereConfig:
        """Read the hyperparameters."""
        config = self._read(metadata, metadata.get_float("cohere2.logit_scale"))
        return attrs.evolve(
            config,
            window=metadata.get_int("cohere2.attention.sliding_window", minimum=1),
            sliding=sliding_layers(metadata, self.name, config.n_layer, period=4),
        )


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(CommandR())
    register(Cohere2())
