"""Vision transformers (ViT) of media encoders.

Dosovitskiy et al. 2020 (arXiv:2010.11929). Patches of a picture are its tokens, which attend to each other in both
directions; tensors are named `v.*` as in llama.cpp's mmproj files.
"""

from __future__ import annotations

from typing import Self

import attrs

from llamacli.architecture import Params, TensorTable, Weights
from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, KeyValues, Param, Value
from llamacli.ops.activations import Formula, gelu, gelu_quick, silu

MAX_SIDE = 1 << 14
"""Largest side of a tile that a file may ask for, in pixels."""


@attrs.frozen(kw_only=True)
class VisionConfig:
    """Hyperparameters of a vision transformer, keys `clip.vision.*` of a mmproj file.

    - `n_embd`, `n_layer`, `n_head`, `head_dim`, `n_ff`, `layer_norm_eps`: those of the transformer.
    - `image_size`, `patch_size`: the sides of a tile and of a patch, in pixels.
    - `n_merge`: patches a side that become one token of the language model.
    - `n_embd_text`: the width of these, which is the embedding length of the language model.
    - `mean`, `std`: what the three colours are normalised with, of numbers from 0 to 1.
    - `activation`: that of the feed-forward networks.
    - `longest_edge`: the longer side that a picture is resized to before it is cut into tiles, 0 without the key.
    """

    n_embd: int
    n_layer: int
    n_head: int
    head_dim: int
    n_ff: int
    layer_norm_eps: float
    image_size: int
    patch_size: int
    n_merge: int
    n_embd_text: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    activation: Formula
    longest_edge: int = 0

    @classmethod
    def from_gguf(cls, metadata: Metadata, *, n_merge: int = 1) -> Self:
        """Read the keys of a mmproj file.

        `n_merge` is the default of `projector.scale_factor`. Raises ModelFormatError naming the key that is missing, of
        a wrong type or out of range.
        """

        def count(key: str, maximum: int, **default: int) -> int:
            return metadata.get_int(f"clip.vision.{key}", minimum=1, maximum=maximum, **default)

        n_embd, n_head = count("embedding_length", 1 << 16), count("attention.head_count", 1 << 10)
        if n_embd % n_head:
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.embedding_length = {n_embd} is not a multiple of "
                f"clip.vision.attention.head_count = {n_head}"
            )
        image_size, patch_size = count("image_size", MAX_SIDE), count("patch_size", 1 << 10)
        n_merge = count("projector.scale_factor", 1 << 6, default=n_merge)
        if image_size % (patch_size * n_merge):
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.image_size = {image_size} is not a multiple of {n_merge} patches of "
                f"clip.vision.patch_size = {patch_size}"
            )
        is_gelu, is_silu = (metadata.get_bool(f"clip.use_{name}", default=False) for name in ("gelu", "silu"))
        if is_gelu and is_silu:
            raise ModelFormatError(f"{metadata.source}: clip.use_gelu and clip.use_silu are both true")
        return cls(
            n_embd=n_embd,
            n_layer=count("block_count", 1 << 10),
            n_head=n_head,
            head_dim=n_embd // n_head,
            n_ff=count("feed_forward_length", 1 << 20),
            layer_norm_eps=metadata.get_float("clip.vision.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0),
            image_size=image_size,
            patch_size=patch_size,
            n_merge=n_merge,
            n_embd_text=count("projection_dim", 1 << 20),
            mean=metadata.get_floats("clip.vision.image_mean", 3),
            std=metadata.get_floats("clip.vision.image_std", 3, minimum=1e-6),
            activation=gelu if is_gelu else silu if is_silu else gelu_quick,
            longest_edge=metadata.get_int("clip.vision.preproc_image_size", 0, minimum=0, maximum=MAX_SIDE),
        )

    @property
    def n_patches(self) -> int:
        """Number of patches of a tile."""
        return (self.image_size // self.patch_size) ** 2


def vision_tensors(c: VisionConfig) -> TensorTable:
    """Tensors of a vision transformer with learned positions."""
    table = TensorTable()
    table.add_tensor("v.patch_embd.weight", c.n_embd, 3 * c.patch_size**2)
    table.add_tensor("v.patch_embd.bias", c.n_embd, optional=True)
    table.add("v.position_embd", c.n_patches, c.n_embd)
    table.add("v.pre_ln", c.n_embd, bias=True, optional=True)
    for _ in range(c.n_layer):
        block = table.block("v.blk")
        block.add("ln1", c.n_embd, bias=True)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            block.add(name, c.n_embd, c.n_embd, bias=True)
        block.add("ln2", c.n_embd, bias=True)
        # Old files have the names of the two matrices the other way round.
        block.add("ffn_up", c.n_ff, c.n_embd, bias=True, other=(c.n_embd, c.n_ff))
        block.add("ffn_down", c.n_embd, c.n_ff, bias=True, other=(c.n_ff, c.n_embd))
    table.add("v.post_ln", c.n_embd, bias=True, optional=True)
    return table


def vision_tower(g: Graph, c: VisionConfig, w: Weights) -> Value:
    """Record a vision transformer: patches to hidden states, [n_patches, n_embd]."""
    bias: Param | None = w.v_patch_embd_bias
    patch_embd = Param(w.v_patch_embd_weight.weight, bias.weight if bias else None)
    x = g.linear(g.patches(3 * c.patch_size**2), patch_embd)
    x = x + g.positions(w.v_position_embd)
    if w.v_pre_ln:
        x = g.layer_norm(x, w.v_pre_ln, c.layer_norm_eps)
    kv: KeyValues | None = None
    for block in w.v_blk:
        normed = g.layer_norm(x, block.ln1, c.layer_norm_eps)
        q, k, v = (g.linear(normed, param) for param in (block.attn_q, block.attn_k, block.attn_v))
        # All layers store into one: each attends only to what it has just stored, of all patches.
        kv = g.store(k, v, head_dim=c.head_dim, into=kv)
        x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5, causal=False), block.attn_out)
        x = x + _feed_forward(g, c, block, g.layer_norm(x, block.ln2, c.layer_norm_eps))
    return g.layer_norm(x, w.v_post_ln, c.layer_norm_eps) if w.v_post_ln else x


def _feed_forward(g: Graph, c: VisionConfig, block: Params, x: Value) -> Value:
    up, down = block.ffn_up, block.ffn_down
    if up.weight.shape != (c.n_ff, c.n_embd):
        up, down = down, up
    return g.linear(g.map(g.linear(x, up), c.activation), down)
