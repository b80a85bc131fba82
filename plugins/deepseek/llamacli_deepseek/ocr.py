"""DeepSeek-OCR's text model (DeepSeek 2025, arXiv:2510.18234).

A DeepSeek mixture of experts with attention of full heads instead of the latent one.
"""

from llamacli.plugin import Decoder, Metadata, Mixture, Rope, Scoring, hookimpl

LLAMACLI_API = 1


class DeepSeek2Ocr(Decoder):
    """`general.architecture = deepseek2-ocr`."""

    name = "deepseek2-ocr"

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope, ...]:
        """RoPE of whole heads, whatever number of dimensions files have."""
        base = metadata.get_float(f"{self.name}.rope.freq_base", default=10000.0, minimum=2.0)
        return (Rope(head_dim, interleaved=False, base=base),) * len(windows)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts, beside shared ones, behind dense blocks."""
        softmax, bias = Scoring.SOFTMAX, "exp_probs_b.bias"
        return Mixture.from_gguf(metadata, self.name, default_scoring=softmax, n_shared=None, bias=bias)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(DeepSeek2Ocr())
