"""Cohere 2 with experts: Command and North models of 2026.

Attention and network read one norm and are added together; the mean of routed and shared experts is taken. Sliding
layers and the first dense blocks have RoPE. Files say by their epsilon whether norms are RMSNorm or LayerNorm.
"""

from typing import Any

from llamacli.plugin import (
    Decoder,
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    Rope,
    Scoring,
    Value,
    hookimpl,
    network,
)

LLAMACLI_API = 1


class Cohere2Moe(Decoder):
    """`general.architecture = cohere2moe`.

    Blocks for multi-token prediction are not computed.
    """

    name = "cohere2moe"
    parallel = True
    period = 4
    full_first = True
    has_nextn = True

    def epsilons(self, metadata: Metadata) -> dict[str, float]:
        """Epsilon of RMSNorm, or else of LayerNorm."""
        rms = metadata.get_float(f"{self.name}.attention.layer_norm_rms_epsilon", default=0.0, minimum=0.0, maximum=1.0)
        if rms:
            return {"rms_eps": rms}
        key = f"{self.name}.attention.layer_norm_epsilon"
        if key not in metadata:
            raise ModelFormatError(
                f"{metadata.source}: {key} and {self.name}.attention.layer_norm_rms_epsilon are missing"
            )
        return {"layer_norm_eps": metadata.get_float(key, minimum=0.0, maximum=1.0)}

    def normed(self, g: Graph, c: Any, x: Value, params: Params, name: str) -> Value:
        """Value behind the norm of this name."""
        norm = g.rms_norm if c.rms_eps else g.layer_norm
        return norm(x, getattr(params, name), c.eps)

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration, with the scale of logits."""
        scale = metadata.get_float(f"{self.name}.logit_scale", minimum=0.0)
        return super().fields(metadata) | {"logit_scale": scale or 1.0}

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of sliding layers and of dense ones.

        By one base, that of full layers in other families.
        """
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=True)
        n_dense = metadata.get_int(f"{self.name}.leading_dense_block_count", minimum=0)
        return tuple(rope if window or i < n_dense else None for i, window in enumerate(windows))

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks."""
        return Mixture.from_gguf(metadata, self.name, default_scoring=Scoring.SIGMOID)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network, or the mean of routed and shared experts."""
        if not self.has_experts(c, i):
            return network(g, block, h)
        x: Value = c.mixture.layer(g, block, h)
        return g.scale(x, 0.5) if c.mixture.n_ff_shared else x


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Cohere2Moe())
