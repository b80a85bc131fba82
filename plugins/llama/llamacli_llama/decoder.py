"""Dense pre-norm decoder, base class of Llama's kin.

RMSNorm, rotary attention with grouped heads and a SwiGLU feed-forward network. A subclass overrides what differs.
"""

from llamacli.plugin import Architecture, Config, Graph, Metadata, Params, Rope, TensorTable, Value, Weights
from llamacli_llama import LlamaConfig


class Decoder(Architecture):
    """Architecture with methods to override.

    `interleaved`: RoPE rotates adjacent pairs, not halves of heads. `ffn_norm` is the name of the feed-forward
    network's norm.
    """

    interleaved = True
    ffn_norm = "ffn_norm"

    def configure(self, metadata: Metadata) -> LlamaConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=self.interleaved)
        return LlamaConfig.from_gguf(metadata, rope=rope)

    def tensors(self, config: LlamaConfig) -> TensorTable:
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
            block.add("attn_output", c.n_embd, n_q)
            block.add(self.ffn_norm, c.n_embd)
            self.add_feed_forward(block, c)
        return table

    def add_feed_forward(self, block: TensorTable, c: LlamaConfig) -> None:
        """Feed-forward network of one block."""
        block.add("ffn_gate", c.n_ff, c.n_embd)
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def forward(self, g: Graph, config: LlamaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for layer, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (self.rotate(g, c, w, layer, heads) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = x + g.linear(a, block.attn_output)
            h = g.rms_norm(x, getattr(block, self.ffn_norm), c.rms_eps)
            x = x + self.feed_forward(g, block, h)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def rotate(self, g: Graph, c: LlamaConfig, w: Weights, layer: int, heads: Value) -> Value:
        """Queries or keys of a layer after RoPE."""
        return g.rope(heads, c.rope, c.head_dim)

    def feed_forward(self, g: Graph, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network."""
        return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)
