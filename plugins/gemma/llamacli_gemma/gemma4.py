"""Gemma 4: dense, mixture-of-experts and per-layer-embedding (E2B, E4B) models.

Dense are 12B and 31B, with experts 26B-A4B. As Gemma 3, but global layers have heads of another width and number,
rotate only some pairs of each (a factor of 1e30 makes the angle of the rest zero), and may use K as V. V is normalised,
scores are not scaled. The last layers of the E models share the KV cache of earlier ones, and a second embedding of
each token is an input of every layer.
"""

import attrs

from llamacli.plugin import (
    Activation,
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
)
from llamacli_gemma import family
from llamacli_gemma.family import GemmaConfig, Layer


@attrs.frozen(kw_only=True)
class Gemma4Layer(Layer):
    """Layer parameters with head geometry.

    The layer attends to keys and values of layer `kv_layer`, mostly its own.
    """

    n_head_kv: int
    head_dim: int
    n_ff: int
    kv_layer: int


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Gemma4Config(GemmaConfig):
    """Hyperparameters of Gemma 4.

    `head_dim` is that of global layers; `n_head_kv` and `n_ff` are the largest of any layer. `n_embd_per_layer` is the
    width of per-layer embeddings, 0 without; `n_ff_expert` is the width of an expert.
    """

    layers: tuple[Gemma4Layer, ...]
    n_embd_per_layer: int
    n_ff_expert: int


class Gemma4(Architecture):
    """`general.architecture = gemma4`."""

    name = "gemma4"

    def configure(self, metadata: Metadata) -> Gemma4Config:
        """Read the hyperparameters."""
        layers, largest, common = read_layers(metadata, self.name)
        shared = family.kv_layers(metadata, self.name, [bool(a.window) for a in layers], [a.n_head_kv for a in layers])
        n_embd_per_layer = metadata.get_int("gemma4.embedding_length_per_layer_input", default=0, minimum=0)
        if common.n_expert:
            n_ff_expert = metadata.get_int("gemma4.expert_feed_forward_length", minimum=1, maximum=1 << 24)
        return Gemma4Config.from_gguf(
            metadata,
            **largest,
            layers=tuple(attrs.evolve(a, kv_layer=i) for a, i in zip(layers, shared, strict=True)),
            attention_scale=1.0,
            final_softcap=family.softcap(metadata, "gemma4.final_logit_softcapping", default=30.0),
            n_embd_per_layer=n_embd_per_layer,
            n_ff_expert=n_ff_expert if common.n_expert else 0,
        )

    def tensors(self, config: Gemma4Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        family.add_vocabulary(table, c)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        if not all(layer.window for layer in c.layers):
            table.add("rope_freqs", next(layer.rope.n_dims for layer in c.layers if not layer.window) // 2)
        if c.n_embd_per_layer:
            family.add_per_layer_inputs(table, c, c.n_embd_per_layer)
        for i, layer in enumerate(c.layers):
            block, n_q, n_kv = table.block(), c.n_head * layer.head_dim, layer.n_head_kv * layer.head_dim
            for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                block.add(norm, c.n_embd)
            family.add_attention(block, c.n_embd, n_q, n_kv)
            block.add("attn_q_norm", layer.head_dim)
            if layer.kv_layer == i:
                block.add("attn_v", n_kv, c.n_embd, optional=not layer.window)
                block.add("attn_k_norm", layer.head_dim)
            else:
                family.add_unused_keys_and_values(block, c.n_embd, n_kv, layer.head_dim)
            family.add_feed_forward(block, c.n_embd, layer.n_ff)
            if c.n_expert:
                _add_experts(block, c)
            if c.n_embd_per_layer:
                family.add_per_layer_input(block, c, c.n_embd_per_layer)
            block.add("layer_output_scale", 1, optional=True)
        return table

    def forward(self, g: Graph, config: Gemma4Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w, stored = config, weights, {}
        x = family.embed(g, c, w)
        if c.n_embd_per_layer:
            inputs = family.per_layer_inputs(g, x, c, w, c.n_embd_per_layer)
        for i, (layer, block) in enumerate(zip(c.layers, w.blk, strict=True)):
            factors = None if layer.window else w.rope_freqs
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, layer.head_dim)
            q = g.rope(q, layer.rope, layer.head_dim, factors)
            if layer.kv_layer == i:
                k = g.linear(h, block.attn_k)
                v = g.linear(h, block.attn_v) if block.attn_v else k
                k = g.rms_norm(k, block.attn_k_norm, c.rms_eps, layer.head_dim)
                k = g.rope(k, layer.rope, layer.head_dim, factors)
                v = g.rms_norm(v, None, c.rms_eps, layer.head_dim)
                stored[i] = g.store(k, v, head_dim=layer.head_dim, window=layer.window)
            a = g.attention(q, stored[layer.kv_layer], scale=c.attention_scale)
            x = x + g.rms_norm(g.linear(a, block.attn_output), block.post_attention_norm, c.rms_eps)

            h = family.feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), block)
            if c.n_expert:
                h = g.rms_norm(h, block.post_ffw_norm_1, c.rms_eps) + _experts(g, x, c, block)
            x = x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)

            if c.n_embd_per_layer:
                part = g.columns(inputs, i * c.n_embd_per_layer, c.n_embd_per_layer)
                h = g.linear(g.geglu(g.linear(x, block.inp_gate), part), block.proj)
                x = x + g.rms_norm(h, block.post_norm, c.rms_eps)
            if block.layer_output_scale:
                x = g.scale(x, block.layer_output_scale)
        return family.logits(g, x, w.output or w.token_embd, c, w)


