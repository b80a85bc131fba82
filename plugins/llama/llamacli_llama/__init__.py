"""Llama family: Llama 1 to 3.x, TinyLlama, Mistral, SmolLM2, Mixtral.

Touvron et al. 2023 (arXiv:2302.13971, 2307.09288), Jiang et al. 2024 (arXiv:2401.04088). A pre-norm decoder: RMSNorm,
rotary attention with grouped heads, a SwiGLU feed-forward network or a mixture of them.
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Params, Rope, TensorTable, Value, Weights, hookimpl
from llamacli_llama.chat import FORMATS

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class LlamaConfig(Config):
    """Hyperparameters of Llama.

    `rope` rotates adjacent pairs: the rows of Q and K are stored in that order.
    """

    rope: Rope


class Llama(Architecture):
    """`general.architecture = llama`."""

    name = "llama"

    def configure(self, metadata: Metadata) -> LlamaConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=True)
        return LlamaConfig.from_gguf(metadata, rope=rope)

    def tensors(self, config: LlamaConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add("attn_q", n_q, c.n_embd, bias=True)
            block.add("attn_k", n_kv, c.n_embd, bias=True)
            block.add("attn_v", n_kv, c.n_embd, bias=True)
            block.add("attn_output", c.n_embd, n_q, bias=True)
            block.add("ffn_norm", c.n_embd)
            if c.n_expert:
                block.add("ffn_gate_inp", c.n_expert, c.n_embd)
                block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
                block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
                block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)
            else:
                block.add("ffn_gate", c.n_ff, c.n_embd, bias=True)
                block.add("ffn_up", c.n_ff, c.n_embd, bias=True)
                block.add("ffn_down", c.n_embd, c.n_ff, bias=True)
        return table

    def forward(self, g: Graph, config: LlamaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rope(g.linear(h, block.attn_q), c.rope, c.head_dim, w.rope_freqs)
            k = g.rope(g.linear(h, block.attn_k), c.rope, c.head_dim, w.rope_freqs)
            v = g.linear(h, block.attn_v)
            kv = g.store(k, v, head_dim=c.head_dim)
            a = g.attention(q, kv, scale=c.head_dim**-0.5)
            x = x + g.linear(a, block.attn_output)

            x = x + self.feed_forward(g, c, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def feed_forward(self, g: Graph, c: LlamaConfig, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network, or a mixture of experts."""
        if c.n_expert:
            router = g.linear(h, block.ffn_gate_inp)
            experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
            return g.moe(h, router, **experts, n_used=c.n_expert_used)
        gate, up = (g.linear(h, param, scale_last=True) for param in (block.ffn_gate, block.ffn_up))
        return g.linear(g.swiglu(gate, up), block.ffn_down, scale_last=True)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(Llama())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat formats of this family."""
    for chat_format in FORMATS:
        register(chat_format)
