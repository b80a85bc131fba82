"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838): LayerNorm without weights."""

from typing import Any

import attrs

from llamacli.plugin import Decoder, DecoderConfig, Graph, Metadata, Params, Value, Weights, hookimpl

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Olmo1Config(DecoderConfig):
    """`clamp` bounds queries, keys and values, 0 does not."""

    clamp: float


class Olmo(Decoder):
    """`general.architecture = olmo`."""

    name = "olmo"
    norm = "layer_norm"
    has_norms = False

    def configure(self, metadata: Metadata) -> Olmo1Config:
        """Read the hyperparameters."""
        clamp = metadata.get_float(f"{self.name}.attention.clamp_kqv", default=0.0, minimum=0.0)
        return Olmo1Config.from_gguf(metadata, **self.fields(metadata), clamp=clamp)

    def project(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> tuple[Value, Value, Value]:
        """Clamped queries, keys and values; queries and keys rotated."""
        q, k, v = (g.linear(h, param) for param in self.projections(c, i, block))
        if c.clamp:
            q, k, v = (g.clamp(x, -c.clamp, c.clamp) for x in (q, k, v))
        return self.rotate(g, c, w, i, q), self.rotate(g, c, w, i, k), v


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Olmo())
