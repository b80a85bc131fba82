"""Sound of Qwen3-ASR and Qwen3-Omni.

Xu et al. 2025 (arXiv:2509.17765). Three convolutions make 13 tokens of each second, which attend to 8 seconds.
"""

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.plugin import (
    Graph,
    Mel,
    Metadata,
    ModelFile,
    Param,
    Samples,
    SoundConfig,
    SoundEncoder,
    TensorTable,
    Value,
    Weights,
    gelu_erf,
    hookimpl,
    log_mel,
    mlp,
    sound_layers,
    sound_tower,
)

LLAMACLI_API = 1

SECOND, WINDOW = 100, 800
"""Frames that are convolved together, and those of a tile; no file has keys of them."""
TOKENS = 13
"""Tokens of a second."""
SHORTEST = 8000
"""Samples of the shortest sound; silence follows those that are shorter."""


class Qwen3Sound(SoundEncoder):
    """`clip.audio.projector_type = qwen3a`."""

    name = "qwen3a"
    n_frames = 8

    def configure(self, metadata: Metadata) -> SoundConfig:
        """Read the hyperparameters."""
        return SoundConfig.from_gguf(metadata, max_patches=WINDOW // SECOND * TOKENS, n_channels=480)

    def configure_file(self, file: ModelFile) -> SoundConfig:
        """Read the hyperparameters, the number of channels from a tensor."""
        config, name = self.configure(file.metadata), "a.conv2d.1.weight"
        return attrs.evolve(config, n_channels=file.tensors[name].shape[0]) if name in file.tensors else config

    def tensors(self, config: SoundConfig) -> TensorTable:
        """Tensors of the convolutions, the transformer and the projector."""
        table, n = TensorTable(), config.n_channels
        for i in (1, 2, 3):
            table.add(f"a.conv2d.{i}", n, 9 * (n if i > 1 else 1), bias=True, needs_bias=True)
        table.add("a.conv_out", config.n_embd, n * -(-config.n_mel // 8), bias=True)
        sound_layers(table, config)
        table.add("mm.a.mlp.1", config.n_embd, config.n_embd, bias=True)
        table.add("mm.a.mlp.2", config.n_embd_text, config.n_embd, bias=True)
        return table

    def forward(self, g: Graph, config: SoundConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x, times, freqs, n_times = g.patches(self.n_frames * config.n_mel), self.n_frames, config.n_mel, SECOND
        for i in (1, 2, 3):
            param: Param = getattr(weights, f"a_conv2d_{i}")
            x = g.conv_2d(x, param, (times, freqs), n_times, stride=(2, 2), channels_first=i == 3)
            x, times, freqs, n_times = g.map(x, gelu_erf), times // 2, -(-freqs // 2), -(-n_times // 2)
        x = sound_tower(g, config, weights, g.linear(x, weights.a_conv_out))
        return mlp(g, x, weights.mm_a_mlp_1, weights.mm_a_mlp_2, gelu_erf)

    def positions(self, n: int, config: SoundConfig) -> npt.NDArray[np.int32]:
        """Positions of patches, from 0 in each second."""
        return np.arange(n, dtype=np.int32) % TOKENS

    def layout(self, samples: Samples, config: SoundConfig) -> list[str | Mel]:
        """The sound, between its two tokens."""
        mel = log_mel(np.pad(samples, (0, max(0, SHORTEST - len(samples)))), config.n_mel)
        windows = [mel[i : i + WINDOW] for i in range(0, len(mel), WINDOW)]
        return ["<|audio_start|>", *(self._tile(window) for window in windows), "<|audio_end|>"]

    def _tile(self, mel: Mel) -> Mel:
        """Frames of each second, filled up with zeros to whole patches."""
        seconds = [mel[i : i + SECOND] for i in range(0, len(mel), SECOND)]
        return np.concatenate([np.pad(second, ((0, -len(second) % self.n_frames), (0, 0))) for second in seconds])


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Qwen3Sound())
