"""Gemma 3n, E2B and E4B (Google DeepMind 2025).

As Gemma 3, with four residual streams (AltUp), a low-rank layer beside attention (LAuReL, Menghani et al. 2024,
arXiv:2411.07501), feed-forward networks that are sparse in the first layers, and what Gemma 4's E models have too:
an embedding of each token for every layer, and last layers that share the KV cache of earlier ones.
"""

from __future__ import annotations

import math

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    sliding_layers,
    tanh,
)
from llamacli_gemma import family
from llamacli_gemma.altup import correct, match_magnitude, predict
from llamacli_gemma.family import GemmaConfig, Layer
from llamacli_gemma.gaussian_topk import gaussian_topk

N_STREAMS = 4
LAUREL_RANK = 64
N_KV_LAYERS = 20
"""Layers with keys and values of their own in files that do not say."""
N_SPARSE, SPARSITY = 10, 1.6448533535003662
"""Sparse layers, and their distance from the mean in standard deviations, in files that do not say: 5% remain."""


@attrs.frozen(kw_only=True)
class Gemma3nLayer(Layer):
    """Layer parameters.

    The layer attends to keys and values of layer `kv_layer`, mostly its own. `sparsity`: gates below the mean plus this
    many standard deviations are 0, None for a dense layer.
    """

    n_ff: int
    kv_layer: int
    sparsity: float | None


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Gemma3nConfig(GemmaConfig):
    """Hyperparameters of Gemma 3n.

    `n_embd_per_layer` is the width of per-layer embeddings; `n_ff` is the largest of any layer.
    """

    layers: tuple[Gemma3nLayer, ...]
    n_embd_per_layer: int


class Gemma3n(Architecture):
    """`general.architecture = gemma3n`."""

    name = "gemma3n"

    def configure(self, metadata: Metadata) -> Gemma3nConfig:
        """Read the hyperparameters."""
        n_layer = metadata.get_int("gemma3n.block_count", minimum=1, maximum=1 << 10)
        n_ff = metadata.get_ints("gemma3n.feed_forward_length", n_layer, minimum=1, maximum=1 << 24)
        common = Config.from_gguf(metadata, n_ff=max(n_ff))
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        local = family.sliding_rope(
            metadata, "gemma3n.rope.freq_base_swa", attrs.evolve(rope, base=10000.0, freq_scale=1.0)
        )
        window = metadata.get_int("gemma3n.attention.sliding_window", minimum=1)
        slides = sliding_layers(metadata, self.name, n_layer, period=5)
        metadata.get_int("gemma3n.altup.num_inputs", default=N_STREAMS, minimum=N_STREAMS, maximum=N_STREAMS)
        metadata.get_int("gemma3n.altup.active_idx", default=0, minimum=0, maximum=0)
        n_head_kv = (common.n_head_kv,) * n_layer
        sources = family.kv_layers(metadata, self.name, slides, n_head_kv, max(0, n_layer - N_KV_LAYERS))
        return Gemma3nConfig.from_gguf(
            metadata,
            n_ff=common.n_ff,
            layers=tuple(
                Gemma3nLayer(
                    rope=local if slides[i] else rope,
                    window=window if slides[i] else None,
                    n_ff=n_ff[i],
                    kv_layer=sources[i],
                    sparsity=sparsity,
                )
                for i, sparsity in enumerate(_sparsity(metadata, n_layer))
            ),
            attention_scale=1.0,
            final_softcap=family.softcap(metadata, "gemma3n.final_logit_softcapping", default=30.0),
            n_embd_per_layer=metadata.get_int("gemma3n.embedding_length_per_layer_input", default=256, minimum=1),
        )

    def tensors(self, config: Gemma3nConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        family.add_vocabulary(table, c)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        table.add("altup_proj", N_STREAMS - 1, c.n_embd, c.n_embd)
        table.add("altup_unembd_proj", N_STREAMS - 1, c.n_embd, c.n_embd)
        family.add_per_layer_inputs(table, c, c.n_embd_per_layer)
        for i, layer in enumerate(c.layers):
            block = table.block()
            for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                block.add(norm, c.n_embd)
            family.add_attention(block, c.n_embd, n_q, n_kv)
            block.add("attn_q_norm", c.head_dim)
            if layer.kv_layer == i:
                block.add("attn_k_norm", c.head_dim)
            else:
                family.add_unused_keys_and_values(block, c.n_embd, n_kv, c.head_dim)
            family.add_feed_forward(block, c.n_embd, layer.n_ff)
            block.add("altup_router", N_STREAMS, c.n_embd)
            block.add("altup_router_norm", c.n_embd)
            block.add("altup_predict_coef", N_STREAMS * N_STREAMS, N_STREAMS)
            block.add("altup_correct_coef", N_STREAMS, N_STREAMS)
            block.add("altup_correct_scale", c.n_embd)
            block.add("laurel_l", LAUREL_RANK, c.n_embd)
            block.add("laurel_r", c.n_embd, LAUREL_RANK)
            block.add("laurel_post_norm", c.n_embd)
            family.add_per_layer_input(block, c, c.n_embd_per_layer)
        return table

    def forward(self, g: Graph, config: Gemma3nConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w, stored = config, weights, {}
        x = family.embed(g, c, w)
        inputs = family.per_layer_inputs(g, x, c, w, c.n_embd_per_layer)
        others = (g.linear(x, w.altup_proj.matrix(i)) for i in range(N_STREAMS - 1))
        streams = x, *(match_magnitude(g, other, x) for other in others)
        for i, (layer, block) in enumerate(zip(c.layers, w.blk, strict=True)):
            predicted = predict(g, streams, g.linear(_modalities(g, streams[0], c, block), block.altup_predict_coef))
            x = predicted[0]
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
            if layer.kv_layer == i:
                k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
                v = g.rms_norm(g.linear(h, block.attn_v), None, c.rms_eps, c.head_dim)
                k = g.rope(k, layer.rope, c.head_dim)
                stored[i] = g.store(k, v, head_dim=c.head_dim, window=layer.window)
            a = g.attention(g.rope(q, layer.rope, c.head_dim), stored[layer.kv_layer], scale=c.attention_scale)
            x = x + g.rms_norm(g.linear(a, block.attn_output), block.post_attention_norm, c.rms_eps)
            x = g.scale(x + _laurel(g, h, c, block), 2**-0.5)

            h = _feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), layer, block)
            x = x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)

            coefs = g.linear(_modalities(g, x, c, block), block.altup_correct_coef)
            first, *rest = correct(g, predicted, coefs, x)
            part = g.columns(inputs, i * c.n_embd_per_layer, c.n_embd_per_layer)
            h = g.linear(g.mul(first, block.altup_correct_scale), block.inp_gate)
            h = g.rms_norm(g.linear(g.geglu(h, part), block.proj), block.post_norm, c.rms_eps)
            streams = first, *(other + h for other in rest)
        x = streams[0]
        for i, other in enumerate(streams[1:]):
            x = x + match_magnitude(g, g.linear(other, w.altup_unembd_proj.matrix(i)), streams[0])
        return family.logits(g, g.scale(x, 1 / N_STREAMS), w.output or w.token_embd, c, w)


