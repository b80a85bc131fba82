"""Tiny text models with encoders of sound, and sounds."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from llamacli.architecture import Architecture
from llamacli.blocks.sound import N_POSITIONS, SoundConfig
from llamacli.blocks.vision import mlp, transformer_layers
from llamacli.gguf import Metadata
from llamacli.graph import Graph, Value
from llamacli.media.encoder import SoundEncoder
from llamacli.media.sound import HOP, Mel, Samples, log_mel
from llamacli.ops.activations import gelu_erf
from llamacli.tensor_table import TensorTable, Weights
from llamacli.testing.models import write_gguf
from llamacli.testing.tiny_media import mmproj_contents, tone
from llamacli_llama import Llama
from llamacli_llama.voxtral import Voxtral
from llamacli_qwen import Qwen3Vl
from llamacli_qwen.sound import SECOND, WINDOW, Qwen3Sound
from media_cases import write_words

N_CHANNELS = 16
_WITHOUT = {"voxtral": [f"a.blk.{i}.attn_k.bias" for i in range(2)], "qwen3a": ["a.conv_out.bias"]}
"""Tensors that models have not."""


@attrs.frozen
class Case:
    """Text model, encoder, further keys of both, and tokens."""

    text: Architecture
    encoder: SoundEncoder
    keys: Mapping[str, Any]
    text_keys: Mapping[str, Any]
    special: tuple[str, ...]


CASES = {
    "voxtral": Case(
        Llama(),
        Voxtral(),
        {"projector.stack_factor": 4, "feed_forward_length": 192},
        {},
        ("[BEGIN_AUDIO]",),
    ),
    "qwen3a": Case(
        Qwen3Vl(),
        Qwen3Sound(),
        {},
        {"n_deepstack_layers": 0, "rope.dimension_sections": [4, 2, 2, 0]},
        ("<|audio_start|>", "<|audio_end|>"),
    ),
}


class PeerVoxtral(Voxtral):
    """Voxtral as llama.cpp computes it.

    The mean of two rows goes on behind the layers, which transformers does not compute.
    """

    def configure(self, metadata: Metadata) -> SoundConfig:
        config = super().configure(metadata)
        return attrs.evolve(config, n_merge=2 * config.n_merge)

    def tensors(self, config: SoundConfig) -> TensorTable:
        return super().tensors(attrs.evolve(config, n_merge=config.n_merge // 2))

    def forward(self, g: Graph, config: SoundConfig, weights: Weights) -> Value:
        c, w, n = config, weights, config.n_embd
        x = g.patches(2 * c.n_mel)
        for param, stride in ((w.a_conv1d_1, 1), (w.a_conv1d_2, 2)):
            x = g.map(g.conv_2d(x, param, (2, 1), 2 * N_POSITIONS, kernel=(3, 1), stride=(stride, 1)), gelu_erf)
        rows = transformer_layers(g, c, x + g.positions(w.a_position_embd), w.a_blk)[-1]
        merged = g.merge_rows(rows, c.n_merge)
        means = [g.columns(merged, i * n, n) + g.columns(merged, (i + 1) * n, n) for i in range(0, c.n_merge, 2)]
        x = g.concat(*(g.layer_norm(g.scale(mean, 0.5), w.a_post_ln, c.layer_norm_eps) for mean in means))
        return mlp(g, x, w.mm_a_mlp_1, w.mm_a_mlp_2, gelu_erf)


class PeerQwen3Sound(Qwen3Sound):
    """Qwen3-ASR as llama.cpp divides sound.

    It has one frame more, and zeros up to whole seconds.
    """

    def layout(self, samples: Samples, config: SoundConfig) -> list[str | Mel]:
        mel = log_mel(np.pad(samples, (0, 2 * HOP), mode="reflect"), config.n_mel)[:-1]
        mel = np.pad(mel, ((0, -len(mel) % SECOND), (0, 0)))
        windows = [mel[i : i + WINDOW] for i in range(0, len(mel), WINDOW)]
        return ["<|audio_start|>", *(self._tile(window) for window in windows), "<|audio_end|>"]


PEER_CASES = {
    "peer voxtral": attrs.evolve(
        CASES["voxtral"],
        encoder=PeerVoxtral(),
        # With 4, tiny ones abort: llama.cpp rounds by GGML_PAD, which only rounds to powers of two.
        keys={"projector.stack_factor": 2, "feed_forward_length": 192},
    ),
    "peer qwen3a": attrs.evolve(CASES["qwen3a"], encoder=PeerQwen3Sound()),
}
"""Cases whose encoders do what llama.cpp does in another way than transformers."""


def write_hearing(folder: Path, name: str, keys: Mapping[str, Any] | None = None, **wrong: Any) -> Path:
    """Write the text model of a case and its mmproj file.

    Shapes are those of llama.cpp's converter. `keys` are further ones of the encoder; `wrong` are full metadata keys
    that the tensors do not follow.
    """
    case = (CASES | PEER_CASES)[name]
    metadata, tensors = mmproj_contents(
        case.encoder, keys={**case.keys, **(keys or {})}, seed=name, fields={"n_channels": N_CHANNELS},
        without=_WITHOUT[name.removeprefix("peer ")],
    )  # fmt: skip
    if "qwen3a" in name:
        names = {"clip.projector_type": "clip.audio.projector_type"}
        metadata = {names.get(key, key): value for key, value in metadata.items()}
    write_gguf(folder / "mmproj-text.gguf", "clip", metadata | wrong, tensors)
    return write_words(folder / "text.gguf", case.text, case.text_keys, case.special, seed=f"sound {name}")


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    """WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1 if samples.ndim == 1 else samples.shape[1], 2, rate, 0, "NONE", ""))
        out.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


SOUNDS = {"short": tone(0.2), "seconds": tone(2.37), "long": tone(31, 300)}
"""Sounds of the goldens."""
PEER_SOUNDS = {name: np.ascontiguousarray(samples[::-1]) for name, samples in SOUNDS.items()}
"""Sounds of llama.cpp's goldens: the loudest frame is not the last one, which only llama.cpp has."""
