"""MiniMax-Text-01: lightning attention in seven of eight layers.

MiniMax 2025 (arXiv:2501.08313). Lightning attention is a linear recurrence whose decay is a constant of head and layer.
Residual branches start from the normalised input, which has a scale.
"""

import math
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
    Weights,
    hookimpl,
    sigmoid,
    silu,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class LightningConfig(DecoderConfig):
    """Hyperparameters; layers with linear attention are `recurrent`."""

    recurrent: tuple[bool, ...]

    def decays(self, i: int) -> tuple[float, ...]:
        """Decay of each head in layer i."""
        start = 2.0 ** -(2.0 ** -(math.log2(self.n_head) - 3))
        depth = 1 - i / (self.n_layer - 1) + 1e-5
        return tuple(math.exp(-(start ** (head + 1)) * depth) for head in range(self.n_head))


class MiniMax01(Decoder):
    """`general.architecture = minimax-01`."""

    name = "minimax-01"
    interleaved = False

    def configure(self, metadata: Metadata) -> LightningConfig:
        """Read the hyperparameters; two layers at least."""
        fields = self.fields(metadata)
        n_layer = fields["n_layer"]
        if n_layer < 2 or fields["head_dim"] % 16:
            raise ModelFormatError(
                f"{metadata.source}: {self.name} needs two layers and heads in multiples of 16, not "
                f"{self.name}.block_count = {n_layer} and {fields['head_dim']} wide heads"
            )
        key = f"{self.name}.attention.recurrent_layers"
        if key in metadata:
            recurrent = metadata.get_bools(key, n_layer)
        else:
            period = metadata.get_int(f"{self.name}.full_attention_interval", default=8, minimum=1)
            recurrent = tuple((i + 1) % period != 0 for i in range(n_layer))
        scale = metadata.get_float(f"{self.name}.residual_scale")
        return LightningConfig.from_gguf(metadata, **fields | {"residual_scale": scale}, recurrent=recurrent)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of every layer, as wide as `feed_forward_length` says."""
        width = metadata.get_int(f"{self.name}.feed_forward_length", minimum=1, maximum=1 << 24)
        found = Mixture.from_gguf(metadata, self.name, scoring=Scoring.SOFTMAX, renormalize=True, n_ff=width)
        return attrs.evolve(found, n_dense=0, n_ff=width)

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of softmax attention, or of the linear one."""
        if not c.recurrent[i]:
            super().add_attention(block, c, i)
            return
        n_q = c.n_head * c.head_dim
        block.add("attn_norm", c.n_embd)
        block.add("attn_norm_2", n_q)
        block.add("attn_qkv", 3 * n_q, c.n_embd)
        block.add("attn_gate", n_q, c.n_embd)
        block.add("attn_output", c.n_embd, n_q)

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i."""
        h = self.normed(g, c, x, block, "attn_norm")
        attend = self.lightning if c.recurrent[i] else self.attention
        x = attend(g, c, w, i, block, h) + g.scale(h, c.residual_scale)
        h = self.normed(g, c, x, block, "ffn_norm")
        return self.feed_forward(g, c, i, block, h) + g.scale(h, c.residual_scale)

    def lightning(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Linear attention of block i, normalised and gated."""
        d = c.head_dim
        mixed = g.map(g.linear(h, block.attn_qkv), silu)
        q, k, v = (g.columns(mixed, part * d, d, of=3 * d) for part in range(3))
        y = g.linear_state(q, k, v, c.decays(i), n_head=c.n_head)
        y = g.mul(g.map(g.linear(h, block.attn_gate), sigmoid), g.rms_norm(y, block.attn_norm_2, c.eps))
        return g.linear(y, block.attn_output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(MiniMax01())
