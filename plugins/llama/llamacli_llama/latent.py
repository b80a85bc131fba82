"""MiniCPM3 and PLM: latent attention, cached as keys and values.

Hu et al. 2024 (arXiv:2404.06395), Deng et al. 2025 (arXiv:2503.12167). Keys and values of all heads are computed from
one compressed vector (Liu et al. 2024, arXiv:2405.04434), beside a key that RoPE rotates and all heads share.
"""

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
    hookimpl,
    relu_squared,
)

LLAMACLI_API = 1

EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH = 12.0, 1.4, 256
"""MiniCPM3's muP scales, which llama.cpp takes for granted."""


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class LatentConfig(Config):
    """Hyperparameters of latent attention.

    `rank_q` and `rank_kv` are the widths of compressed queries (0: not compressed) and of compressed keys and values.
    Keys have `nope_dim` numbers a head without positions, then those that `rope` rotates; values have `value_dim`.
    """

    rope: Rope
    rank_q: int
    rank_kv: int
    nope_dim: int
    value_dim: int


class Latent(Architecture):
    """Architecture with methods to override.

    `interleaved`: RoPE rotates adjacent pairs, not halves of heads.
    """

    interleaved = False

    def configure(self, metadata: Metadata) -> LatentConfig:
        """Read the hyperparameters.

        Files of MiniCPM3 lack the width of values, which is that of the embedding divided by the heads.
        """

        def count(key: str, **limits: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", **{"minimum": 1, "maximum": 1 << 20} | limits)

        n_embd, n_head, head_dim = (
            count(key) for key in ("embedding_length", "attention.head_count", "attention.key_length")
        )
        value_dim = count("attention.value_length", default=max(1, n_embd // n_head))
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=self.interleaved)
        if rope.n_dims == head_dim:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.rope.dimension_count = {rope.n_dims} must be below "
                f"{self.name}.attention.key_length = {head_dim}"
            )
        return LatentConfig.from_gguf(
            metadata,
            head_dim=head_dim,
            n_head_kv=count("attention.head_count_kv", default=n_head, minimum=n_head, maximum=n_head),
            rope=attrs.evolve(rope, first=head_dim - rope.n_dims),
            rank_q=self.rank_q(metadata),
            rank_kv=count("attention.kv_lora_rank"),
            nope_dim=head_dim - rope.n_dims,
            value_dim=value_dim,
        )

    def rank_q(self, metadata: Metadata) -> int:
        """Width of compressed queries, 0 if they are not compressed."""
        return 0

    def tensors(self, config: LatentConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            if c.rank_q:
                block.add("attn_q_a", c.rank_q, c.n_embd)
                block.add("attn_q_a_norm", c.rank_q)
                block.add("attn_q_b", c.n_head * c.head_dim, c.rank_q)
            else:
                block.add("attn_q", c.n_head * c.head_dim, c.n_embd)
            block.add("attn_kv_a_mqa", c.rank_kv + c.rope.n_dims, c.n_embd)
            block.add("attn_kv_a_norm", c.rank_kv)
            block.add("attn_kv_b", c.n_head * (c.nope_dim + c.value_dim), c.rank_kv)
            block.add("attn_output", c.n_embd, c.n_head * c.value_dim)
            block.add("ffn_norm", c.n_embd)
            self.add_feed_forward(block, c)
        return table

    def add_feed_forward(self, block: TensorTable, c: LatentConfig) -> None:
        """Feed-forward network of one block."""
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def forward(self, g: Graph, config: LatentConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = self.embed(g, w)
        for block in w.blk:
            x = x + self.branch(g, c, self.attend(g, c, w, block, g.rms_norm(x, block.attn_norm, c.rms_eps)))
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + self.branch(g, c, self.feed_forward(g, block, h))
        return self.output(g, c, w, g.rms_norm(x, w.output_norm, c.rms_eps))

    def attend(self, g: Graph, c: LatentConfig, w: Weights, block: Params, h: Value) -> Value:
        """Latent attention of one layer over its normed input."""
        if c.rank_q:
            compressed = g.rms_norm(g.linear(h, block.attn_q_a), block.attn_q_a_norm, c.rms_eps)
            q = g.linear(compressed, block.attn_q_b)
        else:
            q = g.linear(h, block.attn_q)
        latent, shared = block.attn_kv_a_mqa.split(c.rank_kv, c.rope.n_dims)
        kv = g.linear(g.rms_norm(g.linear(h, latent), block.attn_kv_a_norm, c.rms_eps), block.attn_kv_b)
        k, v = self.heads(
            g, c, kv, self.rotate(g, attrs.evolve(c.rope, first=0), c.rope.n_dims, w, g.linear(h, shared))
        )
        stored = g.store(k, v, head_dim=c.head_dim, value_dim=c.value_dim)
        a = g.attention(self.rotate(g, c.rope, c.head_dim, w, q), stored, scale=c.head_dim**-0.5)
        return g.linear(a, block.attn_output)

    def heads(self, g: Graph, c: LatentConfig, kv: Value, shared: Value) -> tuple[Value, Value]:
        """Keys and values of all heads."""
        n = c.nope_dim + c.value_dim
        k = g.concat(g.columns(kv, 0, c.nope_dim, of=n), shared, of=(c.nope_dim, c.rope.n_dims))
        return k, g.columns(kv, c.nope_dim, c.value_dim, of=n)

    def rotate(self, g: Graph, rope: Rope, head_dim: int, w: Weights, heads: Value) -> Value:
        """Queries or keys after RoPE."""
        return g.rope(heads, rope, head_dim)

    def embed(self, g: Graph, w: Weights) -> Value:
        """Embeddings of the tokens."""
        return g.embed(w.token_embd)

    def branch(self, g: Graph, c: LatentConfig, h: Value) -> Value:
        """Result of a branch, to be added to the residual stream."""
        return h

    def feed_forward(self, g: Graph, block: Params, h: Value) -> Value:
        """Two matrices with max(x, 0)^2 between them."""
        return g.linear(g.map(g.linear(h, block.ffn_up), relu_squared), block.ffn_down)

    def output(self, g: Graph, c: LatentConfig, w: Weights, x: Value) -> Value:
        """Logits of the last normed values."""
        return g.linear(x, w.token_embd)


class PLM(Latent):
    """`general.architecture = plm`."""

    name = "plm"
    interleaved = True


class MiniCPM3(Latent):
    """`general.architecture = minicpm3`."""

    name = "minicpm3"

    def rank_q(self, metadata: Metadata) -> int:
        """Width of compressed queries."""
        return metadata.get_int("minicpm3.attention.q_lora_rank", minimum=1, maximum=1 << 20)

    def tensors(self, config: LatentConfig) -> TensorTable:
        """The tensors of a file, with factors of LongRoPE."""
        table = super().tensors(config)
        table.add("output", config.n_vocab, config.n_embd, optional=True)
        table.add("rope_factors_long", config.rope.n_dims // 2, optional=True)
        table.add("rope_factors_short", config.rope.n_dims // 2, optional=True)
        return table

    def add_feed_forward(self, block: TensorTable, c: LatentConfig) -> None:
        """Feed-forward network of one block."""
        super().add_feed_forward(block, c)
        block.add("ffn_gate", c.n_ff, c.n_embd)

    def rotate(self, g: Graph, rope: Rope, head_dim: int, w: Weights, heads: Value) -> Value:
        """Queries or keys after RoPE."""
        return g.rope(heads, rope, head_dim, w.rope_factors_short, w.rope_factors_long)

    def embed(self, g: Graph, w: Weights) -> Value:
        """Scaled embeddings of the tokens."""
        return g.scale(g.embed(w.token_embd), EMBEDDING_SCALE)

    def branch(self, g: Graph, c: LatentConfig, h: Value) -> Value:
        """Scaled branch of the residual stream."""
        return g.scale(h, DEPTH_SCALE * c.n_layer**-0.5)

    def feed_forward(self, g: Graph, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network."""
        return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)

    def output(self, g: Graph, c: LatentConfig, w: Weights, x: Value) -> Value:
        """Logits of the last normed values, which are scaled."""
        return g.linear(g.scale(x, BASE_WIDTH / c.n_embd), w.output or w.token_embd)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register both architectures."""
    register(MiniCPM3())
    register(PLM())