def _sparsity(metadata: Metadata, n_layer: int) -> list[float | None]:
    """Sparsity of each layer; files write -inf for dense ones."""
    key = "gemma3n.activation_sparsity_scale"
    if key not in metadata:
        return [SPARSITY if i < N_SPARSE else None for i in range(n_layer)]
    scales = metadata[key]
    if getattr(scales, "shape", None) != (n_layer,) or scales.dtype.kind != "f" or not (scales < math.inf).all():
        raise ModelFormatError(f"{metadata.source}: {key} must be {n_layer} numbers, or -inf for dense layers")
    return [float(scale) if scale > -math.inf else None for scale in scales]


def _modalities(g: Graph, x: Value, c: Gemma3nConfig, block: Params) -> Value:
    """Numbers, one a stream, that AltUp's coefficients are computed from."""
    h = g.scale(g.rms_norm(x, block.altup_router_norm, c.rms_eps), 1 / c.n_embd)
    return g.map(g.linear(h, block.altup_router), tanh)


def _laurel(g: Graph, h: Value, c: Gemma3nConfig, block: Params) -> Value:
    """Learned augmented residual: h plus a low-rank product of it."""
    low_rank = g.linear(g.linear(h, block.laurel_l), block.laurel_r)
    return h + g.rms_norm(low_rank, block.laurel_post_norm, c.rms_eps)


def _feed_forward(g: Graph, h: Value, layer: Gemma3nLayer, block: Params) -> Value:
    """GeGLU feed-forward network, most of whose gates may be 0."""
    if layer.sparsity is None:
        return family.feed_forward(g, h, block)
    gate = gaussian_topk(g, g.linear(h, block.ffn_gate), layer.sparsity)
    return g.linear(g.geglu(gate, g.linear(h, block.ffn_up)), block.ffn_down)
