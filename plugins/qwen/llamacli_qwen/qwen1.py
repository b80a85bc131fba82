"""Qwen 1 (Bai et al. 2023, arXiv:2309.16609).

Queries, keys and values in one biased matrix.
"""

from typing import Any

from llamacli.plugin import Decoder, Metadata, ModelFormatError, hookimpl

LLAMACLI_API = 1


class Qwen(Decoder):
    """`general.architecture = qwen`; files count gate and up as one width of the network."""

    name = "qwen"
    is_fused = True
    interleaved = False
    output = "required"
    biases = ("attn_qkv",)

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration, with half the width."""
        fields = super().fields(metadata)
        if fields["n_ff"] % 2:
            key = f"{self.name}.feed_forward_length"
            raise ModelFormatError(f"{metadata.source}: {key} = {fields['n_ff']} is odd, expected an even number")
        return fields | {"n_ff": fields["n_ff"] // 2, "widths": tuple(n // 2 for n in fields["widths"])}


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Qwen())
