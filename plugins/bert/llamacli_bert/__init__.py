"""BERT and Nomic BERT: encoders that embed texts.

Devlin et al. 2019 (arXiv:1810.04805), Nussbaum et al. 2024 (arXiv:2402.01613). Attention in both directions, and a
layer norm after each part instead of before it. BERT has learned positions and a feed-forward network with GELU, Nomic
BERT has RoPE and SwiGLU. Tokens are of type 0, the first sentence.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_classifier,
    classifier_scores,
    gelu,
    hookimpl,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class BertConfig(Config):
    """Hyperparameters of BERT.

    `n_types` is the number of token types, `rope` that of Nomic BERT.
    """

    n_types: int
    rope: Rope | None = None


class Bert(Architecture):
    """`general.architecture = bert`.

    Of its subclasses some have learned positions (`has_positions`), some `alibi`, the largest slope of ALiBi.
    """

    name = "bert"
    has_positions = True
    alibi: float | None = None

    def configure(self, metadata: Metadata) -> BertConfig:
        """Read the hyperparameters; causal attention is refused."""
        if metadata.get_bool(f"{self.name}.attention.causal", default=False):
            raise ModelFormatError(f"{metadata.source}: {self.name}.attention.causal = true is not supported")
        eps = metadata.get_float(f"{self.name}.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        common = Config.from_gguf(metadata, layer_norm_eps=eps)
        if common.n_head * common.head_dim != common.n_embd:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.attention.head_count = {common.n_head} heads of "
                f"{self.name}.attention.key_length = {common.head_dim} numbers are not "
                f"{self.name}.embedding_length = {common.n_embd}"
            )
        return BertConfig.from_gguf(
            metadata,
            layer_norm_eps=eps,
            n_types=metadata.get_int("tokenizer.ggml.token_type_count", minimum=1, maximum=1 << 10),
            rope=self.rope(metadata, common),
        )

    def rope(self, metadata: Metadata, common: Config) -> Rope | None:
        """RoPE of the architecture, if it has one."""
        return None

    def tensors(self, config: BertConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_kv = c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("token_types", c.n_types, c.n_embd, optional=True)
        if self.has_positions:
            table.add("position_embd", c.context_length, c.n_embd)
        table.add("token_embd_norm", c.n_embd, needs_bias=True)
        add_classifier(table, c)
        for i in range(c.n_layer):
            block = table.block()
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(c.n_embd, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, c.n_embd, bias=True)
            block.add("attn_output_norm", c.n_embd, needs_bias=True)
            self.add_feed_forward(block, c, i)
            block.add("layer_output_norm", c.n_embd, needs_bias=True)
        return table

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Matrices of the feed-forward network of block i."""
        block.add("ffn_up", c.n_ff, c.n_embd, bias=True)
        block.add("ffn_down", c.n_embd, c.n_ff, bias=True)

    def forward(self, g: Graph, config: BertConfig, weights: Weights) -> Value:
        """Token ids to hidden states."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        if w.token_types:
            first, *_ = w.token_types.split(1, c.n_types - 1) if c.n_types > 1 else [w.token_types]
            x = g.add(x, first)
        if self.has_positions:
            x = x + g.positions(w.position_embd)
        x = g.layer_norm(x, w.token_embd_norm, c.layer_norm_eps)
        for i, block in enumerate(w.blk):
            x = self.attended(g, c, block, x)
            x = g.layer_norm(x + self.feed_forward(g, c, i, block, x), block.layer_output_norm, c.layer_norm_eps)
        return x

    def classifier(self, g: Graph, config: BertConfig, weights: Weights) -> Value | None:
        """Scores of a reranker's classes."""
        return classifier_scores(g, config, weights, eps=config.layer_norm_eps)

    def attended(self, g: Graph, c: BertConfig, block: Params, x: Value) -> Value:
        """Normalised sum of a value and the attention to it."""
        return g.layer_norm(x + self.attention(g, c, block, x), block.attn_output_norm, c.layer_norm_eps)

    def attention(self, g: Graph, c: BertConfig, block: Params, x: Value) -> Value:
        """Attention to all tokens of the text."""
        q, k, v = (g.linear(x, param) for param in (block.attn_q, block.attn_k, block.attn_v))
        q, k = self.place(g, c, block, q, k)
        kv = g.store(k, v, head_dim=c.head_dim)
        a = g.attention(q, kv, scale=c.head_dim**-0.5, causal=False, alibi=self.alibi)
        return g.linear(a, block.attn_output)

    def place(self, g: Graph, c: BertConfig, block: Params, q: Value, k: Value) -> tuple[Value, Value]:
        """Queries and keys behind RoPE, if there is one."""
        return (g.rope(q, c.rope, c.head_dim), g.rope(k, c.rope, c.head_dim)) if c.rope else (q, k)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, x: Value) -> Value:
        """Feed-forward network with GELU."""
        return g.linear(g.map(g.linear(x, block.ffn_up), gelu), block.ffn_down)


class NomicBert(Bert):
    """`general.architecture = nomic-bert`."""

    name = "nomic-bert"
    has_positions = False

    def rope(self, metadata: Metadata, common: Config) -> Rope:
        """RoPE of halves of heads (NeoX order)."""
        return Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Matrices of the feed-forward network of block i."""
        block.add("ffn_gate", c.n_ff, c.n_embd)
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, x: Value) -> Value:
        """SwiGLU feed-forward network."""
        return g.linear(g.swiglu(g.linear(x, block.ffn_gate), g.linear(x, block.ffn_up)), block.ffn_down)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(Bert())
    register(NomicBert())
