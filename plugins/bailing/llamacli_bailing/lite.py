"""Ling-lite and Ling-Coder-lite (Ling Team 2025, arXiv:2503.05139).

Experts chosen by softmax, and shared ones.
"""

import attrs

from llamacli.plugin import Decoder, Metadata, Mixture, Scoring, hookimpl

LLAMACLI_API = 1


class BailingMoe(Decoder):
    """`general.architecture = bailingmoe`."""

    name = "bailingmoe"
    output = "required"

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks, whatever number of dense ones files have."""
        mixture = Mixture.from_gguf(metadata, self.name, scoring=Scoring.SOFTMAX, n_shared=None)
        return attrs.evolve(mixture, n_dense=0)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(BailingMoe())
