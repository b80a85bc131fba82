"""GroveMoE (Wu et al. 2025, arXiv:2508.07785): adjugate experts that neighbouring experts share.

Their input is the result of the routed ones, and the logits of one router choose both.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    Scoring,
    TensorTable,
    Value,
    hookimpl,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GroveConfig(DecoderConfig):
    """Hyperparameters of GroveMoE.

    `n_shared` experts share an adjugate one, `n_ff_adjugate` wide; results of these are multiplied by `adjugate_scale`.
    """

    n_shared: int
    n_ff_adjugate: int
    adjugate_scale: float


class GroveMoe(Decoder):
    """`general.architecture = grovemoe`."""

    name = "grovemoe"
    interleaved = False
    qk_norm = "before"

    def configure(self, metadata: Metadata) -> GroveConfig:
        """Read the hyperparameters."""
        fields = self.fields(metadata)
        n_expert = metadata.get_int(f"{self.name}.expert_count")
        key = f"{self.name}.experts_per_group"
        n_shared = metadata.get_int(key, minimum=1, maximum=n_expert)
        if n_expert % n_shared:
            raise ModelFormatError(
                f"{metadata.source}: {key} = {n_shared} does not divide {self.name}.expert_count = {n_expert}"
            )
        width = metadata.get_int(f"{self.name}.expert_chunk_feed_forward_length", default=0, minimum=0, maximum=1 << 24)
        return GroveConfig.from_gguf(
            metadata,
            **fields,
            n_shared=n_shared,
            n_ff_adjugate=width or fields["head_dim"],
            adjugate_scale=metadata.get_float(f"{self.name}.expert_group_scale"),
        )

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks, whose weights are not scaled, as by llama.cpp."""
        mixture = Mixture.from_gguf(metadata, self.name, scoring=Scoring.SOFTMAX, renormalize=True)
        return attrs.evolve(mixture, n_dense=0, routing=mixture.routing | {"weight_scale": 1.0})

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of both sets of experts."""
        super().add_feed_forward(block, c, i)
        n = c.n_expert // c.n_shared
        block.add("ffn_gate_chexps", n, c.n_ff_adjugate, c.n_embd)
        block.add("ffn_up_chexps", n, c.n_ff_adjugate, c.n_embd)
        block.add("ffn_down_chexps", n, c.n_embd, c.n_ff_adjugate)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Routed experts, and the adjugate ones of their result."""
        routed: Value = c.mixture.layer(g, block, h)
        parts = {part: getattr(block, f"ffn_{part}_chexps") for part in ("gate", "up", "down")}
        router = g.linear(h, block.ffn_gate_inp)
        adjugate = g.moe(routed, router, **parts, **c.mixture.routing, shared_by=c.n_shared)
        return routed + g.scale(adjugate, c.adjugate_scale)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(GroveMoe())
