"""Arcee Foundation Models (AFM 4.5B): feed-forward network with squared ReLU.

Without a gate, as in Primer (So et al. 2021, arXiv:2109.08668).
"""

from llamacli.plugin import Decoder, hookimpl, relu_squared

LLAMACLI_API = 1


class Arcee(Decoder):
    """`general.architecture = arcee`."""

    name = "arcee"
    activation = staticmethod(relu_squared)
    has_rope_freqs = True


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Arcee())
