"""Encoders with norms before their parts: ModernBERT, NeoBERT, EuroBERT and bidirectional Llama.

Warner et al. 2024 (arXiv:2412.13663), Le Breton et al. 2025 (arXiv:2502.19587), Boizard et al. 2025 (arXiv:2503.05500),
NVIDIA 2025 (llama-embed-nemotron). All have RoPE and gated networks; results are the hidden states
behind the last norm.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_classifier,
    classifier_scores,
    gelu,
    hookimpl,
    tanh,
)

LLAMACLI_API = 1


ACTIVATIONS = {
    "silu": Activation.SWIGLU,
    "swish": Activation.SWIGLU,
    "swiglu": Activation.SWIGLU,
    "reglu": Activation.REGLU,
}
"""Activations by the names that files have for them; others are GEGLU."""


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class ModernBertConfig(DecoderConfig):
    """`activation` is that of the networks."""

    activation: Activation


class _Encoder(Decoder):
    """Decoder without a mask and without logits."""

    output = "none"
    may_have_bias: tuple[str, ...] = ()
    last_norm = "output_norm"
    classified_by = staticmethod(tanh)

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration; causal attention is refused."""
        if metadata.get_bool(f"{self.name}.attention.causal", default=False):
            raise ModelFormatError(f"{metadata.source}: {self.name}.attention.causal = true is not supported")
        return super().fields(metadata)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to hidden states."""
        c, w = config, weights
        x = self.embed(g, c, w)
        for i, block in enumerate(w.blk):
            x = self.layer(g, c, w, i, block, x)
        return self.normed(g, c, x, w, self.last_norm)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        add_classifier(table, config)
        return table

    def classifier(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Scores of a reranker's classes."""
        return classifier_scores(g, config, weights, self.classified_by, config.eps)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Attention in both directions."""
        return {"causal": False}


class _FusedEncoder(_Encoder):
    """Encoder whose gate and up are one matrix, `ffn_up`."""

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network."""
        block.add("ffn_norm", c.n_embd)
        block.add("ffn_up", 2 * c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Gated network."""
        gate, up = (g.linear(h, part) for part in block.ffn_up.split(c.n_ff, c.n_ff))
        return g.linear(g.gated(gate, up, self.gated_by(c)), block.ffn_down)

    def gated_by(self, c: Any) -> Activation:
        """Activation of the network."""
        return Activation.SWIGLU


class ModernBert(_FusedEncoder):
    """`general.architecture = modern-bert`: two of three layers see a window around each token."""

    name = "modern-bert"
    is_fused = True
    interleaved = False
    norm = "layer_norm"
    period = 3
    full_first = True
    classified_by = staticmethod(gelu)

    def window(self, metadata: Metadata, key: str) -> int:
        """Width of the window around a token; 0 for none."""
        return metadata.get_int(key, default=0, minimum=0)

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of layers with a window, unscaled."""
        return super().sliding_rope(metadata, attrs.evolve(rope, base=10000.0, freq_scale=1.0))

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention; the first block has no norm."""
        super().add_attention(block, c, i)
        if not i:
            block.add("attn_norm", c.n_embd, optional=True)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add("token_embd_norm", config.n_embd)
        return table

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Normalised embeddings of the tokens."""
        return g.layer_norm(g.embed(w.token_embd), w.token_embd_norm, c.eps)

    def normed(self, g: Graph, c: Any, x: Value, params: Params, name: str) -> Value:
        """Value behind the norm of this name, if there is one."""
        return super().normed(g, c, x, params, name) if getattr(params, name) else x

    def configure(self, metadata: Metadata) -> ModernBertConfig:
        """Read the hyperparameters."""
        name = metadata.get_str(f"{self.name}.hidden_activation", default="gelu")
        activation = ACTIVATIONS.get(name, Activation.GEGLU)
        pooling = metadata.get_int(f"{self.name}.classifier.pooling_type", default=1, minimum=0, maximum=4)
        fields = {**self.fields(metadata), "classifier_pooling": pooling}  # the mean, where files do not say
        return ModernBertConfig.from_gguf(metadata, **fields, activation=activation)

    def gated_by(self, c: Any) -> Activation:
        """Activation of the network."""
        activation: Activation = c.activation
        return activation


class NeoBert(_FusedEncoder):
    """`general.architecture = neo-bert`."""

    name = "neo-bert"
    is_fused = True
    last_norm = "enc_output_norm"

    def add_norm(self, table: TensorTable, name: str, width: int) -> None:
        """Add a norm; the last one has a name of its own."""
        super().add_norm(table, "enc.output_norm" if name == "output_norm" else name, width)


class EuroBert(_Encoder):
    """`general.architecture = eurobert`."""

    name = "eurobert"
    interleaved = False
    may_have_bias = ("attn_qkv",)


class LlamaEmbed(_Encoder):
    """`general.architecture = llama-embed`: Llama without a mask; files may have its output matrix."""

    name = "llama-embed"
    has_rope_freqs = True
    may_have_bias = ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add_unused("output", config.n_vocab, config.n_embd)
        return table


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    for architecture in (ModernBert, NeoBert, EuroBert, LlamaEmbed):
        register(architecture())
