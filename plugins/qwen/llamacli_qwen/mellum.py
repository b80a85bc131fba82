"""Mellum 2 (JetBrains 2026): completion of code with experts and sliding windows.

YaRN scales RoPE in the layers without a window only.
"""

import attrs

from llamacli.plugin import Decoder, Metadata, Mixture, Rope, Scoring, hookimpl

LLAMACLI_API = 1


class Mellum(Decoder):
    """`general.architecture = mellum`."""

    name = "mellum"
    interleaved = False
    qk_norm = "before"
    output = "required"
    period = 4

    def window(self, metadata: Metadata, key: str) -> int:
        """Length of the sliding window; 0 for none."""
        return metadata.get_int(key, default=0, minimum=0)

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers: unscaled."""
        return attrs.evolve(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks."""
        mixture = Mixture.from_gguf(metadata, self.name, scoring=Scoring.SOFTMAX, renormalize=True)
        return attrs.evolve(mixture, n_dense=0)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Mellum())
