"""GPT-2, StarCoder2, Pocket TTS: pre-norm decoders with LayerNorm, an MLP without gate.

Radford et al. 2019 (GPT-2: learned positions), Lozhkov et al. 2024 (StarCoder2, arXiv:2402.19173: RoPE).
"""

from typing import Any

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, gelu, hookimpl
from llamacli_gpt.gptneox import GptNeoX
from llamacli_gpt.stablelm import StableLm

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GptConfig(Config):
    """Without `rope`, positions are learned."""

    rope: Rope | None = None


class Gpt2(Architecture):
    """`general.architecture = gpt2`."""

    name = "gpt2"
    biases = True

    def configure(self, metadata: Metadata) -> GptConfig:
        """Read the hyperparameters."""
        return GptConfig.from_gguf(metadata, **self._norm(metadata))

    def _norm(self, metadata: Metadata) -> dict[str, Any]:
        key = f"{self.name}.attention.layer_norm_epsilon"
        return {"layer_norm_eps": metadata.get_float(key, minimum=0.0, maximum=1.0)}

    def tensors(self, config: GptConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        if not c.rope:
            table.add("position_embd", c.context_length, c.n_embd)
        table.add("output_norm", c.n_embd, needs_bias=True)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd, needs_bias=True)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q, needs_bias=self.biases)
            block.add("ffn_norm", c.n_embd, needs_bias=True)
            block.add("ffn_up", c.n_ff, c.n_embd, needs_bias=self.biases)
            block.add("ffn_down", c.n_embd, c.n_ff, needs_bias=self.biases)
        return table

    def forward(self, g: Graph, config: GptConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        if not c.rope:
            x = x + g.positions(w.position_embd)
        for block in w.blk:
            h = g.layer_norm(x, block.attn_norm, c.layer_norm_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            if c.rope:
                q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = x + g.linear(a, block.attn_output)

            h = g.layer_norm(x, block.ffn_norm, c.layer_norm_eps)
            h = g.map(g.linear(h, block.ffn_up, scale_last=True), gelu)
            x = x + g.linear(h, block.ffn_down, scale_last=True)
        return g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.output or w.token_embd)


class StarCoder2(Gpt2):
    """`general.architecture = starcoder2`: RoPE of halves of heads."""

    name = "starcoder2"
    interleaved = False

    def configure(self, metadata: Metadata) -> GptConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata, **self._norm(metadata))
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=self.interleaved)
        return GptConfig.from_gguf(metadata, rope=rope, **self._norm(metadata))


class PocketTts(StarCoder2):
    """`general.architecture = pockettts`: RoPE of pairs, linear layers without biases.

    Its hidden states are what the decoder of frames of sound reads.
    """

    name = "pockettts"
    biases = False
    interleaved = True


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the family's architectures."""
    for architecture in (Gpt2, StarCoder2, PocketTts, GptNeoX, StableLm):
        register(architecture())
