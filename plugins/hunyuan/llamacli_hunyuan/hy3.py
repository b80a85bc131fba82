"""Hunyuan 3 (Tencent 2026).

Experts chosen by sigmoid with a selection bias, and a shared one.
"""

from llamacli.plugin import Decoder, Metadata, Mixture, Scoring, hookimpl

LLAMACLI_API = 1


class HyV3(Decoder):
    """`general.architecture = hy_v3`."""

    name = "hy_v3"
    interleaved = False
    qk_norm = "before"
    has_nextn = True
    chooses_experts = True

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of the blocks that have a router."""
        return Mixture.from_gguf(metadata, self.name, default_scoring=Scoring.SIGMOID, n_shared=1, bias="exp_probs_b")


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(HyV3())
