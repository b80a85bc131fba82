"""openPangu Embedded 1B and 7B (Huawei 2025): attention with biases."""

from typing import Any

from llamacli.plugin import Decoder, TensorTable, hookimpl

LLAMACLI_API = 1


class PanguEmbedded(Decoder):
    """`general.architecture = pangu-embedded`."""

    name = "pangu-embedded"
    interleaved = False
    biases = ("attn_output",)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file.

        Factors of frequencies are not used, as by llama.cpp.
        """
        table = super().tensors(config)
        table.add_unused("rope_freqs", config.ropes[0].n_dims // 2)
        return table


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(PanguEmbedded())
