"""Common parts of all Gemma generations: scaled embeddings, GeGLU, layer types."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from llamacli.plugin import Config, Graph, Metadata, ModelFormatError, Param, Params, Rope, TensorTable, Value, Weights

PADDING = 0
"""Id whose per-layer embeddings tokens have that are given as embeddings."""


@attrs.frozen
class Layer:
    """Layer parameters: RoPE and, in sliding layers, the window in tokens."""

    rope: Rope
    window: int | None = None


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GemmaConfig(Config):
    """Hyperparameters of a Gemma model.

    `layers`: one per block. `attention_scale`: factor of the scores. `attention_softcap`, `final_softcap`: bounds of
    scores and logits, None without.
    """

    layers: tuple[Layer, ...]
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None


def sliding_rope(metadata: Metadata, key: str, rope: Rope) -> Rope:
    """RoPE of sliding layers, with the base under `key` if present."""
    return attrs.evolve(rope, base=metadata.get_float(key, default=rope.base, minimum=2.0))


def softcap(metadata: Metadata, key: str, default: float) -> float | None:
    """Softcap under `key`, or None if it is 0."""
    return metadata.get_float(key, default=default, minimum=0.0) or None


def attention_scale(config: Config, n_layer_27b: int) -> float:
    """Scale of attention scores: 1 / sqrt(head_dim), except in 27B models.

    Those, recognised by their number of layers, use 1 / sqrt(n_embd / n_head).
    """
    return (config.n_embd // config.n_head if config.n_layer == n_layer_27b else config.head_dim) ** -0.5


def add_vocabulary(table: TensorTable, c: Config) -> None:
    """Embeddings, which are the output matrix too, and the final norm."""
    table.add("token_embd", c.n_vocab, c.n_embd)
    table.add("output_norm", c.n_embd)


def add_attention(block: TensorTable, n_embd: int, n_q: int, n_kv: int) -> None:
    """Projections of attention; Q, K and V may be a single tensor."""
    block.add_fused("attn_qkv", attn_q=(n_q, n_embd), attn_k=(n_kv, n_embd), attn_v=(n_kv, n_embd))
    block.add("attn_output", n_embd, n_q)


def add_unused_keys_and_values(block: TensorTable, n_embd: int, n_kv: int, head_dim: int) -> None:
    """Tensors of keys and values that a layer does not read."""
    block.add_unused("attn_k", n_kv, n_embd)
    block.add_unused("attn_v", n_kv, n_embd)
    block.add_unused("attn_k_norm", head_dim)


def add_per_layer_inputs(table: TensorTable, c: Config, width: int) -> None:
    """Per-layer embeddings, and the projection added to them."""
    table.add("per_layer_token_embd", c.n_vocab, c.n_layer * width)
    table.add("per_layer_model_proj", c.n_layer * width, c.n_embd)
    table.add("per_layer_proj_norm", width)


def add_per_layer_input(block: TensorTable, c: Config, width: int) -> None:
    """Matrices of one layer's input."""
    block.add("inp_gate", width, c.n_embd)
    block.add("proj", c.n_embd, width)
    block.add("post_norm", c.n_embd)


def add_feed_forward(block: TensorTable, n_embd: int, n_ff: int) -> None:
    """Matrices of a feed-forward network."""
    block.add("ffn_gate", n_ff, n_embd)
    block.add("ffn_up", n_ff, n_embd)
    block.add("ffn_down", n_embd, n_ff)


def kv_layers(
    metadata: Metadata, name: str, slides: Sequence[bool], n_head_kv: Sequence[int], n_shared: int = 0
) -> list[int]:
    """The layer whose keys and values each layer reads.

    The last `shared_kv_layers`, by default `n_shared`, have none of their own. They read those of the last two layers
    before them, of which the first slides and the second does not.
    """
    key = f"{name}.attention.shared_kv_layers"
    n_shared = metadata.get_int(key, default=n_shared, minimum=0, maximum=len(slides) - 1)
    first = len(slides) - n_shared
    layers = list(range(first)) + [first - (2 if sliding else 1) for sliding in slides[first:]]
    for i, source in enumerate(layers):
        if source < 0 or (slides[i], n_head_kv[i]) != (slides[source], n_head_kv[source]):
            raise ModelFormatError(
                f"{metadata.source}: {key} = {n_shared} makes layer {i} read the keys and values of layer {source}, "
                f"but the layers differ in {name}.attention.sliding_window_pattern or {name}.attention.head_count_kv"
            )
    return layers


def embed(g: Graph, c: Config, w: Weights) -> Value:
    """Embeddings, scaled by the root of their width unless they are given."""
    return g.embed(w.token_embd, c.n_embd**0.5)


def feed_forward(g: Graph, h: Value, block: Params) -> Value:
    """GeGLU feed-forward network."""
    return g.linear(g.geglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)


def per_layer_inputs(g: Graph, x: Value, c: Config, w: Weights, width: int) -> Value:
    """Inputs of all layers, concatenated: projected plus per-layer embeddings."""
    projected = g.scale(g.linear(x, w.per_layer_model_proj), c.n_embd**-0.5)
    projected = g.rms_norm(projected, w.per_layer_proj_norm, c.rms_eps, width)
    looked_up = g.embed(w.per_layer_token_embd, width**0.5, PADDING)
    return g.scale(projected + looked_up, 2**-0.5)


def add_normed_blocks(table: TensorTable, c: GemmaConfig) -> None:
    """Blocks with norms of queries and keys, before and after each part."""
    for _ in c.layers:
        block = table.block()
        block.add("attn_norm", c.n_embd)
        add_attention(block, c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim)
        block.add("attn_q_norm", c.head_dim)
        block.add("attn_k_norm", c.head_dim)
        block.add("post_attention_norm", c.n_embd)
        block.add("ffn_norm", c.n_embd)
        add_feed_forward(block, c.n_embd, c.n_ff)
        block.add("post_ffw_norm", c.n_embd)


def normed_block(g: Graph, c: GemmaConfig, layer: Layer, block: Params, x: Value, *, causal: bool = True) -> Value:
    """Block of `add_normed_blocks`: attention and feed-forward network."""
    h = g.rms_norm(x, block.attn_norm, c.rms_eps)
    q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
    k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
    q, k = (g.rope(value, layer.rope, c.head_dim) for value in (q, k))
    kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim, window=layer.window)
    a = g.attention(q, kv, scale=c.attention_scale, causal=causal)
    x = x + g.rms_norm(g.linear(a, block.attn_output), block.post_attention_norm, c.rms_eps)
    h = feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), block)
    return x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)


def logits(g: Graph, x: Value, output: Param, c: GemmaConfig, w: Weights) -> Value:
    """Final norm, output matrix and, if the model has one, softcap."""
    x = g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), output)
    return g.softcap(x, c.final_softcap) if c.final_softcap else x
