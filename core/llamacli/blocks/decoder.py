"""Transformer decoder: base class of families that differ in details.

Attention with rotary positions and grouped heads, and a feed-forward network or a mixture of experts, each behind a
norm (Vaswani et al. 2017, Touvron et al. 2023). A subclass sets attributes and overrides methods.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from llamacli.architecture import Architecture, Config, sliding_layers
from llamacli.blocks.mixture import Mixture
from llamacli.blocks.nextn import add_nextn, nextn_input, nextn_logits
from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, Param, Value
from llamacli.ops.activations import Activation, Formula
from llamacli.ops.rope import Rope
from llamacli.tensor_table import Params, TensorTable, Weights

Output = Literal["required", "optional", "none"]

_EPSILONS = {
    "rms_norm": ("rms_eps", "layer_norm_rms_epsilon"),
    "layer_norm": ("layer_norm_eps", "layer_norm_epsilon"),
}
"""Field and key of the epsilon of each kind of norm."""


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class DecoderConfig(Config):
    """Hyperparameters of a decoder.

    `heads`, `heads_kv`, `widths` (of feed-forward networks), `ropes` and `windows` (in tokens) have an item a layer;
    None is a layer without RoPE, or one that attends to everything. Values of a head are `value_dim` wide. `n_nextn`
    blocks behind the others are multi-token-prediction heads. Embeddings, residual branches,
    scores and logits are multiplied by their scales; `logit_softcap` bounds logits, 0 does not.
    """

    heads: tuple[int, ...]
    heads_kv: tuple[int, ...]
    widths: tuple[int, ...]
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    value_dim: int
    attention_scale: float
    n_nextn: int = 0
    mixture: Mixture | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def eps(self) -> float:
        """Epsilon of the norms."""
        return self.rms_eps or self.layer_norm_eps


class Decoder(Architecture):
    """Architecture with attributes to set and methods to override.

    - `interleaved`: RoPE rotates adjacent pairs, not halves of heads.
    - `norm`: kind of the norms; `has_norms`: norms have weights; `norm_bias`: they have biases, too, or may with None;
      `ffn_norm`: the name of the network's norm.
    - `qk_norm`: queries and keys are normalised by head, before or after RoPE.
    - `post_norms`: results of attention and network are normalised as well.
    - `parallel`: the network reads the input of attention.
    - `activation`: gated one of the network, or a function of one value, which has no gate then.
    - `biases`: parameters that need one; `may_have_bias`: that may have one.
    - `is_fused`: queries, keys and values are one matrix, which other files may have.
    - `output`: whether files have an output matrix; without, it is that of the embeddings.
    - `has_rope_freqs`: files may have factors of RoPE's frequencies.
    - `has_nextn`: files may have blocks of multi-token-prediction heads; with `drafts`, the first of them is computed.
    - `chooses_experts`: the blocks that have a router in the file have experts.
    - `by_layer`: keys that may be arrays.
    - `period`: of layers without a sliding window, 0 if no layer slides; `full_first`: the first of a period is full;
      `needs_pattern`: files have a boolean for each layer.
    - `has_value_dim`: values may have another width than keys.
    """

    interleaved = True
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    has_norms = True
    norm_bias: bool | None = False
    ffn_norm = "ffn_norm"
    qk_norm: Literal["", "before", "after"] = ""
    post_norms = False
    parallel = False
    activation: Activation | Formula = Activation.SWIGLU
    biases: tuple[str, ...] = ()
    may_have_bias: tuple[str, ...] = ("attn_qkv",)
    is_fused = False
    output: Output = "optional"
    has_rope_freqs = False
    has_nextn = False
    drafts = False
    chooses_experts = False
    by_layer: tuple[str, ...] = ()
    period = 0
    full_first = False
    needs_pattern = False
    has_value_dim = False

    def configure(self, metadata: Metadata) -> DecoderConfig:
        """Read the hyperparameters; `block_count` includes multi-token-prediction heads."""
        return DecoderConfig.from_gguf(metadata, **self.fields(metadata))

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration; a subclass adds to them."""
        key = f"{self.name}.attention"
        n_blocks = metadata.get_int(f"{self.name}.block_count", minimum=1, maximum=1 << 10)
        n_nextn = 0
        if self.has_nextn:
            name = f"{self.name}.nextn_predict_layers"
            n_nextn = metadata.get_int(name, default=0, minimum=0, maximum=n_blocks - 1)
        heads = self.counts(metadata, "attention.head_count", n_blocks, 1 << 14)
        heads_kv = self.counts(metadata, "attention.head_count_kv", n_blocks, 1 << 14, default=heads)
        if any(n_kv and n % n_kv for n, n_kv in zip(heads, heads_kv, strict=True)):
            raise ModelFormatError(
                f"{metadata.source}: {key}.head_count = {_shown(heads)} is not a multiple of "
                f"{key}.head_count_kv = {_shown(heads_kv)}"
            )
        most, n_head_kv = max(zip(heads, heads_kv, strict=True))
        n_embd = metadata.get_int(f"{self.name}.embedding_length", minimum=1, maximum=1 << 20)
        width = n_embd // (heads[0] or most)
        if not width or (n_embd % (heads[0] or most) and f"{key}.key_length" not in metadata):
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.embedding_length = {n_embd} is not a multiple of {key}.head_count = "
                f"{heads[0] or most}, and {key}.key_length is missing"
            )
        head_dim = metadata.get_int(f"{key}.key_length", default=width, minimum=1, maximum=1 << 14)
        value_dim = metadata.get_int(f"{key}.value_length", default=head_dim, minimum=1, maximum=1 << 14)
        if value_dim != head_dim and not self.has_value_dim:
            raise ModelFormatError(
                f"{metadata.source}: {key}.value_length = {value_dim} differs from {key}.key_length = {head_dim}; "
                "this is not supported"
            )
        windows = self.windows(metadata, n_blocks, n_blocks - n_nextn)
        widths = self.counts(metadata, "feed_forward_length", n_blocks, 1 << 24)
        return {
            **self.epsilons(metadata),
            "n_layer": n_blocks - n_nextn,
            "n_head": most,
            "n_head_kv": n_head_kv or most,
            "head_dim": head_dim,
            "n_ff": max(widths),
            "heads": heads,
            "heads_kv": heads_kv,
            "widths": widths,
            "ropes": self.ropes(metadata, head_dim, windows),
            "windows": windows,
            "value_dim": value_dim,
            "attention_scale": head_dim**-0.5,
            "n_nextn": n_nextn,
            "mixture": self.mixture(metadata),
        }

    def epsilons(self, metadata: Metadata) -> dict[str, float]:
        """Field of the epsilon of the norms."""
        field, key = _EPSILONS[self.norm]
        return {field: metadata.get_float(f"{self.name}.attention.{key}", minimum=0.0, maximum=1.0)}

    def counts(
        self, metadata: Metadata, key: str, n: int, maximum: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """Positive number of each layer; one unless the key is among `by_layer`."""
        name = f"{self.name}.{key}"
        if default and name not in metadata:
            return default
        if key in self.by_layer:
            return metadata.get_ints(name, n, minimum=0, maximum=maximum)
        return (metadata.get_int(name, minimum=1, maximum=maximum),) * n

    def windows(self, metadata: Metadata, n_blocks: int, n_layer: int) -> tuple[int | None, ...]:
        """Sliding windows of blocks, in tokens; none of multi-token-prediction heads."""
        if not self.period:
            return (None,) * n_blocks
        prefix = f"{self.name}.attention.sliding_window"
        window = self.window(metadata, prefix)
        if not window:
            return (None,) * n_blocks
        pattern = metadata.get(f"{prefix}_pattern")
        if self.needs_pattern or not isinstance(pattern, int | None):
            slides = metadata.get_bools(f"{prefix}_pattern", n_layer if _length(pattern) == n_layer else n_blocks)
        else:
            slides = sliding_layers(metadata, self.name, n_layer, self.period)
            if self.full_first:
                period = metadata.get_int(f"{prefix}_pattern", default=self.period, minimum=0)
                slides = tuple(not period or i % period != 0 for i in range(n_layer))
        slides += (False,) * (n_blocks - len(slides))
        return tuple(window if sliding else None for sliding in slides)

    def window(self, metadata: Metadata, key: str) -> int:
        """Length of the sliding window in tokens; 0 for none."""
        return metadata.get_int(key, minimum=1)

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of each block, full or sliding."""
        full = Rope.from_gguf(metadata, self.name, head_dim, interleaved=self.interleaved)
        sliding = self.sliding_rope(metadata, full) if any(windows) else full
        return tuple(sliding if window else full for window in windows)

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers."""
        base = metadata.get_float(f"{self.name}.rope.freq_base_swa", default=rope.base, minimum=2.0)
        return attrs.evolve(rope, base=base)

    def mixture(self, metadata: Metadata) -> Mixture | None:
        """Mixture of experts, None if all layers are dense."""
        return None

    def has_experts(self, c: Any, i: int) -> bool:
        """True if block i has experts."""
        return c.mixture is not None and i >= c.mixture.n_dense

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        self.add_norm(table, "output_norm", c.n_embd)
        if self.output != "none":
            table.add("output", c.n_vocab, c.n_embd, optional=self.output == "optional")
        if self.has_rope_freqs:
            table.add("rope_freqs", max(rope.n_dims for rope in c.ropes if rope) // 2, optional=True)
        for i in range(c.n_layer + c.n_nextn):
            block = table.block(unused=i >= c.n_layer, nextn=i >= c.n_layer and self.drafts)
            self.add_attention(block, c, i)
            self.add_feed_forward(block, c, i)
            if i >= c.n_layer:
                add_nextn(block, c)
        return table

    def add_norm(self, table: TensorTable, name: str, width: int) -> None:
        """Add a norm, if norms have weights."""
        if self.has_norms:
            table.add(name, width, needs_bias=bool(self.norm_bias), bias=self.norm_bias is None)

    def add(self, block: TensorTable, name: str, *shape: int, **options: Any) -> None:
        """Add a parameter with the bias that it has or may have."""
        block.add(name, *shape, bias=name in self.may_have_bias, needs_bias=name in self.biases, **options)

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the attention of block i, with its norms."""
        n_q, n_k, n_v = c.heads[i] * c.head_dim, c.heads_kv[i] * c.head_dim, c.heads_kv[i] * c.value_dim
        self.add_norm(block, "attn_norm", c.n_embd)
        if self.is_fused:
            self.add(block, "attn_qkv", n_q + n_k + n_v, c.n_embd)
        else:
            optional, needed = ("attn_qkv" in names for names in (self.may_have_bias, self.biases))
            shapes = {name: (n, c.n_embd) for name, n in (("attn_q", n_q), ("attn_k", n_k), ("attn_v", n_v))}
            block.add_fused("attn_qkv", bias=optional, needs_bias=needed, **shapes)
        self.add_head_norms(block, c)
        self.add(block, "attn_output", c.n_embd, c.heads[i] * c.value_dim)
        if self.post_norms:
            self.add_norm(block, "post_attention_norm", c.n_embd)

    def add_head_norms(self, block: TensorTable, c: Any) -> None:
        """Tensors of the norms of queries and keys."""
        if self.qk_norm:
            block.add("attn_q_norm", c.head_dim)
            block.add("attn_k_norm", c.head_dim)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network or the experts of block i, with norms."""
        if not self.parallel:
            self.add_norm(block, self.ffn_norm, c.n_embd)
        if self.has_experts(c, i) or (self.chooses_experts and c.mixture):
            c.mixture.add_tensors(block, c)
        if not self.has_experts(c, i) or self.chooses_experts:
            if isinstance(self.activation, Activation):
                self.add(block, "ffn_gate", c.widths[i], c.n_embd)
            self.add(block, "ffn_up", c.widths[i], c.n_embd)
            self.add(block, "ffn_down", c.n_embd, c.widths[i])
        if self.chooses_experts and c.mixture:
            block.choose(c.mixture.names(), ["ffn_gate", "ffn_up", "ffn_down"], prefer=self.has_experts(c, i))
        if self.post_norms:
            self.add_norm(block, "post_ffw_norm", c.n_embd)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = self.embed(g, c, w)
        for i, block in enumerate(w.blk):
            x = self.layer(g, c, w, i, block, x)
        x = self.normed(g, c, x, w, "output_norm")
        logits = g.linear(x, w.token_embd if self.output == "none" else w.output or w.token_embd)
        if c.logit_scale != 1:
            logits = g.scale(logits, c.logit_scale)
        return g.softcap(logits, c.logit_softcap) if c.logit_softcap else logits

    def nextn(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Token ids and hidden states to logits of the multi-token-prediction head."""
        if not self.drafts:
            return None
        c, w, block = config, weights, weights.nextn[0]
        x = self.layer(g, c, w, c.n_layer, block, nextn_input(g, c, w, block))
        return nextn_logits(g, c, w, block, x)

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Embeddings of the tokens."""
        x = g.embed(w.token_embd)
        return g.scale(x, c.embedding_scale) if c.embedding_scale != 1 else x

    def normed(self, g: Graph, c: Any, x: Value, params: Params, name: str) -> Value:
        """Value behind the norm of this name."""
        norm: Param | None = getattr(params, name) if self.has_norms else None
        return getattr(g, self.norm)(x, norm, c.eps)

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i."""
        h = self.normed(g, c, x, block, "attn_norm")
        attended = self.branch(g, c, block, self.attention(g, c, w, i, block, h), "post_attention_norm")
        if self.parallel:
            return x + attended + self.branch(g, c, block, self.feed_forward(g, c, i, block, h), "post_ffw_norm")
        x = x + attended
        h = self.normed(g, c, x, block, self.ffn_norm)
        return x + self.branch(g, c, block, self.feed_forward(g, c, i, block, h), "post_ffw_norm")

    def branch(self, g: Graph, c: Any, block: Params, x: Value, norm: str) -> Value:
        """Result of a residual branch, normalised and scaled."""
        if self.post_norms:
            x = self.normed(g, c, x, block, norm)
        return g.scale(x, c.residual_scale) if c.residual_scale != 1 else x

    def attention(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Attention of block i to the normalised input."""
        q, k, v = self.project(g, c, w, i, block, h)
        kv = g.store(k, v, head_dim=c.head_dim, value_dim=c.value_dim, window=c.windows[i])
        a = g.attention(q, kv, scale=c.attention_scale, **self.attention_options(c, block))
        return self.project_out(g, c, i, block, h, a)

    def attention_options(self, c: Any, block: Params) -> dict[str, Any]:
        """Further options of `g.attention`."""
        return {}

    def projections(self, c: Any, i: int, block: Params) -> list[Param]:
        """Parameters of queries, keys and values of block i."""
        if not self.is_fused:
            return [block.attn_q, block.attn_k, block.attn_v]
        heads, heads_kv = c.heads[i], c.heads_kv[i]
        parts: list[Param] = block.attn_qkv.split(heads * c.head_dim, heads_kv * c.head_dim, heads_kv * c.value_dim)
        return parts

    def project(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> tuple[Value, Value, Value]:
        """Queries and keys, normalised by head and rotated, and values."""
        q, k, v = (g.linear(h, param) for param in self.projections(c, i, block))
        if self.qk_norm == "before":
            q, k = self.norm_heads(g, c, block, q, k)
        q, k = (self.rotate(g, c, w, i, heads) for heads in (q, k))
        if self.qk_norm == "after":
            q, k = self.norm_heads(g, c, block, q, k)
        return q, k, v

    def norm_heads(self, g: Graph, c: Any, block: Params, q: Value, k: Value) -> tuple[Value, Value]:
        """Queries and keys, normalised by head."""
        return g.rms_norm(q, block.attn_q_norm, c.eps, c.head_dim), g.rms_norm(k, block.attn_k_norm, c.eps, c.head_dim)

    def rotate(self, g: Graph, c: Any, w: Weights, i: int, heads: Value) -> Value:
        """Queries or keys of block i behind RoPE, if it has one."""
        rope = c.ropes[i]
        return g.rope(heads, rope, c.head_dim, w.rope_freqs if self.has_rope_freqs else None) if rope else heads

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention, given what was attended to and the input."""
        return g.linear(a, block.attn_output)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Feed-forward network or experts of block i."""
        if block.ffn_gate_inp if self.chooses_experts else self.has_experts(c, i):
            mixture: Mixture = c.mixture
            return mixture.layer(g, block, h)
        up = g.linear(h, block.ffn_up, scale_last=True)
        if isinstance(self.activation, Activation):
            hidden = g.gated(g.linear(h, block.ffn_gate, scale_last=True), up, self.activation)
        else:
            hidden = g.map(up, self.activation)
        return g.linear(hidden, block.ffn_down, scale_last=True)


def _length(value: Any) -> int:
    """Number of items, 0 of a value without any."""
    return len(value) if hasattr(value, "__len__") else 0


def _shown(counts: tuple[int, ...]) -> str:
    return str(counts[0] if len({*counts}) == 1 else list(counts))