def read_layers(metadata: Metadata, name: str) -> tuple[tuple[Gemma4Layer, ...], dict[str, int], Config]:
    """Layers with their own keys and values, largest sizes, common parameters."""
    n_layer = metadata.get_int(f"{name}.block_count", minimum=1, maximum=1 << 10)
    n_head = metadata.get_int(f"{name}.attention.head_count", minimum=1, maximum=1 << 14)
    n_head_kv = metadata.get_ints(f"{name}.attention.head_count_kv", n_layer, default=(n_head,) * n_layer, minimum=1)
    if any(n_head % n for n in n_head_kv):
        raise ModelFormatError(
            f"{metadata.source}: {name}.attention.head_count = {n_head} is not a multiple of every number in "
            f"{name}.attention.head_count_kv = {list(n_head_kv)}"
        )
    n_ff = metadata.get_ints(f"{name}.feed_forward_length", n_layer, minimum=1, maximum=1 << 24)
    largest = {"n_head_kv": max(n_head_kv), "n_ff": max(n_ff)}
    common = Config.from_gguf(metadata, **largest)
    everywhere = Layer(Rope.from_gguf(metadata, name, common.head_dim, interleaved=False))
    head_dim, local = _sliding(metadata, name, everywhere.rope)
    slides = metadata.get_bools(f"{name}.attention.sliding_window_pattern", n_layer)
    layers = tuple(
        Gemma4Layer(
            **attrs.asdict(local if slides[i] else everywhere, recurse=False),
            n_head_kv=n_head_kv[i],
            head_dim=head_dim if slides[i] else common.head_dim,
            n_ff=n_ff[i],
            kv_layer=i,
        )
        for i in range(n_layer)
    )
    return layers, largest, common


def _sliding(metadata: Metadata, name: str, rope: Rope) -> tuple[int, Layer]:
    """Head width and common layer parameters of sliding layers."""
    head_dim = metadata.get_int(f"{name}.attention.key_length_swa", minimum=2, maximum=1 << 14)
    value_dim = metadata.get_int(f"{name}.attention.value_length_swa", default=head_dim)
    if value_dim != head_dim:
        raise ModelFormatError(
            f"{metadata.source}: {name}.attention.value_length_swa = {value_dim} differs from "
            f"{name}.attention.key_length_swa = {head_dim}; this is not supported"
        )
    n_dims = metadata.get_int(f"{name}.rope.dimension_count_swa", default=head_dim, minimum=2, maximum=head_dim)
    if n_dims % 2:
        raise ModelFormatError(f"{metadata.source}: {name}.rope.dimension_count_swa = {n_dims} is odd")
    rope = family.sliding_rope(
        metadata, f"{name}.rope.freq_base_swa", attrs.evolve(rope, n_dims=n_dims, base=10000.0, freq_scale=1.0)
    )
    return head_dim, Layer(rope, metadata.get_int(f"{name}.attention.sliding_window", minimum=1))


def _add_experts(block: TensorTable, c: Gemma4Config) -> None:
    """Routed experts with their norms, and the norm of the dense network."""
    for norm in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        block.add(norm, c.n_embd)
    block.add("ffn_gate_inp", c.n_expert, c.n_embd, scale=(c.n_embd,), needs_scale=True)
    inner = c.n_expert, c.n_ff_expert, c.n_embd
    block.add_fused("ffn_gate_up_exps", ffn_gate_exps=inner, ffn_up_exps=inner)
    block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff_expert, scale=(c.n_expert,))


def _experts(g: Graph, x: Value, c: Gemma4Config, block: Params) -> Value:
    """Routed experts between their norms; the router has its own norm."""
    scaled = g.scale(g.rms_norm(x, block.ffn_gate_inp.scale, c.rms_eps), c.n_embd**-0.5)
    h = g.moe(
        g.rms_norm(x, block.pre_ffw_norm_2, c.rms_eps),
        g.linear(scaled, block.ffn_gate_inp),
        gate=block.ffn_gate_exps,
        up=block.ffn_up_exps,
        down=block.ffn_down_exps,
        n_used=c.n_expert_used,
        activation=Activation.GEGLU,
    )
    return g.rms_norm(h, block.post_ffw_norm_2, c.rms_eps)
