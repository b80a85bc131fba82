"""Sound of Voxtral.

Liu et al. 2025 (arXiv:2507.13264). Whisper's encoder hears 30 seconds at a time; four of its rows are a token.
"""

import numpy as np

from llamacli.plugin import (
    SAMPLE_RATE,
    Graph,
    Mel,
    Metadata,
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
    whisper,
    whisper_tensors,
)

LLAMACLI_API = 1

SECONDS = 30
"""Length of a tile."""


class Voxtral(SoundEncoder):
    """`clip.projector_type = voxtral`."""

    name = "voxtral"
    convolutions = ("a.conv1d.1.weight", "a.conv1d.2.weight")

    def configure(self, metadata: Metadata) -> SoundConfig:
        """Read the hyperparameters."""
        n_merge = metadata.get_int("clip.audio.projector.stack_factor", minimum=1, maximum=100)
        return SoundConfig.from_gguf(metadata, n_merge=n_merge)

    def tensors(self, config: SoundConfig) -> TensorTable:
        """Tensors of the encoder and of the projector."""
        table = whisper_tensors(config)
        table.add("mm.a.mlp.1", config.n_embd_text, config.n_embd * config.n_merge)
        table.add("mm.a.mlp.2", config.n_embd_text, config.n_embd_text)
        return table

    def forward(self, g: Graph, config: SoundConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = g.merge_rows(whisper(g, config, weights), config.n_merge)
        return mlp(g, x, weights.mm_a_mlp_1, weights.mm_a_mlp_2, gelu_erf)

    def layout(self, samples: Samples, config: SoundConfig) -> list[str | Mel]:
        """The sound, filled up with silence, behind its token."""
        n = SECONDS * SAMPLE_RATE
        mel = log_mel(np.pad(samples, (0, -len(samples) % n)), config.n_mel)
        return ["[BEGIN_AUDIO]", *np.split(mel, -(-len(samples) // n))]


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Voxtral())
