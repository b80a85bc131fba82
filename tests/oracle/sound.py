"""Record encoders of sound of transformers: `python -m oracle.sound`.

Needs transformers and torch. Its models get the weights of the tiny files of `sound_cases`.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.gguf import GGUFFile, open_gguf
from llamacli.quantization import dequantize
from llamacli.testing.tiny_media import AUDIO
from oracle.goldens import DIRECTORY, sha256
from sound_cases import CASES, N_CHANNELS, SOUNDS, write_hearing

PATH = DIRECTORY / "sound.npz"
N_FRAMES, N_ROWS = 29, 6
"""Steps between the frames and the rows that are recorded."""

_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "self_attn_layer_norm", "ln2": "final_layer_norm", "ffn_up": "fc1",
    "ffn_down": "fc2",
}  # fmt: skip
_NAMES = {
    "a.conv1d.1": "audio_tower.conv1", "a.conv1d.2": "audio_tower.conv2", "a.post_ln": "audio_tower.layer_norm",
    "a.position_embd": "audio_tower.embed_positions", "a.conv_out": "audio_tower.conv_out",
    **{f"a.conv2d.{i}": f"audio_tower.conv2d{i}" for i in (1, 2, 3)},
    **{f"mm.a.mlp.{i}": f"multi_modal_projector.linear_{i}" for i in (1, 2)},
    **{f"a.blk.{i}.{name}": f"audio_tower.layers.{i}.{other}" for i in range(2) for name, other in _LAYER.items()},
}  # fmt: skip
_SIZES = {
    "d_model": AUDIO["embedding_length"], "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 64,
    "num_mel_bins": AUDIO["num_mel_bins"],
}  # fmt: skip
_TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


def voxtral(samples: np.ndarray, weights: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Frames and rows of Voxtral."""
    import torch
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor

    # Its intermediate_size is that of the projector, four rows of the encoder, and that of the feed-forward networks.
    audio = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 192, **_SIZES}
    config = VoxtralConfig(audio_config=audio | {"encoder_ffn_dim": 192}, text_config=_TEXT | {"model_type": "llama"})
    model = _loaded(VoxtralForConditionalGeneration(config), weights)
    extract = WhisperFeatureExtractor(feature_size=AUDIO["num_mel_bins"])
    options = {"padding": True, "truncation": False, "pad_to_multiple_of": 480_000, "return_tensors": "pt"}
    mel = extract(samples, sampling_rate=16_000, **options).input_features
    with torch.no_grad():
        rows = model.get_audio_features(mel.reshape(mel.shape[1], -1, 3000).transpose(0, 1)).pooler_output
    return mel[0].numpy().T, rows.numpy()


def qwen3a(samples: np.ndarray, weights: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Frames and rows of Qwen3-ASR."""
    import torch
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    audio = {"model_type": "qwen3_asr_encoder", "output_dim": 64, "downsample_hidden_size": N_CHANNELS, **_SIZES}
    config = Qwen3ASRConfig(audio_config=audio, text_config=_TEXT | {"model_type": "qwen3", "head_dim": 32})
    position = weights.pop("a.position_embd.weight")
    model = _loaded(Qwen3ASRForConditionalGeneration(config), weights)
    model.model.audio_tower.positional_embedding.positional_embedding.copy_(torch.from_numpy(position[:13].copy()))
    extract = Qwen3ASRFeatureExtractor(feature_size=AUDIO["num_mel_bins"])
    found = extract(samples, sampling_rate=16_000, padding=True, return_attention_mask=True)
    with torch.no_grad():
        rows = model.get_audio_features(found.input_features, found.attention_mask).pooler_output
    return found.input_features[0].numpy().T[: int(found.attention_mask.sum())], rows.numpy()


def _loaded(model: Any, weights: dict[str, np.ndarray]) -> Any:
    import torch

    own = model.eval().model.state_dict()
    for name, array in weights.items():
        stem, _, kind = name.rpartition(".")
        key = f"{_NAMES[stem]}.{kind}"
        key = key if key in own else key.replace("layer_norm", "ln_post")
        own[key].copy_(torch.from_numpy(array.reshape(own[key].shape).copy()))
    return model


def tensors(file: GGUFFile) -> dict[str, np.ndarray]:
    """Tensors of a file in float32."""
    return {name: dequantize(file.data(name), info.type).reshape(info.shape) for name, info in file.tensors.items()}


def main() -> None:
    """Record all cases."""
    arrays = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_hearing(Path(folder), name)
            path = Path(folder) / "mmproj-text.gguf"
            arrays[f"{name} sha256"] = np.array(sha256(path))
            for sound, samples in SOUNDS.items():
                with closing(open_gguf(path)) as file:
                    mel, rows = globals()[name](samples, tensors(file))
                arrays |= {f"{name} {sound} mel": mel[::N_FRAMES], f"{name} {sound} rows": rows[::N_ROWS]}
                print(name, sound, mel.shape, rows.shape, file=sys.stderr)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
