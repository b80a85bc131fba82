"""T5: encoder-decoder models, and their encoders alone.

Raffel et al. 2020 (arXiv:1910.10683): attention has no scale, and a bias by distance of a stack's first block. As in
llama.cpp, the logits of files without an output matrix are products with the embeddings, not scaled.
"""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    KeyValues,
    Metadata,
    Params,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    relu,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class T5Config(Config):
    """Hyperparameters of T5: `n_layer` blocks in the encoder, `n_decoder` in the decoder."""

    n_decoder: int = 0
    n_buckets: int


class T5Encoder(Architecture):
    """`general.architecture = t5encoder`."""

    name = "t5encoder"

    def configure(self, metadata: Metadata, **decoder: int) -> T5Config:
        """Read the hyperparameters, but those of a decoder."""
        n_buckets = metadata.get_int(f"{self.name}.attention.relative_buckets_count", minimum=4, maximum=255)
        metadata.get_float(f"{self.name}.attention.layer_norm_epsilon", default=0.0)  # converters write it too
        return T5Config.from_gguf(metadata, n_buckets=n_buckets, **decoder)

    def tensors(self, config: T5Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("enc.output_norm", c.n_embd)
        for i in range(c.n_layer):
            add_block(table.block("enc.blk"), c, "attn", is_first=not i)
        if c.n_decoder:
            table.add("output", c.n_vocab, c.n_embd, optional=True)
            table.add("dec.output_norm", c.n_embd)
        else:
            table.add_unused("output", c.n_vocab, c.n_embd)
        for i in range(c.n_decoder):
            block = table.block("dec.blk")
            add_block(block, c, "attn", "cross_attn", is_first=not i)
            block.add_unused("cross_attn_rel_b", c.n_buckets, c.n_head)
        return table

    def forward(self, g: Graph, config: T5Config, weights: Weights) -> Value:
        """Token ids to hidden states."""
        return self.encode(g, config, weights)[0]

    def encode(self, g: Graph, c: T5Config, w: Weights) -> tuple[Value, KeyValues]:
        """Output of the encoder, and the cells that its attention has used."""
        x, cells = g.embed(w.token_embd), None
        for block in w.enc_blk:
            x, cells = attend(g, c, block, w.enc_blk[0], x, cells, causal=False)
            x = x + feed_forward(g, c, block, x)
        assert cells is not None
        return g.rms_norm(x, w.enc_output_norm, c.rms_eps), cells


class T5(T5Encoder):
    """`general.architecture = t5`."""

    name = "t5"

    def configure(self, metadata: Metadata, **decoder: int) -> T5Config:
        """Read the hyperparameters; a context holds two texts of T5's length."""
        n_layer = metadata.get_int("t5.block_count", minimum=1, maximum=1 << 10)
        decoder = {
            "n_decoder": metadata.get_int("t5.decoder_block_count", default=n_layer, minimum=1, maximum=1 << 10),
            "decoder_start": metadata.get_int("t5.decoder_start_token_id", minimum=0, maximum=(1 << 31) - 1),
            "n_ctx": 2 * metadata.get_int("t5.context_length", minimum=1, maximum=1 << 20),
        }
        return super().configure(metadata, **decoder)

    def forward(self, g: Graph, config: T5Config, weights: Weights) -> Value:
        """Token ids to logits.

        The cells of a block of the decoder have the keys and values of the encoder's text first, then the decoder's.
        """
        c, w = config, weights
        encoded, cells = self.encode(g, c, w)
        texts: list[KeyValues] = []
        for block in w.dec_blk:
            k, v = g.linear(encoded, block.cross_attn_k), g.linear(encoded, block.cross_attn_v)
            texts.append(g.store(k, v, head_dim=c.head_dim, into=None if texts else cells))
        g.decoder()
        x = g.embed(w.token_embd)
        for block, text in zip(w.dec_blk, texts, strict=True):
            x, _ = attend(g, c, block, w.dec_blk[0], x, text, causal=True)
            q = g.linear(g.rms_norm(x, block.cross_attn_norm, c.rms_eps), block.cross_attn_q)
            x = x + g.linear(g.attention(q, text, scale=1.0, cross=True), block.cross_attn_o)
            x = x + feed_forward(g, c, block, x)
        return g.linear(g.rms_norm(x, w.dec_output_norm, c.rms_eps), w.output or w.token_embd)


def add_block(block: TensorTable, c: T5Config, *attentions: str, is_first: bool) -> None:
    """Add the tensors of a block of the encoder or decoder."""
    for name in attentions:
        block.add(f"{name}_norm", c.n_embd)
        for part, n_head in (("q", c.n_head), ("k", c.n_head_kv), ("v", c.n_head_kv)):
            block.add(f"{name}_{part}", n_head * c.head_dim, c.n_embd)
        block.add(f"{name}_o", c.n_embd, c.n_head * c.head_dim)
    block.add("attn_rel_b", c.n_buckets, c.n_head, optional=not is_first)
    block.add("ffn_norm", c.n_embd)
    block.add("ffn_gate", c.n_ff, c.n_embd, optional=True)
    block.add("ffn_up", c.n_ff, c.n_embd)
    block.add("ffn_down", c.n_embd, c.n_ff)


def attend(
    g: Graph, c: T5Config, block: Params, first: Params, x: Value, cells: KeyValues | None, *, causal: bool
) -> tuple[Value, KeyValues]:
    """x with its self-attention added, and the cells that this uses."""
    y = g.rms_norm(x, block.attn_norm, c.rms_eps)
    q, k, v = (g.linear(y, param) for param in (block.attn_q, block.attn_k, block.attn_v))
    kv = g.store(k, v, head_dim=c.head_dim, into=cells)
    bias = block.attn_rel_b or first.attn_rel_b
    return x + g.linear(g.attention(q, kv, scale=1.0, bias=bias, causal=causal), block.attn_o), kv


def feed_forward(g: Graph, c: T5Config, block: Params, x: Value) -> Value:
    """Feed-forward network, with a gate or without."""
    y = g.rms_norm(x, block.ffn_norm, c.rms_eps)
    up = g.linear(y, block.ffn_up)
    inner = g.geglu(g.linear(y, block.ffn_gate), up) if block.ffn_gate else g.map(up, relu)
    return g.linear(inner, block.ffn_down)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(T5())
    register(T5Encoder())
