"""Grok 1 and 2 (xAI 2024).

Experts with GEGLU, bounded scores, and norms behind attention and experts.
"""

import math
from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    hookimpl,
    network,
)

LLAMACLI_API = 1

EMBEDDING_SCALE = 78.38367176906169
LOGIT_SCALE = 0.5773502691896257
SCORE_SCALE = 0.08838834764831845
SCORE_SOFTCAP = 30.0
BETA_FAST = 8.0


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GrokConfig(DecoderConfig):
    """`score_softcap` bounds the scores of attention."""

    score_softcap: float


class Grok(Decoder):
    """`general.architecture = grok`."""

    name = "grok"
    interleaved = False
    post_norms = True

    def configure(self, metadata: Metadata) -> GrokConfig:
        """Read the hyperparameters.

        Those that a file lacks are Grok 1's, as by llama.cpp.
        """

        def number(key: str, default: float) -> float:
            return metadata.get_float(f"{self.name}.{key}", default=default, minimum=0.0)

        changed = {
            "embedding_scale": number("embedding_scale", EMBEDDING_SCALE),
            "logit_scale": number("logit_scale", LOGIT_SCALE),
            "attention_scale": number("attention.output_scale", SCORE_SCALE),
            "logit_softcap": number("final_logit_softcapping", 0.0),
        }
        softcap = metadata.get_float(f"{self.name}.attn_logit_softcapping", default=SCORE_SOFTCAP, minimum=1e-6)
        metadata.get_int(f"{self.name}.attention.temperature_length", default=0, minimum=0)
        number("router_logit_softcapping", 0.0)
        return GrokConfig.from_gguf(metadata, **self.fields(metadata) | changed, score_softcap=softcap)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE, with keys of YaRN that other families do not have."""
        rope, key = Rope.from_gguf(metadata, self.name, head_dim, interleaved=False), f"{self.name}.rope.scaling.yarn_"
        if f"{key}beta_fast" not in metadata:
            rope = attrs.evolve(rope, beta_fast=BETA_FAST)
        factor = metadata.get_float(f"{key}ext_factor", default=-1.0)
        if factor >= 0:
            rope = attrs.evolve(rope, ext_factor=factor)
        magnitude = metadata.get_float(f"{key}attn_factor", default=1.0, minimum=0.0)
        if not rope.ext_factor:
            rope = attrs.evolve(rope, attn_factor=rope.attn_factor * magnitude)
        return (rope,) * len(windows)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts of all blocks."""
        width = metadata.get_int(f"{self.name}.feed_forward_length", minimum=1)
        mixture = Mixture.from_gguf(
            metadata, self.name, scoring=Scoring.SOFTMAX, renormalize=True, n_ff=width, activation=Activation.GEGLU
        )
        return attrs.evolve(mixture, n_dense=0, n_ff_shared=0)

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with the norm behind it."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add("attn_norm", c.n_embd)
        block.add_fused("attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd))
        block.add("attn_output", c.n_embd, n_q)
        block.add("attn_output_norm", c.n_embd)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the experts, and of norms.

        Grok 2 has a network as well.
        """
        block.add("ffn_norm", c.n_embd)
        c.mixture.add_tensors(block, c)
        for name, shape in (("gate", (c.n_ff, c.n_embd)), ("up", (c.n_ff, c.n_embd)), ("down", (c.n_embd, c.n_ff))):
            block.add(f"ffn_{name}", *shape, optional=True)
        block.add("layer_output_norm", c.n_embd)
        block.add("post_ffw_norm", c.n_embd)
        block.choose(["layer_output_norm"], ["post_ffw_norm"])

    def branch(self, g: Graph, c: Any, block: Params, x: Value, norm: str) -> Value:
        """Normalised result of attention or of the experts."""
        if norm == "post_attention_norm":
            return g.rms_norm(x, block.attn_output_norm, c.eps)
        return g.rms_norm(x, block.layer_output_norm or block.post_ffw_norm, c.eps)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Bound of the scores."""
        return {"softcap": c.score_softcap}

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Experts, in Grok 2 with a network.

        Their sum is divided by the square root of 2.
        """
        routed: Value = c.mixture.layer(g, block, h)
        if not (block.ffn_gate and block.ffn_up and block.ffn_down):
            return routed
        return g.scale(routed + network(g, block, h, activation=Activation.GEGLU), math.sqrt(2) / 2)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Grok())
