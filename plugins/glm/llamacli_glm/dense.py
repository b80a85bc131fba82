"""Dense models: ChatGLM and GLM-4 (GLM Team 2024, arXiv:2406.12793).

A pre-norm decoder: RMSNorm, grouped-query attention with partial RoPE, SwiGLU with gate and up in one matrix. GLM-4 of
2025 normalises the results of both parts as well.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    add_nextn,
    nextn_input,
    nextn_logits,
)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GlmConfig(Config):
    """Hyperparameters of GLM.

    `n_nextn` blocks behind the others are multi-token-prediction heads; the first of them is computed. Of
    mixtures of experts, the first `n_dense` blocks are dense; `n_ff_expert` and `n_ff_shared` are the widths of routed
    and shared experts; `routing` are options of `g.moe`.
    """

    rope: Rope
    n_nextn: int = 0
    n_dense: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    routing: Mapping[str, Any] = {}


class ChatGlm(Architecture):
    """`general.architecture = chatglm`: ChatGLM3 and GLM-4 of 2024."""

    name = "chatglm"

    def configure(self, metadata: Metadata) -> GlmConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=True)
        return GlmConfig.from_gguf(metadata, rope=rope)

    def tensors(self, config: GlmConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for i in range(c.n_layer):
            self.add_block(table.block(), c, i)
        for i in range(c.n_layer, c.n_layer + c.n_nextn):
            block = table.block(nextn=True)
            self.add_block(block, c, i)
            add_nextn(block, c)
        return table

    def add_block(self, block: TensorTable, c: GlmConfig, i: int) -> None:
        """Tensors of block `i`."""
        self.add_attention(block, c)
        block.add("ffn_norm", c.n_embd)
        block.add("ffn_up", 2 * c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def add_attention(self, block: TensorTable, c: GlmConfig) -> None:
        """Norm and projections of attention."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add("attn_norm", c.n_embd)
        block.add_fused("attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd))
        block.add("attn_output", c.n_embd, n_q)

    def forward(self, g: Graph, config: GlmConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            x = self.compute_block(g, c, block, x, i)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def nextn(self, g: Graph, config: GlmConfig, weights: Weights) -> Value:
        """Token ids and hidden states to logits of the multi-token-prediction head."""
        c, block = config, weights.nextn[0]
        x = self.compute_block(g, c, block, nextn_input(g, c, weights, block), c.n_layer)
        return nextn_logits(g, c, weights, block, x)

    def compute_block(self, g: Graph, c: GlmConfig, block: Params, x: Value, i: int) -> Value:
        """Output of block `i`."""
        x = x + self.attention(g, c, block, x)
        return x + self.feed_forward(g, c, block, x)

    def attention(self, g: Graph, c: GlmConfig, block: Params, x: Value) -> Value:
        """Attention of the normalised input."""
        h = g.rms_norm(x, block.attn_norm, c.rms_eps)
        q, k = (g.rope(heads, c.rope, c.head_dim) for heads in self.queries_and_keys(g, c, block, h))
        kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
        return g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)

    def queries_and_keys(self, g: Graph, c: GlmConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Queries and keys before RoPE."""
        return g.linear(h, block.attn_q), g.linear(h, block.attn_k)

    def feed_forward(self, g: Graph, c: GlmConfig, block: Params, x: Value) -> Value:
        """SwiGLU feed-forward network of the normalised input."""
        h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
        gate, up = block.ffn_up.split(c.n_ff, c.n_ff)
        return g.linear(g.swiglu(g.linear(h, gate), g.linear(h, up)), block.ffn_down)


class Glm4(ChatGlm):
    """`general.architecture = glm4`: GLM-4-0414, GLM-Z1, the text part of GLM-4.1V."""

    name = "glm4"

    def configure(self, metadata: Metadata) -> GlmConfig:
        """Read the hyperparameters."""
        rope = read_rope(metadata, self.name, Config.from_gguf(metadata).head_dim, interleaved=True)
        return GlmConfig.from_gguf(metadata, rope=rope, **layers(metadata, self.name))

    def add_block(self, block: TensorTable, c: GlmConfig, i: int) -> None:
        """Tensors of block `i`."""
        super().add_block(block, c, i)
        block.add("post_attention_norm", c.n_embd)
        block.add("post_ffw_norm", c.n_embd)

    def compute_block(self, g: Graph, c: GlmConfig, block: Params, x: Value, i: int) -> Value:
        """Output of block `i`."""
        x = x + g.rms_norm(self.attention(g, c, block, x), block.post_attention_norm, c.rms_eps)
        return x + g.rms_norm(self.feed_forward(g, c, block, x), block.post_ffw_norm, c.rms_eps)


def layers(metadata: Metadata, architecture: str) -> dict[str, int]:
    """`n_layer` and `n_nextn`; `block_count` is their sum."""
    n_blocks = metadata.get_int(f"{architecture}.block_count", minimum=1, maximum=1 << 10)
    n_nextn = metadata.get_int(f"{architecture}.nextn_predict_layers", default=0, minimum=0, maximum=n_blocks - 1)
    return {"n_layer": n_blocks - n_nextn, "n_nextn": n_nextn}


def read_rope(metadata: Metadata, architecture: str, head_dim: int, *, interleaved: bool) -> Rope:
    """Read the keys of RoPE.

    Models for images have sections for time, height and width (M-RoPE), and store Q and K so that halves of heads are
    rotated; others may be `interleaved`. Raises ModelFormatError naming the key at fault.
    """
    sections = metadata.get_ints(
        f"{architecture}.rope.dimension_sections", 4, default=(0, 0, 0, 0), minimum=0, maximum=head_dim
    )
    if not (sections[0] and sections[1]):
        return Rope.from_gguf(metadata, architecture, head_dim, interleaved=interleaved)
    rope = Rope.from_gguf(metadata, architecture, head_dim, interleaved=False)
    components = [i for i in range(4) for _ in range(sections[i])]
    return attrs.evolve(rope, components=tuple(components[i % len(components)] for i in range(rope.n_dims // 2)))
