"""Whisper's encoder, a transformer of sound.

Radford et al. 2022 (arXiv:2212.04356). Frames of a mel spectrogram are convolved to tokens, which attend to each other
in both directions; tensors are named `a.*` as in llama.cpp's mmproj files.
"""

from __future__ import annotations

from typing import Any, Self

import attrs

from llamacli.blocks.vision import TransformerConfig, add_layers, transformer_layers
from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, Value
from llamacli.ops.activations import gelu_erf
from llamacli.tensor_table import TensorTable, Weights

N_POSITIONS = 1500
"""Rows of the table of positions: tokens of 30 seconds, which Whisper's encoder hears at a time."""


@attrs.frozen(kw_only=True)
class SoundConfig(TransformerConfig):
    """Hyperparameters of a transformer of sound, keys `clip.audio.*` of a mmproj file.

    - `n_mel`: numbers of a frame of the spectrogram.
    - `n_merge`: rows of the transformer that become one token of the language model.
    - `max_patches`: largest number of patches of a tile.
    - `n_channels`: numbers of a time and a frequency behind convolutions over both.
    """

    n_mel: int
    n_merge: int = 1
    max_patches: int = N_POSITIONS
    n_channels: int = 0

    @classmethod
    def from_gguf(cls, metadata: Metadata, **encoder: Any) -> Self:
        """Read the keys of a mmproj file.

        `encoder` are the fields that the encoder has read itself. Raises ModelFormatError naming the key that is
        missing, of a wrong type or out of range.
        """

        def count(key: str, maximum: int) -> int:
            return metadata.get_int(f"clip.audio.{key}", minimum=1, maximum=maximum)

        n_embd, n_head = count("embedding_length", 1 << 16), count("attention.head_count", 1 << 10)
        if n_embd % n_head:
            raise ModelFormatError(
                f"{metadata.source}: clip.audio.embedding_length = {n_embd} is not a multiple of "
                f"clip.audio.attention.head_count = {n_head}"
            )
        common: dict[str, Any] = {
            "n_embd": n_embd,
            "n_layer": count("block_count", 1 << 10),
            "n_head": n_head,
            "head_dim": n_embd // n_head,
            "n_ff": count("feed_forward_length", 1 << 20),
            "layer_norm_eps": metadata.get_float("clip.audio.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0),
            "n_embd_text": count("projection_dim", 1 << 20),
            "n_mel": count("num_mel_bins", 1 << 10),
            "activation": gelu_erf,
        }
        return cls(**common | encoder)

    @property
    def n_merged(self) -> int:
        """Rows that become one row of the result."""
        return self.n_merge


def whisper_tensors(c: SoundConfig) -> TensorTable:
    """Tensors of Whisper's encoder, without a projector."""
    table = TensorTable()
    table.add("a.conv1d.1", c.n_embd, 3 * c.n_mel, bias=True, needs_bias=True)
    table.add("a.conv1d.2", c.n_embd, 3 * c.n_embd, bias=True, needs_bias=True)
    return sound_layers(table, c)


def sound_layers(table: TensorTable, c: SoundConfig) -> TensorTable:
    """Add the positions and the layers to the tensors of the convolutions."""
    table.add("a.position_embd", N_POSITIONS, c.n_embd)
    add_layers(table, c, "a")
    return table


def whisper(g: Graph, c: SoundConfig, w: Weights) -> Value:
    """Record Whisper's encoder: patches of two frames to hidden states, [n, n_embd]."""
    x, n_frames = g.patches(2 * c.n_mel), 2 * N_POSITIONS
    x = g.map(g.conv_2d(x, w.a_conv1d_1, (2, 1), n_frames, kernel=(3, 1)), gelu_erf)
    x = g.map(g.conv_2d(x, w.a_conv1d_2, (2, 1), n_frames, kernel=(3, 1), stride=(2, 1)), gelu_erf)
    return sound_tower(g, c, w, x)


def sound_tower(g: Graph, c: SoundConfig, w: Weights, x: Value) -> Value:
    """Record the layers behind the convolutions."""
    x = transformer_layers(g, c, x + g.positions(w.a_position_embd), w.a_blk)[-1]
    return g.layer_norm(x, w.a_post_ln, c.layer_norm_eps) if w.a_post_ln else x
