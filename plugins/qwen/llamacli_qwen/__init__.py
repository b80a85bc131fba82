"""Qwen family: Qwen1.5, Qwen2, Qwen2.5 and Qwen3, dense and with experts.

Yang et al. 2024 (arXiv:2407.10671, 2412.15115), Yang et al. 2025 (arXiv:2505.09388). A pre-norm decoder: RMSNorm,
rotary attention with grouped heads, a SwiGLU feed-forward network or a mixture of them. Qwen2 adds biases to queries,
keys and values; Qwen3 normalises queries and keys instead. Qwen2-VL, Qwen2.5-VL and Qwen3-VL have M-RoPE; `vision`
has their encoders of pictures.
"""

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
    add_classifier,
    classifier_scores,
    hookimpl,
    never,
    read_mrope,
)
from llamacli_qwen.chat import FORMATS
from llamacli_qwen.hybrid import ARCHITECTURES as HYBRIDS

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class QwenConfig(Config):
    """Hyperparameters of Qwen.

    `rope` rotates halves of heads (NeoX order). `n_ff_expert` and `n_ff_shared` are the widths of routed and shared
    experts. The first `n_deepstack` layers add parts of rows of embeddings.
    """

    rope: Rope
    n_deepstack: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0


class Qwen2(Architecture):
    """`general.architecture = qwen2`: biases of queries, keys and values."""

    name = "qwen2"
    output_bias = True

    def configure(self, metadata: Metadata) -> QwenConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        return QwenConfig.from_gguf(
            metadata, rope=self.read_rope(metadata, common.head_dim), n_deepstack=self.read_deepstack(metadata, common)
        )

    def read_deepstack(self, metadata: Metadata, common: Config) -> int:
        """Number of layers that add features of pictures."""
        return 0

    def read_rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """Read the variant of RoPE."""
        return Rope.from_gguf(metadata, self.name, head_dim, interleaved=False)

    def tensors(self, config: QwenConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", self.n_outputs(c), c.n_embd, optional=True, bias=self.output_bias)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            self.add_attention(block, c)
            block.add("ffn_norm", c.n_embd)
            self.add_feed_forward(block, c)
        return table

    def n_outputs(self, c: QwenConfig) -> int:
        """Rows of the output layer."""
        return c.n_vocab

    def add_attention(self, block: TensorTable, c: QwenConfig) -> None:
        """Projections of one block."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add_fused("attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd))
        block.add("attn_output", c.n_embd, n_q)

    def add_feed_forward(self, block: TensorTable, c: QwenConfig) -> None:
        """Feed-forward network of one block."""
        block.add("ffn_gate", c.n_ff, c.n_embd)
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def forward(self, g: Graph, config: QwenConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k = (g.rope(head, c.rope, c.head_dim) for head in self.queries_and_keys(g, c, block, h))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
            x = x + self.feed_forward(g, c, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
            if i < c.n_deepstack:
                x = g.deepstack(x, i + 1)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def queries_and_keys(self, g: Graph, c: QwenConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Queries and keys before RoPE."""
        return g.linear(h, block.attn_q), g.linear(h, block.attn_k)

    def feed_forward(self, g: Graph, c: QwenConfig, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network."""
        return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)


class Qwen3(Qwen2):
    """`general.architecture = qwen3`: normalised queries and keys per head.

    Qwen3-Reranker has an output layer of two rows besides, for yes and no.
    """

    name = "qwen3"
    classifier_softmax = True

    def tensors(self, config: QwenConfig) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        add_classifier(table, config)
        return table

    def classifier(self, g: Graph, config: QwenConfig, weights: Weights) -> Value | None:
        """Probabilities of a reranker's answers."""
        return classifier_scores(g, config, weights)

    def add_attention(self, block: TensorTable, c: QwenConfig) -> None:
        """Projections of one block, and the norms of queries and keys."""
        super().add_attention(block, c)
        block.add("attn_q_norm", c.head_dim)
        block.add("attn_k_norm", c.head_dim)

    def queries_and_keys(self, g: Graph, c: QwenConfig, block: Params, h: Value) -> tuple[Value, Value]:
        """Normalised queries and keys."""
        q, k = super().queries_and_keys(g, c, block, h)
        return (
            g.rms_norm(q, block.attn_q_norm, c.rms_eps, c.head_dim),
            g.rms_norm(k, block.attn_k_norm, c.rms_eps, c.head_dim),
        )


class _Experts(Qwen2):
    """Mixture of experts in place of the feed-forward network.

    `renormalize`: scale the weights of the chosen experts to sum to 1.
    """

    renormalize: bool

    def configure(self, metadata: Metadata) -> QwenConfig:
        """Read the hyperparameters.

        Without a key, the width of an expert is that of the whole network divided by the number of experts used.
        """
        for key in ("expert_count", "expert_used_count"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        dense = super().configure(metadata)
        width = metadata.get_int(f"{self.name}.expert_feed_forward_length", default=0, minimum=0, maximum=1 << 24)
        return attrs.evolve(dense, n_ff_expert=width or dense.n_ff // dense.n_expert_used)

    def add_feed_forward(self, block: TensorTable, c: QwenConfig) -> None:
        """Router and experts of one block."""
        block.add("ffn_gate_inp", c.n_expert, c.n_embd)
        block.add("ffn_gate_exps", c.n_expert, c.n_ff_expert, c.n_embd)
        block.add("ffn_up_exps", c.n_expert, c.n_ff_expert, c.n_embd)
        block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff_expert)

    def feed_forward(self, g: Graph, c: QwenConfig, block: Params, h: Value) -> Value:
        """Mixture of experts."""
        experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        router = g.linear(h, block.ffn_gate_inp)
        return g.moe(h, router, **experts, n_used=c.n_expert_used, renormalize=self.renormalize)


class Qwen2Moe(_Experts):
    """`general.architecture = qwen2moe`: routed experts and a gated shared one."""

    name = "qwen2moe"
    renormalize = False

    def configure(self, metadata: Metadata) -> QwenConfig:
        """Read the hyperparameters."""
        routed = super().configure(metadata)
        key = f"{self.name}.expert_shared_feed_forward_length"
        width = metadata.get_int(key, default=0, minimum=0, maximum=1 << 24)
        return attrs.evolve(routed, n_ff_shared=width or routed.n_ff)

    def add_feed_forward(self, block: TensorTable, c: QwenConfig) -> None:
        """Routed experts and the shared one, whose gate is a single row."""
        super().add_feed_forward(block, c)
        block.add("ffn_gate_inp_shexp", c.n_embd)
        block.add("ffn_gate_shexp", c.n_ff_shared, c.n_embd)
        block.add("ffn_up_shexp", c.n_ff_shared, c.n_embd)
        block.add("ffn_down_shexp", c.n_embd, c.n_ff_shared)

    def feed_forward(self, g: Graph, c: QwenConfig, block: Params, h: Value) -> Value:
        """Routed experts plus the shared one."""
        shared = g.swiglu(g.linear(h, block.ffn_gate_shexp), g.linear(h, block.ffn_up_shexp))
        shared = g.sigmoid_gate(g.linear(shared, block.ffn_down_shexp), g.linear(h, block.ffn_gate_inp_shexp))
        return super().feed_forward(g, c, block, h) + shared


class Qwen3Moe(_Experts, Qwen3):
    """`general.architecture = qwen3moe`: Qwen3's attention, renormalised experts."""

    name = "qwen3moe"
    renormalize = True


class _Text(Qwen2):
    """Language model of a vision-language model, with M-RoPE.

    `alternate`: the sections of M-RoPE alternate pair by pair. The output has no bias.
    """

    output_bias = False
    alternate: bool

    def read_rope(self, metadata: Metadata, head_dim: int) -> Rope:
        """Read M-RoPE."""
        return read_mrope(metadata, self.name, head_dim, alternate=self.alternate)


class Qwen2Vl(_Text, Qwen2):
    """`general.architecture = qwen2vl`: Qwen2-VL and Qwen2.5-VL."""

    name = "qwen2vl"
    alternate = False


class _Deepstack(_Text):
    """Language model of Qwen3-VL: its first layers add features of pictures."""

    def read_deepstack(self, metadata: Metadata, common: Config) -> int:
        """Number of layers that add features of pictures."""
        return metadata.get_int(f"{self.name}.n_deepstack_layers", default=0, minimum=0, maximum=common.n_layer)


class Qwen3Vl(_Deepstack, Qwen3):
    """`general.architecture = qwen3vl`."""

    name = "qwen3vl"
    alternate = True


class Qwen3Tts(Qwen3Vl):
    """`general.architecture = qwen3tts`: its output layer has rows for codes of sound.

    They are the last tokens of the vocabulary; logits of the others, its texts, are minus infinity.
    """

    name = "qwen3tts"

    def n_outputs(self, c: QwenConfig) -> int:
        """Number of codes, of which files have no key."""
        return min(3072, c.n_vocab)

    def forward(self, g: Graph, config: QwenConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        codes = super().forward(g, config, weights)
        if not (n_texts := config.n_vocab - codes.width):
            return codes
        silence = g.map(g.columns(codes, 0, 1), never)
        return g.concat(g.repeat(silence, 1, n_texts, tiled=True), codes)


class Qwen3VlMoe(_Deepstack, Qwen3Moe):
    """`general.architecture = qwen3vlmoe`."""

    name = "qwen3vlmoe"
    alternate = True


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (Qwen2, Qwen2Moe, Qwen2Vl, Qwen3, Qwen3Moe, Qwen3Tts, Qwen3Vl, Qwen3VlMoe, *HYBRIDS):
        register(architecture())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat formats of this family."""
    for chat_format in FORMATS:
        register(chat_format)
