"""DFlash draft heads: blocks of tokens in one pass.

Chen et al. 2026. Layers of Qwen 3's kind. Their keys and values are those of the model's tokens, made of the inputs of
some of its layers, and those of the block itself: the last token, and a mask for each token to predict. DSpark heads
add logits that a Markov head makes of the token before. DFlash 2 convolves the block before and behind each branch,
and a selector adds logits to the most probable tokens, made of the token before and the state at the place.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    BlockHeadArchitecture,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    network,
)

LLAMACLI_API = 1

_ACTIVATIONS = {
    "silu": Activation.SWIGLU, "gelu": Activation.GEGLU, "gelu_pytorch_tanh": Activation.GEGLU,
}  # fmt: skip


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class DFlashConfig(DecoderConfig):
    """Hyperparameters of a head.

    - `layers`: the layers of the model whose inputs it reads.
    - `block`: the length of a block, the id of masks, True if tokens of a block see no later ones, and the first row
      that predicts: that of the last token in DSpark heads.
    - `value_scale` multiplies what was attended to; `gated` is the activation of the networks.
    - `n_draft`: the number of tokens that it predicts.
    - `rank`: the width of the Markov head, 0 without.
    - `selector`: the width of the selector of DFlash 2, and the number of tokens that it selects from, 0 without.
    - `conv`: the taps of the convolutions of DFlash 2, and the columns that share a factor.
    """

    layers: tuple[int, ...]
    block: tuple[int, int, bool, int]
    value_scale: float
    gated: Activation
    n_draft: int
    rank: int = 0
    selector: tuple[int, int] = (0, 0)
    conv: tuple[int, int] = (0, 0)


class DFlash(Decoder, BlockHeadArchitecture):
    """`general.architecture = dflash`."""

    name = "dflash"
    interleaved = False
    qk_norm = "before"
    may_have_bias = ()
    has_rope_freqs = True
    period = 1
    needs_pattern = True

    def configure(self, metadata: Metadata) -> DFlashConfig:
        """Read the hyperparameters; RoPE's sections must be of the time alone."""
        key = f"{self.name}.hyper_connection.count"
        if metadata.get_int(key, default=0):
            raise ModelFormatError(f"{metadata.source}: {key}: such heads are not supported")
        key = f"{self.name}.rope.dimension_sections"
        if key in metadata and any(metadata.get_ints(key, 4, minimum=0, maximum=1 << 14)[1:]):
            raise ModelFormatError(f"{metadata.source}: {key}: sections other than the first are not supported")
        metadata.get_bool(f"{self.name}.has_confidence_head", default=False)  # nothing reads its probability
        fields, count = self.fields(metadata), len(metadata[f"{self.name}.target_layers"])
        name = metadata.get_str(f"{self.name}.hidden_activation", default="silu")
        if name not in _ACTIVATIONS:
            raise ModelFormatError(f"{metadata.source}: {self.name}.hidden_activation = {name!r} is not supported")

        def scale(key: str, default: float) -> float:
            return metadata.get_float(f"{self.name}.{key}", default=0.0) or default

        def numbers(*keys: str, maximum: int) -> tuple[int, ...]:
            """Positive numbers of DFlash 2."""
            return tuple(metadata.get_int(f"{self.name}.{key}", minimum=1, maximum=maximum) for key in keys)

        fields["attention_scale"] = scale("attention.scale", fields["attention_scale"])
        if metadata.get_int(f"{self.name}.selector_rank", default=0):
            fields["selector"] = numbers("selector_rank", "selector_top_k", maximum=1 << 14)
            fields["conv"] = numbers("conv_kernel_size", "conv_group_size", maximum=1 << 20)
            fields["logit_scale"] = scale("logit_scale", 1.0)
            fields["logit_softcap"] = scale("final_logit_softcapping", 0.0)
        config = DFlashConfig.from_gguf(
            metadata,
            **fields,
            embedding_scale=scale("embedding_scale", 1.0),
            layers=metadata.get_ints(f"{self.name}.target_layers", count, minimum=0, maximum=1 << 10),
            block=(
                metadata.get_int(f"{self.name}.block_size", default=16, minimum=2, maximum=256),
                metadata.get_int("tokenizer.ggml.mask_token_id", minimum=0),
                metadata.get_bool(f"{self.name}.attention.causal", default=False),
                int(not metadata.get_bool(f"{self.name}.sample_from_anchor", default=True)),
            ),
            value_scale=scale("attention.value_scale", 1.0),
            gated=_ACTIVATIONS[name],
            n_draft=0,
        )
        if config.conv[1] and config.n_embd % config.conv[1]:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.conv_group_size = {config.conv[1]} does not divide the width "
                f"{config.n_embd}"
            )
        if config.block[1] >= config.n_vocab:
            raise ModelFormatError(f"{metadata.source}: tokenizer.ggml.mask_token_id = {config.block[1]} is no token")
        return config

    def of_shapes(self, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> DFlashConfig:
        """Configuration with the numbers of tokens and of the Markov head."""
        if config.selector[0]:  # its matrices are of all tokens
            return attrs.evolve(config, n_draft=config.n_vocab, block=(*config.block[:-1], 1))
        rank = shapes.get("markov_w1.weight", (0, 0))[-1]
        block = config.block if rank else (*config.block[:-1], 1)
        found: DFlashConfig = attrs.evolve(super().of_shapes(config, shapes), rank=rank, block=block)
        return found

    def window(self, metadata: Metadata, key: str) -> int:
        """Length of the sliding window, 0 in files without one."""
        return metadata.get_int(key, default=0, minimum=0)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file; some may be the model's."""
        c, table = config, super().tensors(config)
        table.add("token_embd", c.n_vocab, c.n_embd, optional=True)
        table.add("output", c.n_draft or c.n_vocab, c.n_embd, optional=True)
        table.add("fc", c.n_embd, len(c.layers) * c.n_embd)
        table.add("enc.output_norm", c.n_embd)
        table.add_tensor("d2t", c.n_draft or c.n_vocab, optional=True)
        if c.rank:
            table.add("markov_w1", c.n_vocab, c.rank)
            table.add("markov_w2", c.n_draft, c.rank)
            table.add_unused("conf_proj", 1, c.n_embd + c.rank)
            table.add_unused("conf_proj", 1, kind="bias")
        if c.selector[0]:
            table.add("selector_predecessor", c.n_vocab, c.selector[0])
            table.add("selector_successor", c.n_vocab, c.selector[0])
            table.add("selector_hidden", c.selector[0], c.n_embd)
        return table

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention; without `attn_v`, values are made of keys."""
        super().add_attention(block, c, i)
        block.add("attn_v", c.heads_kv[i] * c.value_dim, c.n_embd, optional=True)
        block.add("attn_sinks", c.n_head, optional=True)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            block.add(norm, c.n_embd, optional=True)
        block.add("layer_output_scale", 1, optional=True)
        n_taps, group = c.conv
        for branch in ("attn", "ffn") if n_taps else ():
            block.add_tensor(f"{branch}_conv_base", 2, n_taps, c.n_embd)
            block.add(f"{branch}_conv_proj", 2 * n_taps * c.n_embd // group, c.n_embd)

    def fuse(self, g: Graph, config: Any, weights: Weights) -> Value:
        """State of a token from the inputs of the layers."""
        c, w = config, weights
        x = g.linear(g.previous_hidden(len(c.layers) * c.n_embd), w.fc)
        return g.rms_norm(x, w.enc_output_norm, c.eps)

    def bias(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Logits of the Markov head, or of the selector."""
        c, w = config, weights
        if c.rank:
            return g.linear(g.embed(w.markov_w1), w.markov_w2)
        if not c.selector[0]:
            return None
        gate = g.linear(g.previous_hidden(c.n_embd), w.selector_hidden)
        return g.linear(g.mul(g.embed(w.selector_predecessor), gate), w.selector_successor)

    def n_candidates(self, config: Any) -> int | None:
        """Tokens that the selector selects from."""
        return config.selector[1] or None

    def inject(self, g: Graph, config: Any, weights: Weights) -> None:
        """Keys and values of a token of the model."""
        c, w = config, weights
        x = g.previous_hidden(c.n_embd)
        for i, block in enumerate(w.blk):
            k, v = self.keys_and_values(g, c, w, i, block, x)
            g.store(k, v, head_dim=c.head_dim, value_dim=c.value_dim, window=c.windows[i])

    def keys_and_values(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> tuple[Value, Value]:
        """Keys, normalised and rotated, and values, which may be normalised keys."""
        k = g.linear(x, block.attn_k)
        v = g.linear(x, block.attn_v) if block.attn_v else g.rms_norm(k, None, c.eps, c.head_dim)
        return self.rotate(g, c, w, i, g.rms_norm(k, block.attn_k_norm, c.eps, c.head_dim)), v

    def project(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> tuple[Value, Value, Value]:
        """Queries and keys, normalised by head and rotated, and values."""
        q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.eps, c.head_dim)
        return self.rotate(g, c, w, i, q), *self.keys_and_values(g, c, w, i, block, h)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Sinks of a block, where it has some."""
        return {"sinks": block.attn_sinks}

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention, scaled."""
        return g.linear(g.scale(a, c.value_scale) if c.value_scale != 1 else a, block.attn_output)

    def branch(self, g: Graph, c: Any, block: Params, x: Value, norm: str) -> Value:
        """Result of a residual branch, normalised where the block has a norm."""
        weight = getattr(block, norm)
        return g.rms_norm(x, weight, c.eps) if weight else x

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i, scaled where it has a scale."""
        x = super().layer(g, c, w, i, block, x)
        return g.scale(x, block.layer_output_scale) if block.layer_output_scale else x

    def attention(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Attention of block i, convolved where DFlash 2 is."""
        attend = super().attention
        return self.convolved(g, c, block, "attn", h, lambda h: attend(g, c, w, i, block, h))

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Gated network of the normalised input, convolved where DFlash 2 is."""
        return self.convolved(g, c, block, "ffn", h, lambda h: network(g, block, h, activation=c.gated))

    def convolved(
        self, g: Graph, c: Any, block: Params, name: str, h: Value, branch: Callable[[Value], Value]
    ) -> Value:
        """Result of a branch between two convolutions."""
        if not c.conv[0]:
            return branch(h)
        base, factors = getattr(block, f"{name}_conv_base"), g.linear(h, getattr(block, f"{name}_conv_proj"))
        return g.block_conv(branch(g.block_conv(h, base, factors, 0)), base, factors, 1)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(DFlash())
