"""Nanbeige 4 3B (2025): the blocks are read several times.

Each pass has keys and values of its own; between passes there is the final norm, unless files say that it is not.
"""

from typing import Any

import attrs

from llamacli.plugin import Decoder, DecoderConfig, Graph, Metadata, Value, Weights, hookimpl

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class NanbeigeConfig(DecoderConfig):
    """`n_pass`: how often the blocks are read.

    `norm_between`: with the final norm between passes.
    """

    n_pass: int
    norm_between: bool


class Nanbeige(Decoder):
    """`general.architecture = nanbeige`."""

    name = "nanbeige"
    has_rope_freqs = True

    def configure(self, metadata: Metadata) -> NanbeigeConfig:
        """Read the hyperparameters."""
        fields = self.fields(metadata)
        most = (1 << 10) // fields["n_layer"]
        return NanbeigeConfig.from_gguf(
            metadata,
            **fields,
            n_pass=metadata.get_int(f"{self.name}.num_loops", default=1, minimum=1, maximum=most),
            norm_between=not metadata.get_bool(f"{self.name}.skip_loop_final_norm", default=False),
        )

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for n in range(c.n_pass):
            if n and c.norm_between:
                x = g.rms_norm(x, w.output_norm, c.eps)
            for i, block in enumerate(w.blk):
                x = self.layer(g, c, w, i, block, x)
        return g.linear(g.rms_norm(x, w.output_norm, c.eps), w.output or w.token_embd)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Nanbeige())
