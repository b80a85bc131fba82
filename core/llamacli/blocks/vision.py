"""Vision transformers (ViT) of media encoders.

Dosovitskiy et al. 2020 (arXiv:2010.11929). Patches of a picture are its tokens, which attend to each other in both
directions; tensors are named `v.*` as in llama.cpp's mmproj files.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import attrs

from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, KeyValues, Param, Value
from llamacli.ops.activations import Formula, gelu, gelu_quick, silu
from llamacli.ops.rope import Rope
from llamacli.tensor_table import Params, TensorTable, Weights

MAX_SIDE = 1 << 14
"""Largest side of a tile that a file may ask for, in pixels."""


@attrs.frozen(kw_only=True)
class TransformerConfig(abc.ABC):
    """Hyperparameters of a media encoder's transformer; see `VisionConfig`."""

    n_embd: int
    n_layer: int
    n_head: int
    head_dim: int
    n_ff: int
    layer_norm_eps: float
    n_embd_text: int
    activation: Formula
    rms: bool = False
    gated: bool = False
    ropes: tuple[Rope, ...] = ()
    class_token: Literal["", "dropped", "kept"] = ""
    layer_scale: bool = False
    qk_norm: Literal["", "row", "head"] = ""
    v_norm: bool = False
    post_norms: bool = False
    score_scale: float = 0.0
    clamps: Mapping[str, tuple[float, float, float, float]] = attrs.field(factory=dict)
    causal: bool = False
    n_unread: int = 0
    full_attention: int = 0

    @property
    @abc.abstractmethod
    def n_merged(self) -> int:
        """Patches that become one row of the result."""

    @property
    def n_behind(self) -> int:
        """Rows behind the patches: a group with the class token, or none."""
        return self.n_merged if self.class_token else 0

    @property
    def n_embd_out(self) -> int:
        """Numbers of a row that the encoder makes."""
        return self.n_embd_text


