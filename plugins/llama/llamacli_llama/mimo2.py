"""MiMo-V2-Flash (Xiaomi 2025): mixture of experts with sliding windows and attention sinks.

Values are narrower than keys, and layers have their own numbers of heads of keys and values.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    hookimpl,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class MimoConfig(DecoderConfig):
    """`value_scale` multiplies the output of attention."""

    value_scale: float


class Mimo2(Decoder):
    """`general.architecture = mimo2`."""

    name = "mimo2"
    interleaved = False
    output = "required"
    has_nextn = True
    chooses_experts = True
    may_have_bias = ()
    by_layer = ("attention.head_count", "attention.head_count_kv")
    period = 4
    needs_pattern = True
    has_value_dim = True

    def configure(self, metadata: Metadata) -> MimoConfig:
        """Read the hyperparameters."""
        scale = metadata.get_float(f"{self.name}.attention.value_scale", default=0.0, minimum=0.0)
        return MimoConfig.from_gguf(metadata, **self.fields(metadata), value_scale=scale or 1.0)

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers, unscaled."""
        return super().sliding_rope(metadata, attrs.evolve(rope, freq_scale=1.0, base=10000.0))

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of the blocks that have a router."""
        return Mixture.from_gguf(
            metadata, self.name, scoring=Scoring.SIGMOID, renormalize=True, bias="exp_probs_b.bias"
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with sinks; biases are not read, as by llama.cpp."""
        super().add_attention(block, c, i)
        for name, n in (("q", c.heads[i]), ("k", c.heads_kv[i]), ("v", c.heads_kv[i])):
            block.add_unused(f"attn_{name}", n * (c.value_dim if name == "v" else c.head_dim), kind="bias")
        block.add("attn_sinks", c.heads[i], optional=True)
        if i >= c.n_layer:
            block.add("layer_output_norm", c.n_embd, optional=True)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Sinks of a block."""
        return {"sinks": block.attn_sinks}

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Scaled output of attention."""
        a = g.linear(a, block.attn_output)
        return g.scale(a, c.value_scale) if c.value_scale != 1 else a


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Mimo2())
