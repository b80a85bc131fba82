"""Draft heads of Gemma 4: layers that read the model's KV cache.

A matrix joins the model's embedding of a token and its hidden state at the token before. Layers have queries alone, and
attend to the keys and values of the model's last layer, or in sliding layers to those of the last but one.
"""

from typing import Any

import attrs

from llamacli.plugin import CacheHeadArchitecture, Graph, Metadata, ModelFormatError, TensorTable, Value, Weights
from llamacli_gemma import family
from llamacli_gemma.family import GemmaConfig
from llamacli_gemma.gemma4 import Gemma4Layer, read_layers


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class AssistantConfig(GemmaConfig):
    """Hyperparameters; `n_model` is the width of the model's hidden states."""

    layers: tuple[Gemma4Layer, ...]
    n_model: int
    source: str


class Gemma4Assistant(CacheHeadArchitecture):
    """`general.architecture = gemma4-assistant`."""

    name = "gemma4-assistant"

    def configure(self, metadata: Metadata) -> AssistantConfig:
        """Read the hyperparameters."""
        layers, largest, _ = read_layers(metadata, self.name)
        for key in ("nextn_predict_layers", "attention.shared_kv_layers"):
            if (n := metadata.get_int(f"{self.name}.{key}", default=len(layers))) != len(layers):
                raise ModelFormatError(f"{metadata.source}: {self.name}.{key} = {n}, and it has {len(layers)} layers")
        if any(layer.window == 1 for layer in layers):
            raise ModelFormatError(f"{metadata.source}: {self.name}.attention.sliding_window = 1 sees no cached token")
        return AssistantConfig.from_gguf(
            metadata,
            **largest,
            layers=layers,
            attention_scale=1.0,
            n_model=metadata.get_int(f"{self.name}.embedding_length_out", minimum=1, maximum=1 << 20),
            source=str(metadata.source),
        )

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        c: AssistantConfig = config
        table = TensorTable()
        family.add_vocabulary(table, c)
        table.add("nextn.pre_projection", c.n_embd, 2 * c.n_model)
        table.add("nextn.post_projection", c.n_model, c.n_embd)
        if not all(layer.window for layer in c.layers):
            table.add("rope_freqs", next(layer.rope.n_dims for layer in c.layers if not layer.window) // 2)
        for layer in c.layers:
            block, n_q = table.block(), c.n_head * layer.head_dim
            for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                block.add(norm, c.n_embd)
            block.add("attn_q", n_q, c.n_embd)
            block.add("attn_q_norm", layer.head_dim)
            block.add("attn_output", c.n_embd, n_q)
            family.add_feed_forward(block, c.n_embd, layer.n_ff)
            block.add("layer_output_scale", 1)
        return table

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Logits from the token before, a state and the model's cache."""
        c: AssistantConfig = config
        w = weights
        if len(g.cached) < 2 or w.model_embd.weight.shape[1] != c.n_model:
            raise ModelFormatError(f"{c.source}: it is no head of a model of {w.model_embd.weight.shape[1]} numbers")
        x = g.concat(g.embed(w.model_embd, c.n_model**0.5), g.previous_hidden(c.n_model))
        x = g.linear(x, w.nextn_pre_projection)
        for i, (layer, block) in enumerate(zip(c.layers, w.blk, strict=True)):
            kv = g.cached[-2 if layer.window else -1]
            shape = layer.n_head_kv, layer.head_dim, layer.window and layer.window - 1
            if shape != (kv.state.n_head_kv, kv.state.head_dim, kv.state.window):
                raise ModelFormatError(
                    f"{c.source}: its layer {i} does not fit the model's cache: heads, width, window"
                )
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, layer.head_dim)
            q = g.rope(q, layer.rope, layer.head_dim, None if layer.window else w.rope_freqs)
            a = g.attention(q, kv, scale=c.attention_scale)
            x = x + g.rms_norm(g.linear(a, block.attn_output), block.post_attention_norm, c.rms_eps)
            h = family.feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), block)
            x = g.scale(x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps), block.layer_output_scale)
        x = g.rms_norm(x, w.output_norm, c.rms_eps)
        g.passed = g.linear(x, w.nextn_post_projection)
        return g.linear(x, w.token_embd)
