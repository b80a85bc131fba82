"""Granite 3 and 4: pre-norm decoders with scales, dense or with experts.

Granite Team 2024 (Granite 3.0 Language Models); scales as in Power Scheduler (Shen et al. 2024, arXiv:2408.13359).
RMSNorm, grouped heads, SwiGLU. Four numbers of the file scale embeddings, residual branches, scores and logits.
"""

import attrs

from llamacli import Architecture, Config, Graph, Rope, TensorTable, Value, Weights, hookimpl
from llamacli.architecture import Params
from llamacli.gguf import Metadata

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GraniteConfig(Config):
    """Hyperparameters of Granite.

    `rope` rotates adjacent pairs; without it, heads are not rotated. With `longrope`, frequencies are divided by
    factors that depend on the length of the context. `logit_scale` divides logits, the other scales multiply.
    `n_ff_shared` is the width of the shared expert, 0 if there is none.
    """

    rope: Rope | None
    longrope: bool
    embedding_scale: float
    residual_scale: float
    attention_scale: float
    logit_scale: float
    n_ff_shared: int


class Granite(Architecture):
    """`general.architecture = granite`."""

    name = "granite"

    def configure(self, metadata: Metadata) -> GraniteConfig:
        """Read the hyperparameters; scales of 0 are those that are not set."""
        head_dim = Config.from_gguf(metadata).head_dim
        rotated = metadata.get_bool(f"{self.name}.rope.scaling.finetuned", default=True)
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=True)

        def scale(key: str, default: float) -> float:
            return metadata.get_float(f"{self.name}.{key}", default=0.0, minimum=0.0) or default

        return GraniteConfig.from_gguf(
            metadata,
            rope=rope if rotated else None,
            longrope=rotated and metadata.get_str(f"{self.name}.rope.scaling.type", default="") == "longrope",
            embedding_scale=scale("embedding_scale", 1.0),
            residual_scale=scale("residual_scale", 1.0),
            attention_scale=scale("attention.scale", head_dim**-0.5),
            logit_scale=metadata.get_float(f"{self.name}.logit_scale", minimum=1e-9),
            n_ff_shared=metadata.get_int(
                f"{self.name}.expert_shared_feed_forward_length", default=0, minimum=0, maximum=1 << 24
            ),
        )

    def tensors(self, config: GraniteConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        if c.longrope and c.rope:
            table.add("rope_factors_long", c.rope.n_dims // 2)
            table.add("rope_factors_short", c.rope.n_dims // 2)
        elif c.rope:
            table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q, bias=True)
            block.add("ffn_norm", c.n_embd)
            if c.n_expert:
                block.add("ffn_gate_inp", c.n_expert, c.n_embd)
                block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
                block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
                block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)
                if c.n_ff_shared:
                    block.add("ffn_gate_shexp", c.n_ff_shared, c.n_embd)
                    block.add("ffn_up_shexp", c.n_ff_shared, c.n_embd)
                    block.add("ffn_down_shexp", c.n_embd, c.n_ff_shared)
            else:
                block.add("ffn_gate", c.n_ff, c.n_embd, bias=True)
                block.add("ffn_up", c.n_ff, c.n_embd, bias=True)
                block.add("ffn_down", c.n_embd, c.n_ff, bias=True)
        return table

    def forward(self, g: Graph, config: GraniteConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.scale(g.embed(w.token_embd), c.embedding_scale)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            if c.rope:
                factors = (w.rope_factors_short, w.rope_factors_long) if c.longrope else (w.rope_freqs,)
                q, k = (g.rope(heads, c.rope, c.head_dim, *factors) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.attention_scale)
            x = x + g.scale(g.linear(a, block.attn_output), c.residual_scale)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + g.scale(self.feed_forward(g, c, block, h), c.residual_scale)
        logits = g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)
        return g.scale(logits, 1 / c.logit_scale)

    def feed_forward(self, g: Graph, c: GraniteConfig, block: Params, h: Value) -> Value:
        """SwiGLU network, or routed experts plus the shared one."""
        if not c.n_expert:
            gate, up = (g.linear(h, param, scale_last=True) for param in (block.ffn_gate, block.ffn_up))
            return g.linear(g.swiglu(gate, up), block.ffn_down, scale_last=True)
        experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        routed = g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used)
        if not c.n_ff_shared:
            return routed
        shared = g.swiglu(g.linear(h, block.ffn_gate_shexp), g.linear(h, block.ffn_up_shexp))
        return routed + g.linear(shared, block.ffn_down_shexp)


class GraniteMoe(Granite):
    """`general.architecture = granitemoe`."""

    name = "granitemoe"


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the family's architectures."""
    register(Granite())
    register(GraniteMoe())
