"""Decoders with LayerNorm of 2022 to 2025.

Falcon, MPT, BLOOM, StarCoder, CodeShell, Jais and Jais 2. Almazrouei et al. 2023 (arXiv:2311.16867), MosaicML 2023, Le
Scao et al. 2022 (arXiv:2211.05100), Li et al. 2023 (arXiv:2305.06161), Xie et al. 2024 (arXiv:2403.15747), Sengupta et
al. 2023 (arXiv:2308.16149).
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    gelu,
    hookimpl,
    relu_squared,
)

LLAMACLI_API = 1

ALIBI = 8.0

ALL = ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class _Gpt(Decoder):
    """Decoder with LayerNorm and a network with GELU."""

    interleaved = False
    norm = "layer_norm"
    norm_bias: bool | None = True
    activation: Any = staticmethod(gelu)


class Falcon(_Gpt):
    """`general.architecture = falcon`.

    Attention and network side by side, in larger models with norms of their own.
    """

    name = "falcon"
    is_fused = True
    parallel = True
    may_have_bias = ()

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with its own norm in larger models."""
        super().add_attention(block, c, i)
        block.add("attn_norm_2", c.n_embd, optional=True, bias=True)

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i."""
        h = g.layer_norm(x, block.attn_norm, c.eps)
        own = g.layer_norm(x, block.attn_norm_2, c.eps) if block.attn_norm_2 else h
        return x + self.attention(g, c, w, i, block, own) + self.feed_forward(g, c, i, block, h)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class AlibiConfig(DecoderConfig):
    """`alibi` is the largest slope of ALiBi, 0 without.

    `clamp` bounds queries, keys and values, 0 does not.
    """

    alibi: float
    clamp: float = 0.0


class _Alibi(_Gpt):
    """Decoder without RoPE: ALiBi, if `max_alibi_bias` or the architecture says so."""

    alibi: float | None = None

    def configure(self, metadata: Metadata) -> AlibiConfig:
        """Read the hyperparameters."""
        return AlibiConfig.from_gguf(metadata, **self.fields(metadata), **self.positions(metadata))

    def positions(self, metadata: Metadata) -> dict[str, float]:
        """Slope of ALiBi."""
        if self.alibi is not None:
            return {"alibi": self.alibi}
        return {"alibi": metadata.get_float(f"{self.name}.attention.max_alibi_bias", default=0.0, minimum=0.0)}

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """No RoPE."""
        return (None,) * len(windows)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Slope of ALiBi."""
        return {"alibi": c.alibi} if c.alibi else {}


class Mpt(_Alibi):
    """`general.architecture = mpt`: learned positions in some models, clamped or normalised queries and keys."""

    name = "mpt"
    is_fused = True
    norm_bias = None
    may_have_bias = ALL

    def positions(self, metadata: Metadata) -> dict[str, float]:
        """Slope of ALiBi, and the bound of queries, keys and values."""
        clamp = metadata.get_float(f"{self.name}.attention.clamp_kqv", default=0.0, minimum=0.0)
        return super().positions(metadata) | {"clamp": clamp}

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add("position_embd", config.context_length, config.n_embd, optional=True)
        return table

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention.

        With norms of whole queries and keys in some models.
        """
        super().add_attention(block, c, i)
        block.add("attn_q_norm", c.n_embd, optional=True, bias=True)
        block.add("attn_k_norm", c.n_head_kv * c.head_dim, optional=True, bias=True, only_with="attn_q_norm")

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network, with divisors of its activations in AWQ models."""
        super().add_feed_forward(block, c, i)
        block.add_tensor("ffn.act.scales", c.n_ff, optional=True)

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Embeddings of the tokens, with those of positions in some models."""
        x = g.embed(w.token_embd)
        return x + g.positions(w.position_embd) if w.position_embd else x

    def project(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> tuple[Value, Value, Value]:
        """Queries, keys and values, clamped and normalised."""
        q, k, v = (g.linear(h, param) for param in self.projections(c, i, block))
        if c.clamp:
            q, k, v = (g.clamp(x, -c.clamp, c.clamp) for x in (q, k, v))
        if block.attn_q_norm and block.attn_k_norm:
            q, k = g.layer_norm(q, block.attn_q_norm, c.eps), g.layer_norm(k, block.attn_k_norm, c.eps)
        return q, k, v

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network of block i."""
        h = g.map(g.linear(h, block.ffn_up), gelu)
        return g.linear(g.div(h, block.ffn_act_scales) if block.ffn_act_scales else h, block.ffn_down)


class Bloom(_Alibi):
    """`general.architecture = bloom`: ALiBi, and a norm of the embeddings."""

    name = "bloom"
    is_fused = True
    alibi = ALIBI
    biases = ALL

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add("token_embd_norm", config.n_embd, needs_bias=True)
        return table

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Normalised embeddings of the tokens."""
        return g.layer_norm(g.embed(w.token_embd), w.token_embd_norm, c.eps)


class StarCoder(_Alibi):
    """`general.architecture = starcoder`: learned positions, one head of keys and values."""

    name = "starcoder"
    is_fused = True
    alibi = 0.0
    biases = ALL

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add("position_embd", config.context_length, config.n_embd)
        return table

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Embeddings of the tokens and of their positions."""
        return g.embed(w.token_embd) + g.positions(w.position_embd)


class CodeShell(_Gpt):
    """`general.architecture = codeshell`: RoPE; files may have the output matrix alone."""

    name = "codeshell"
    output = "required"
    biases = ("attn_output", "ffn_up", "ffn_down")

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add("token_embd", config.n_vocab, config.n_embd, optional=True)
        return table

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Embeddings of the tokens."""
        return g.embed(w.token_embd or w.output)


class Jais(_Alibi):
    """`general.architecture = jais`: ALiBi, SwiGLU, and scores divided by the width of heads."""

    name = "jais"
    is_fused = True
    output = "required"
    biases = ALL
    activation = Activation.SWIGLU

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration, with the scale of scores."""
        fields = super().fields(metadata)
        return fields | {"attention_scale": 1 / fields["head_dim"]}


class Jais2(_Gpt):
    """`general.architecture = jais2`: RoPE, and a network with squared ReLU."""

    name = "jais2"
    biases = ("attn_output", "ffn_up", "ffn_down")
    activation = staticmethod(relu_squared)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    for architecture in (Falcon, Mpt, Bloom, StarCoder, CodeShell, Jais, Jais2):
        register(architecture())
