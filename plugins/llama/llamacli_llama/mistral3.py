"""Ministral 3 and Mistral Small 3: Llama's decoder, made for long contexts.

Mistral AI 2025. YaRN (Peng et al. 2023, arXiv:2309.00071) with a multiplier of its magnitude, and queries that grow
with the logarithm of the position.
"""

import math
from typing import Any

import attrs

from llamacli.plugin import Graph, Metadata, Rope, TensorTable, Value, Weights, hookimpl
from llamacli_llama import Llama, LlamaConfig

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Mistral3Config(LlamaConfig):
    """Hyperparameters of Mistral 3.

    `temperature_scale`: queries are multiplied by 1 + scale * ln(floor(position / rope.n_ctx_orig) + 1), 0 without.
    With `longrope`, frequencies are divided by factors that depend on the length of the context.
    """

    longrope: bool
    temperature_scale: float


class Mistral3(Llama):
    """`general.architecture = mistral3`."""

    name = "mistral3"

    def configure(self, metadata: Metadata) -> Mistral3Config:
        """Read the hyperparameters."""
        llama = super().configure(metadata)
        multiplier = metadata.get_float("mistral3.rope.scaling.yarn_log_multiplier", default=0.0, minimum=0.0)
        return Mistral3Config.from_gguf(
            metadata,
            rope=_with_magnitude(llama.rope, multiplier),
            longrope=metadata.get_str("mistral3.rope.scaling.type", default="") == "longrope",
            temperature_scale=metadata.get_float("mistral3.attention.temperature_scale", default=0.0),
        )

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file, with factors of LongRoPE."""
        table = super().tensors(config)
        if config.longrope:
            table.add("rope_factors_long", config.rope.n_dims // 2)
            table.add("rope_factors_short", config.rope.n_dims // 2)
        return table

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c: Mistral3Config = config
        w = weights
        factors = (w.rope_factors_short, w.rope_factors_long) if c.longrope else (w.rope_freqs,)
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (g.rope(heads, c.rope, c.head_dim, *factors) for heads in (q, k))
            if c.temperature_scale:
                q = g.attention_temperature(q, c.temperature_scale, c.rope.n_ctx_orig)
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = x + g.linear(a, block.attn_output)
            x = x + self.feed_forward(g, c, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)


def _with_magnitude(rope: Rope, multiplier: float) -> Rope:
    """RoPE whose YaRN magnitude is divided by 1 + 0.1 multiplier ln(factor)."""
    if not multiplier or not rope.ext_factor or rope.freq_scale >= 1:
        return rope
    return attrs.evolve(rope, attn_factor=rope.attn_factor / (1 - 0.1 * multiplier * math.log(rope.freq_scale)))


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Mistral3())
