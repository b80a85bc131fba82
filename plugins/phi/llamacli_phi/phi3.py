"""Phi-3, Phi-3.5-mini, Phi-4-mini and Phi-4.

Abdin et al. 2024 (arXiv:2404.14219, 2412.08905). A pre-norm decoder: RMSNorm, rotary attention, SwiGLU; queries, keys
and values are one matrix, gate and up another. Contexts beyond the original one use LongRoPE (Ding et al. 2024,
arXiv:2402.13753).
"""

import logging
import re

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Params, Rope, TensorTable, Value, Weights

_PHI_3 = re.compile(r"phi-?3", re.IGNORECASE)
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")

_log = logging.getLogger(__name__)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class PhiConfig(Config):
    """Hyperparameters of Phi.

    `rope` rotates halves of heads (NeoX order), or of the first dimensions of each. With `longrope`, frequencies are
    divided by factors, which differ between contexts within the original length and longer ones.
    """

    rope: Rope
    longrope: bool


class Phi3(Architecture):
    """`general.architecture = phi3`."""

    name = "phi3"

    def configure(self, metadata: Metadata) -> PhiConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        scaled = metadata.get_str(f"{self.name}.rope.scaling.type", default="longrope") != "longrope"
        longrope = common.context_length > rope.n_ctx_orig and not scaled
        window = f"{self.name}.attention.sliding_window"
        if n_window := metadata.get_int(window, default=0, minimum=0):
            _log.warning("%s: %s = %d is ignored: attention is full", metadata.source, window, n_window)
        return PhiConfig.from_gguf(metadata, rope=rope, longrope=longrope)

    def tensors(self, config: PhiConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for factors in ("rope_factors_long", "rope_factors_short"):
            table.add(factors, c.rope.n_dims // 2, optional=not c.longrope)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            block.add("ffn_up", 2 * c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: PhiConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            x = x + self.attend(g, c, w, block, g.rms_norm(x, block.attn_norm, c.rms_eps))
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            gate, up = block.ffn_up.split(c.n_ff, c.n_ff)
            x = x + g.linear(g.swiglu(g.linear(h, gate), g.linear(h, up)), block.ffn_down)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def attend(self, g: Graph, c: PhiConfig, w: Weights, block: Params, h: Value) -> Value:
        """Attention of one layer over its normed input."""
        factors = w.rope_factors_short, w.rope_factors_long
        q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
        q, k = (g.rope(heads, c.rope, c.head_dim, *factors) for heads in (q, k))
        a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
        return g.linear(a, block.attn_output)

    def strips_after(self, metadata: Metadata, special: str) -> bool:
        """True for Phi-3's special tokens, except for three.

        No key stores this; llama.cpp recognises the model by its name too.
        """
        return bool(_PHI_3.search(metadata.get_str("general.name", ""))) and special not in _KEEP_SPACE
