"""DeepSeek-OCR's text model (DeepSeek 2025, arXiv:2510.18234).

A DeepSeek mixture of experts with attention of full heads instead of the latent one.
"""

from llamacli.plugin import Decoder, Metadata, Mixture, Scoring, hookimpl

LLAMACLI_API = 1


class DeepSeek2Ocr(Decoder):
    """`general.architecture = deepseek2-ocr`."""

    name = "deepseek2-ocr"
    interleaved = False

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts, beside shared ones, behind dense blocks."""
        softmax, bias = Scoring.SOFTMAX, "exp_probs_b.bias"
        return Mixture.from_gguf(metadata, self.name, default_scoring=softmax, n_shared=None, bias=bias)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(DeepSeek2Ocr())
