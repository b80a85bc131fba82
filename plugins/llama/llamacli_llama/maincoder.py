"""Maincoder 1B (2025): queries and keys are normalised behind RoPE."""

from llamacli.plugin import Decoder, hookimpl

LLAMACLI_API = 1


class Maincoder(Decoder):
    """`general.architecture = maincoder`."""

    name = "maincoder"
    qk_norm = "after"


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Maincoder())
