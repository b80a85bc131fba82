"""Older relatives of Llama.

Baichuan, Orion, XVERSE, Refact, PLaMo, OpenELM, Arctic and DBRX. Yang et al. 2023 (arXiv:2309.10305), Chen et al. 2024
(arXiv:2401.12246), Mehta et al. 2024 (arXiv:2404.14619), Snowflake 2024, Databricks 2024.
"""

from typing import Any, Literal

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
    Weights,
    hookimpl,
    network,
)

LLAMACLI_API = 1

ALIBI = 8.0


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class OlderConfig(DecoderConfig):
    """`alibi` is the largest slope of ALiBi, 0 without.

    `clamp` bounds queries, keys and values, 0 does not.
    """

    alibi: float = 0.0
    clamp: float = 0.0


class Baichuan(Decoder):
    """`general.architecture = baichuan`.

    As llama.cpp recognises them: with 32 layers (7B) RoPE, with 40 (13B) ALiBi, otherwise no positions.
    """

    name = "baichuan"
    output: Literal["required", "optional", "none"] = "required"

    def configure(self, metadata: Metadata) -> OlderConfig:
        """Read the hyperparameters."""
        fields = self.fields(metadata)
        return OlderConfig.from_gguf(metadata, **fields, alibi=ALIBI if fields["n_layer"] == 40 else 0.0)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of the 7B model."""
        ropes = super().ropes(metadata, head_dim, windows)
        return ropes if len(windows) == 32 else (None,) * len(windows)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Slope of ALiBi."""
        return {"alibi": c.alibi} if c.alibi else {}


class Refact(Baichuan):
    """`general.architecture = refact`: ALiBi, one head of keys and values.

    Biases behind attention are not read.
    """

    name = "refact"
    output = "optional"

    def configure(self, metadata: Metadata) -> OlderConfig:
        """Read the hyperparameters."""
        return OlderConfig.from_gguf(metadata, **self.fields(metadata), alibi=ALIBI)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """No RoPE."""
        return (None,) * len(windows)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add_unused("rope_freqs", config.head_dim // 2)
        return table

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network, and biases that nothing reads."""
        super().add_feed_forward(block, c, i)
        for name, n in (("attn_output", c.n_embd), ("ffn_gate", c.n_ff), ("ffn_up", c.n_ff), ("ffn_down", c.n_embd)):
            block.add_unused(name, n, kind="bias")


class Orion(Decoder):
    """`general.architecture = orion`: LayerNorm with biases."""

    name = "orion"
    interleaved = False
    norm = "layer_norm"
    norm_bias = True
    output = "required"


class Xverse(Decoder):
    """`general.architecture = xverse`."""

    name = "xverse"
    output = "required"


class Plamo(Decoder):
    """`general.architecture = plamo`: attention and network side by side."""

    name = "plamo"
    interleaved = False
    parallel = True
    output = "required"


class OpenElm(Decoder):
    """`general.architecture = openelm`: layers have their own numbers of heads and widths."""

    name = "openelm"
    is_fused = True
    interleaved = False
    qk_norm = "before"
    output = "none"
    may_have_bias = ()
    by_layer = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


class Arctic(Decoder):
    """`general.architecture = arctic`: experts read the layer's input, beside a small network."""

    name = "arctic"

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks, as wide as `feed_forward_length`."""
        return _all_experts(metadata, self.name)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network and of the experts."""
        block.add("ffn_norm", c.n_embd)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            block.add(name, c.n_embd, c.n_embd)
        block.add("ffn_norm_exps", c.n_embd)
        c.mixture.add_tensors(block, c)

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i."""
        routed = c.mixture.layer(g, block, g.rms_norm(x, block.ffn_norm_exps, c.eps))
        x = x + self.attention(g, c, w, i, block, g.rms_norm(x, block.attn_norm, c.eps))
        return routed + (x + network(g, block, g.rms_norm(x, block.ffn_norm, c.eps)))


class Dbrx(Decoder):
    """`general.architecture = dbrx`: experts, LayerNorm, and clamped queries, keys and values."""

    name = "dbrx"
    is_fused = True
    interleaved = False
    norm = "layer_norm"
    ffn_norm = "attn_output_norm"
    output = "required"
    may_have_bias = ()

    def configure(self, metadata: Metadata) -> OlderConfig:
        """Read the hyperparameters."""
        clamp = metadata.get_float(f"{self.name}.attention.clamp_kqv", minimum=0.0)
        return OlderConfig.from_gguf(metadata, **self.fields(metadata), clamp=clamp)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks, as wide as `feed_forward_length`."""
        return _all_experts(metadata, self.name)

    def project(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> tuple[Value, Value, Value]:
        """Clamped queries, keys and values; queries and keys rotated."""
        q, k, v = (g.linear(h, param) for param in self.projections(c, i, block))
        if c.clamp:
            q, k, v = (g.clamp(x, -c.clamp, c.clamp) for x in (q, k, v))
        return self.rotate(g, c, w, i, q), self.rotate(g, c, w, i, k), v


def _all_experts(metadata: Metadata, name: str) -> Mixture:
    width = metadata.get_int(f"{name}.feed_forward_length", minimum=1)
    mixture = Mixture.from_gguf(metadata, name, scoring=Scoring.SOFTMAX, renormalize=True, n_ff=width)
    return attrs.evolve(mixture, n_dense=0, n_ff=width, n_ff_shared=0)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    for architecture in (Baichuan, Refact, Orion, Xverse, Plamo, OpenElm, Arctic, Dbrx):
        register(architecture())
