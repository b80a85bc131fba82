"""OLMo family: OLMo 2, OLMo 3 and OLMoE.

Groeneveld et al. 2024 (OLMo, arXiv:2402.00838), Muennighoff et al. 2024 (OLMoE, arXiv:2409.02060), OLMo Team 2024
(OLMo 2, arXiv:2501.00656). Queries and keys are normalised over their whole width before RoPE.
"""

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
    hookimpl,
    sliding_layers,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class OlmoConfig(Config):
    """Hyperparameters of OLMo.

    `rope` and, in sliding layers, `sliding_rope` rotate halves of heads (NeoX order). `windows` has one item per layer:
    the sliding window in tokens, the current one included, or None for full attention.
    """

    rope: Rope
    sliding_rope: Rope
    windows: tuple[int | None, ...]


class Olmo2(Architecture):
    """`general.architecture = olmo2`: OLMo 2 and OLMo 3.

    Results of attention and SwiGLU are normalised, their inputs are not. OLMo 3 adds sliding windows.
    """

    name = "olmo2"

    def configure(self, metadata: Metadata) -> OlmoConfig:
        """Read the hyperparameters; YaRN is for full layers only."""
        common = Config.from_gguf(metadata)
        metadata.get_int(f"{self.name}.rope.dimension_count", default=common.head_dim, minimum=common.head_dim)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        return OlmoConfig.from_gguf(
            metadata,
            rope=rope,
            sliding_rope=attrs.evolve(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0),
            windows=self.windows(metadata, common.n_layer),
        )

    def windows(self, metadata: Metadata, n_layer: int) -> tuple[int | None, ...]:
        """Sliding window of each layer; by default every fourth layer is full.

        Without a window, all are.
        """
        window = metadata.get_int(f"{self.name}.attention.sliding_window", default=0, minimum=0)
        if not window:
            return (None,) * n_layer
        base, sliding_base = (f"{self.name}.rope.{key}" for key in ("freq_base", "freq_base_swa"))
        if metadata.get(sliding_base, metadata.get(base)) != metadata.get(base):
            raise ModelFormatError(f"{metadata.source}: {sliding_base} differs from {base}; this is not supported")
        slides = sliding_layers(metadata, self.name, n_layer, period=4)
        return tuple(window if sliding else None for sliding in slides)

    def tensors(self, config: OlmoConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_q", n_q, c.n_embd)
            block.add("attn_k", n_kv, c.n_embd)
            block.add("attn_v", n_kv, c.n_embd)
            block.add("attn_q_norm", n_q)
            block.add("attn_k_norm", n_kv)
            block.add("attn_output", c.n_embd, n_q)
            self.add_feed_forward(block, c)
        return table

    def add_feed_forward(self, block: TensorTable, c: OlmoConfig) -> None:
        """Feed-forward network and the norms of one block."""
        block.add("post_attention_norm", c.n_embd)
        block.add("ffn_gate", c.n_ff, c.n_embd)
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)
        block.add("post_ffw_norm", c.n_embd)

    def forward(self, g: Graph, config: OlmoConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block, window in zip(w.blk, c.windows, strict=True):
            x = self.compute_block(g, c, block, x, window)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)

    def compute_block(self, g: Graph, c: OlmoConfig, block: Params, x: Value, window: int | None) -> Value:
        """Output of one block."""
        x = x + g.rms_norm(self.attention(g, c, block, x, window), block.post_attention_norm, c.rms_eps)
        h = g.linear(g.swiglu(g.linear(x, block.ffn_gate), g.linear(x, block.ffn_up)), block.ffn_down)
        return x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)

    def attention(self, g: Graph, c: OlmoConfig, block: Params, h: Value, window: int | None) -> Value:
        """Attention with normalised queries and keys."""
        rope = c.sliding_rope if window else c.rope
        q = g.rope(g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps), rope, c.head_dim)
        k = g.rope(g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps), rope, c.head_dim)
        kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim, window=window)
        return g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)


class Olmoe(Olmo2):
    """`general.architecture = olmoe`: inputs are normalised, and layers are mixtures of experts."""

    name = "olmoe"

    def configure(self, metadata: Metadata) -> OlmoConfig:
        """Read the hyperparameters; `n_ff` is the width of an expert."""
        for key in ("expert_count", "expert_used_count"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        metadata.get_int(f"{self.name}.expert_group_count", default=1, minimum=0, maximum=1)
        return super().configure(metadata)

    def windows(self, metadata: Metadata, n_layer: int) -> tuple[int | None, ...]:
        """No layer slides."""
        return (None,) * n_layer

    def add_feed_forward(self, block: TensorTable, c: OlmoConfig) -> None:
        """Router, experts and the norms of one block."""
        block.add("attn_norm", c.n_embd)
        block.add("ffn_norm", c.n_embd)
        block.add("ffn_gate_inp", c.n_expert, c.n_embd)
        block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
        block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
        block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)

    def compute_block(self, g: Graph, c: OlmoConfig, block: Params, x: Value, window: int | None) -> Value:
        """Output of one block."""
        x = x + self.attention(g, c, block, g.rms_norm(x, block.attn_norm, c.rms_eps), window)
        h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
        experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        return x + g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used, renormalize=False)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(Olmo2())
    register(Olmoe())