@attrs.frozen(kw_only=True)
class VisionConfig(TransformerConfig):
    """Hyperparameters of a vision transformer, keys `clip.vision.*` of a mmproj file.

    Of the file:

    - `n_embd`, `n_layer`, `n_head`, `head_dim`, `n_ff`, `layer_norm_eps`: the transformer's.
    - `image_size`, `patch_size`: the sides of a tile and of a patch, in pixels.
    - `n_merge`: patches a side that become one token of the language model.
    - `n_embd_text`: the width of these, which is the embedding length of the language model.
    - `mean`, `std`: of the three colours, for numbers from 0 to 1.
    - `activation`: in the feed-forward networks.
    - `longest_edge`: the longer side that a picture is resized to before it is cut into tiles, 0 without the key.

    Of the encoder:

    - `tokens`: the smallest and the largest number of tokens of a tile, (0, 0) where all tiles are squares of
      `image_size`.
    - `tile_sizes`: widths and heights in pixels into which a picture is resized before it is cut into squares.
    - `n_frames`: matrices of patches, whose products are added; a still picture is all frames of a short video.
    - `rms`: norms are RMSNorm, not LayerNorm. `gated`: feed-forward networks have a gate.
    - `positions`: "learned" ones of the squares' patches, those of a "grid" that is resized to the picture's, with
      its "corners" in their place, of columns and rows, "axes" of `n_positions` each, or none, "".
    - `ropes`: RoPE of queries and keys; a patch's positions are its number, row and column.
    - `class_token`: a token behind the patches, which attends to all of them: "dropped" in the end, or "kept" in the
      place of the first patch.
    - `layer_scale`: what attention and the feed-forward networks add may have factors. `qk_norm`: queries and keys may
      have norms, of whole rows or of each "head". `v_norm`: values have one without a weight. `post_norms`: what is
      added may have norms, and the layer's result a factor.
    - `score_scale`: factor of scores, 0 for one over the root of `head_dim`.
    - `clamps`: lower and upper bounds of a matrix' input and of its output, by the matrix' name.
    - `causal`: the language model attends to the tokens in order even if `MediaEncoder.is_bidirectional`.
    - `n_unread`: last layers of a file, which are not read.
    - `full_attention`: every so many layers one attends to the whole picture, the others to windows; 0: all do.
    - `n_projector`: width of the projector's hidden layer, where it is not `n_embd_text`.
    - `deepstack`: layers whose hidden states are embeddings too, beside the last layer.
    """

    image_size: int
    patch_size: int
    n_merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    longest_edge: int = 0
    tokens: tuple[int, int] = (0, 0)
    tile_sizes: tuple[tuple[int, int], ...] = ()
    n_frames: int = 1
    positions: Literal["", "learned", "grid", "corners", "axes"] = "learned"
    n_positions: int = 0
    n_projector: int = 0
    deepstack: tuple[int, ...] = ()

    @classmethod
    def from_gguf(
        cls,
        metadata: Metadata,
        *,
        n_merge: int = 1,
        merge_key: str = "projector.scale_factor",
        ropes: Callable[[int], tuple[Rope, ...]] | None = None,
        **encoder: Any,
    ) -> Self:
        """Read the keys of a mmproj file.

        `n_merge` is the default of `merge_key`; `ropes` makes the RoPE variants of a head's dimensions, a multiple of
        four; `encoder` are the fields that the file does not have, and those that the encoder has read itself. Raises
        ModelFormatError naming the key that is missing, of a wrong type or out of range.
        """

        def count(key: str, maximum: int, **default: int) -> int:
            return metadata.get_int(f"clip.vision.{key}", minimum=1, maximum=maximum, **default)

        n_embd, n_head = count("embedding_length", 1 << 16), count("attention.head_count", 1 << 10)
        if n_embd % n_head:
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.embedding_length = {n_embd} is not a multiple of "
                f"clip.vision.attention.head_count = {n_head}"
            )
        if ropes is not None and n_embd // n_head % 4:
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.embedding_length = {n_embd} has {n_embd // n_head} numbers a head, "
                "which RoPE of rows and columns does not divide by 4"
            )
        image_size, patch_size = count("image_size", MAX_SIDE), count("patch_size", 1 << 10)
        n_merge = count(merge_key, 1 << 6, default=n_merge)
        group = patch_size if encoder.get("tokens") else patch_size * n_merge
        if image_size % group:
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.image_size = {image_size} is not a multiple of {group // patch_size} "
                f"patches of clip.vision.patch_size = {patch_size}"
            )
        is_gelu, is_silu = (metadata.get_bool(f"clip.use_{name}", default=False) for name in ("gelu", "silu"))
        if is_gelu and is_silu:
            raise ModelFormatError(f"{metadata.source}: clip.use_gelu and clip.use_silu are both true")
        common: dict[str, Any] = {
            "n_embd": n_embd,
            "n_layer": count("block_count", 1 << 10),
            "n_head": n_head,
            "head_dim": n_embd // n_head,
            "ropes": ropes(n_embd // n_head) if ropes else (),
            "n_ff": count("feed_forward_length", 1 << 20),
            "layer_norm_eps": metadata.get_float("clip.vision.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0),
            "image_size": image_size,
            "patch_size": patch_size,
            "n_merge": n_merge,
            "n_embd_text": count("projection_dim", 1 << 20),
            "mean": metadata.get_floats("clip.vision.image_mean", 3),
            "std": metadata.get_floats("clip.vision.image_std", 3, minimum=1e-6),
            "activation": gelu if is_gelu else silu if is_silu else gelu_quick,
            "longest_edge": metadata.get_int("clip.vision.preproc_image_size", 0, minimum=0, maximum=MAX_SIDE),
        }
        return cls(**common | encoder)

    @property
    def n_patches(self) -> int:
        """Number of patches of a square of `image_size`."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def max_patches(self) -> int:
        """Largest number of patches of a tile."""
        return self.tokens[1] * self.n_merged or self.n_patches

    @property
    def n_merged(self) -> int:
        """Patches that become one row of the result."""
        return self.n_merge**2

    @property
    def n_embd_out(self) -> int:
        """Numbers of a row that the encoder makes."""
        return self.n_embd_text * (1 + len(self.deepstack))


def vision_tensors(c: VisionConfig) -> TensorTable:
    """Tensors of a vision transformer, without a projector."""
    table = TensorTable()
    table.add_tensor("v.patch_embd.weight", c.n_embd, 3 * c.patch_size**2)
    for frame in range(1, c.n_frames):
        table.add_tensor(f"v.patch_embd.weight.{frame}", c.n_embd, 3 * c.patch_size**2)
    table.add_tensor("v.patch_embd.bias", c.n_embd, optional=True)
    if c.class_token:
        table.add_tensor("v.class_embd", c.n_embd)
    if c.positions:
        n_positions = 2 * c.n_positions if c.positions == "axes" else c.n_patches + bool(c.class_token)
        table.add("v.position_embd", n_positions, c.n_embd)
    table.add("v.pre_ln", c.n_embd, bias=not c.rms, optional=True)
    add_layers(table, c, "v")
    return table


def add_layers(table: TensorTable, c: TransformerConfig, prefix: str) -> None:
    """Add the tensors of a transformer, whose names begin with `prefix`."""
    bias = not c.rms
    for i in range(c.n_layer + c.n_unread):
        block, square = table.block(f"{prefix}.blk", unused=i >= c.n_layer), (c.n_embd, c.n_embd)
        block.add("ln1", c.n_embd, bias=bias)
        block.add_fused("attn_qkv", bias=True, attn_q=square, attn_k=square, attn_v=square)
        for name in ("attn_q_norm", "attn_k_norm") if c.qk_norm else ():
            block.add(name, c.head_dim if c.qk_norm == "head" else c.n_embd, optional=True)
        for name in ("attn_post_norm", "ffn_post_norm") if c.post_norms else ():
            block.add(name, c.n_embd, optional=True)
        if c.post_norms:
            block.add("out_scale", 1, optional=True)
        for name in ("ls1", "ls2") if c.layer_scale else ():
            block.add(name, c.n_embd, optional=True)
        block.add("attn_out", *square, bias=True)
        block.add("ln2", c.n_embd, bias=bias)
        if c.gated:
            block.add("ffn_gate", c.n_ff, c.n_embd, bias=True)
        # Old files have the names of the two matrices the other way round.
        block.add("ffn_up", c.n_ff, c.n_embd, bias=True, other=(c.n_embd, c.n_ff))
        block.add("ffn_down", c.n_embd, c.n_ff, bias=True, other=(c.n_ff, c.n_embd))
    table.add(f"{prefix}.post_ln", c.n_embd, bias=bias, optional=True)


def vision_tower(g: Graph, c: VisionConfig, w: Weights) -> Value:
    """Record a vision transformer: patches to hidden states, [n_patches, n_embd]."""
    return vision_layers(g, c, w)[-1]


def vision_layers(g: Graph, c: VisionConfig, w: Weights) -> list[Value]:
    """Record a vision transformer: hidden states of all layers, then the result.

    The result is the last layer's, normalised where the file has a norm behind it.
    """
    layers = transformer_layers(g, c, _patch_embeddings(g, c, w), w.v_blk, is_filled=c.n_behind > 1)
    return [*layers[1:], _norm(g, c, layers[-1], w.v_post_ln) if w.v_post_ln else layers[-1]]


def transformer_layers(
    g: Graph, c: TransformerConfig, x: Value, blocks: Iterable[Params], *, is_filled: bool = False
) -> list[Value]:
    """Record the layers of a transformer: x and the hidden states.

    With `is_filled` rows behind the others are outside of the one window, the whole input.
    """
    layers, kv = [x], None
    for i, block in enumerate(blocks, start=1):
        in_windows = is_filled or (bool(c.full_attention) and i % c.full_attention != 0)
        x, kv = _attention(g, c, block, x, kv, in_windows=in_windows)
        x = x + _added(g, c, block, "ffn_post_norm", "ls2", _feed_forward(g, c, block, _norm(g, c, x, block.ln2)))
        if c.post_norms and block.out_scale:
            x = g.scale(x, block.out_scale)
        layers.append(x)
    return layers


def bounded(g: Graph, c: TransformerConfig, x: Value, param: Param) -> Value:
    """Record a matrix product, its input and output within bounds."""
    if param.weight.name not in c.clamps:
        return g.linear(x, param)
    low, high, least, most = c.clamps[param.weight.name]
    return g.clamp(g.linear(g.clamp(x, low, high), param), least, most)


def mlp(g: Graph, x: Value, up: Param, down: Param, activation: Formula = gelu) -> Value:
    """Record a feed-forward network of two matrices."""
    return g.linear(g.map(g.linear(x, up), activation), down)


def _patch_embeddings(g: Graph, c: VisionConfig, w: Weights) -> Value:
    bias: Param | None = w.v_patch_embd_bias
    patches = g.patches(3 * c.patch_size**2)
    x = g.linear(patches, Param(w.v_patch_embd_weight.weight, bias.weight if bias and c.n_frames == 1 else None))
    for frame in range(1, c.n_frames):
        x = x + g.linear(patches, getattr(w, f"v_patch_embd_weight_{frame}"))
    if bias and c.n_frames > 1:
        x = g.add(x, bias)
    if c.class_token:
        x = g.class_token(x, w.v_class_embd)
    if c.positions == "learned":
        x = x + g.positions(w.v_position_embd)
    elif c.positions == "axes":
        x = x + g.axis_positions(w.v_position_embd)
    elif c.positions:
        x = x + g.grid_positions(w.v_position_embd, align_corners=c.positions == "corners")
    return _norm(g, c, x, w.v_pre_ln) if w.v_pre_ln else x


def _norm(g: Graph, c: TransformerConfig, x: Value, param: Param, head_dim: int | None = None) -> Value:
    return (g.rms_norm if c.rms else g.layer_norm)(x, param, c.layer_norm_eps, head_dim)


def _attention(
    g: Graph, c: TransformerConfig, block: Params, x: Value, kv: KeyValues | None, *, in_windows: bool
) -> tuple[Value, KeyValues]:
    normed = _norm(g, c, x, block.ln1)
    q, k, v = (bounded(g, c, normed, param) for param in (block.attn_q, block.attn_k, block.attn_v))
    head_dim = c.head_dim if c.qk_norm == "head" else None
    if c.qk_norm and block.attn_q_norm:
        q = _norm(g, c, q, block.attn_q_norm, head_dim)
    if c.qk_norm and block.attn_k_norm:
        k = _norm(g, c, k, block.attn_k_norm, head_dim)
    if c.v_norm:
        v = g.rms_norm(v, None, c.layer_norm_eps, c.head_dim)
    for rope in c.ropes:
        q, k = (g.rope(heads, rope, c.head_dim) for heads in (q, k))
    # All layers store into one: each attends only to what it has just stored, of all patches.
    kv = g.store(k, v, head_dim=c.head_dim, into=kv)
    seen = g.attention(q, kv, scale=c.score_scale or c.head_dim**-0.5, causal=in_windows, spans=in_windows)
    return x + _added(g, c, block, "attn_post_norm", "ls1", bounded(g, c, seen, block.attn_out)), kv


def _added(g: Graph, c: TransformerConfig, block: Params, norm: str, scale: str, x: Value) -> Value:
    factors = getattr(block, scale) if c.layer_scale else None
    x = g.mul(x, factors) if factors else x
    weight = getattr(block, norm) if c.post_norms else None
    return _norm(g, c, x, weight) if weight else x


def _feed_forward(g: Graph, c: TransformerConfig, block: Params, x: Value) -> Value:
    up, down = block.ffn_up, block.ffn_down
    if up.weight.shape != (c.n_ff, c.n_embd):
        up, down = down, up
    if not c.gated:
        return mlp(g, x, up, down, c.activation)
    gate = g.map(bounded(g, c, x, block.ffn_gate), c.activation)
    return bounded(g, c, g.mul(gate, bounded(g, c, x, up)), down)
