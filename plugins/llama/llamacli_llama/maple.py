"""Maple 20B (2026): experts with clamped SwiGLU; only sliding layers have RoPE."""

from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    Params,
    Rope,
    Scoring,
    Value,
    hookimpl,
    swiglu_clamped,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class MapleConfig(DecoderConfig):
    """`limits` bound gate and up of each layer's experts, 0 does not."""

    limits: tuple[float, ...]


class Maple(Decoder):
    """`general.architecture = maple`."""

    name = "maple"
    interleaved = False
    qk_norm = "before"
    output = "required"
    period = 4
    needs_pattern = True

    def configure(self, metadata: Metadata) -> MapleConfig:
        """Read the hyperparameters."""
        fields = self.fields(metadata)
        limits = metadata.get_floats(f"{self.name}.swiglu_clamp_exp", fields["n_layer"], minimum=0.0)
        return MapleConfig.from_gguf(metadata, **fields, limits=limits)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of sliding layers."""
        ropes = super().ropes(metadata, head_dim, windows)
        return tuple(rope if window else None for rope, window in zip(ropes, windows, strict=True))

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers, which may rotate other dimensions."""
        n_dims = metadata.get_int(f"{self.name}.rope.dimension_count_swa", default=rope.n_dims, minimum=2)
        return attrs.evolve(super().sliding_rope(metadata, rope), n_dims=n_dims)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks."""
        mixture = Mixture.from_gguf(metadata, self.name, scoring=Scoring.SOFTMAX, renormalize=True)
        return attrs.evolve(mixture, n_dense=0, routing=mixture.routing | {"weight_scale": 1.0})

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Experts of block i."""
        activation = swiglu_clamped(c.limits[i]) if c.limits[i] else Activation.SWIGLU
        result: Value = c.mixture.layer(g, block, h, activation=activation)
        return result


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Maple())
