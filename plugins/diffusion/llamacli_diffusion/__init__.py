"""Diffusion language models: LLaDA, LLaDA-MoE, Dream and RND1.

Nie et al. 2025 (arXiv:2502.09992), Ye et al. 2025 (arXiv:2508.15487). The blocks of Llama or Qwen, with attention in
both directions: all tokens of a text are predicted at once, and `llamacli.fill_masks` fills in those that are masked.
"""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_experts,
    add_network,
    experts,
    hookimpl,
    network,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class DiffusionConfig(Config):
    """Hyperparameters; `n_ff` is the width of an expert where there are some."""

    rope: Rope


class Dream(Architecture):
    """`general.architecture = dream`: Qwen2's blocks."""

    name = "dream"
    interleaved = False
    has_experts = False
    renormalizes = False

    def configure(self, metadata: Metadata) -> DiffusionConfig:
        """Read the hyperparameters; causal attention is refused."""
        if metadata.get_bool(f"{self.name}.attention.causal", default=False):
            raise ModelFormatError(f"{metadata.source}: {self.name}.attention.causal = true is not supported")
        c = Config.from_gguf(metadata)
        if bool(c.n_expert) != self.has_experts:
            raise ModelFormatError(f"{metadata.source}: {self.name}.expert_count = {c.n_expert} is not supported")
        rope, n_ff = Rope.from_gguf(metadata, self.name, c.head_dim, interleaved=self.interleaved), c.n_ff
        if self.has_experts:
            key, share = f"{self.name}.expert_feed_forward_length", c.n_ff // c.n_expert_used
            n_ff = metadata.get_int(key, default=share, minimum=1, maximum=1 << 24)
        return DiffusionConfig.from_gguf(metadata, rope=rope, n_ff=n_ff)

    def tensors(self, config: DiffusionConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            if self.has_experts:
                block.add("attn_q_norm", c.head_dim)
                block.add("attn_k_norm", c.head_dim)
                add_experts(block, c, c.n_ff)
            else:
                add_network(block, c, c.n_ff)
        return table

    def forward(self, g: Graph, config: DiffusionConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            if self.has_experts:
                q = g.rms_norm(q, block.attn_q_norm, c.rms_eps, c.head_dim)
                k = g.rms_norm(k, block.attn_k_norm, c.rms_eps, c.head_dim)
            kv = g.store(g.rope(k, c.rope, c.head_dim), v, head_dim=c.head_dim)
            q = g.rope(q, c.rope, c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5, causal=False), block.attn_output)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            if self.has_experts:
                x = x + experts(g, block, h, n_used=c.n_expert_used, renormalize=self.renormalizes)
            else:
                x = x + network(g, block, h)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)


class Llada(Dream):
    """`general.architecture = llada`: Llama's blocks."""

    name = "llada"
    interleaved = True


class LladaMoe(Dream):
    """`general.architecture = llada-moe`: OLMoE's experts, norms of the heads of queries and keys."""

    name = "llada-moe"
    has_experts = True


class Rnd1(LladaMoe):
    """`general.architecture = rnd1`: Qwen3-MoE's blocks."""

    name = "rnd1"
    renormalizes = True


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (Dream(), Llada(), LladaMoe(), Rnd1()):
        register(architecture)
