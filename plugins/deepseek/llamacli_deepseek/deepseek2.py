"""DeepSeek-V2 and V3: multi-head latent attention and mixtures of experts.

Liu et al. 2024 (arXiv:2405.04434 and arXiv:2412.19437). DeepSeek-V2, V2-Lite, V3, R1, Kimi K2, GLM-4.7-Flash,
GigaChat 3 and Mistral Large 3. All heads read one compressed vector of each token, beside a key that RoPE rotates.
Files have the projections from it absorbed into queries and outputs (`attn_k_b`, `attn_v_b`), or in an older form
(`attn_kv_b`), in which keys and values of all heads are computed and cached.
"""

import math
from typing import Any

import attrs

from llamacli.plugin import (
    SHARED,
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    Weights,
    add_experts,
    add_network,
    add_nextn,
    expert_groups,
    experts_and_shared,
    hookimpl,
    network,
    nextn_input,
    nextn_logits,
)

LLAMACLI_API = 1

_VOCABULARY_WITH_SIGMOID = 154880
"""Vocabulary of the files of 47 or 48 layers (GLM-4.7-Flash) that lack `expert_gating_func`."""


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class DeepSeek2Config(Config):
    """Hyperparameters of DeepSeek-V2 and V3.

    `rank_q` and `rank_kv` are the widths of compressed queries (0: not compressed) and of compressed keys and values.
    Keys have `nope_dim` numbers a head without positions, then those that `rope` rotates; values have `value_dim`.
    `absorbed`: the file has `attn_k_b` and `attn_v_b`. `scale` multiplies scores, `temperature` is the scale and length
    of the attention temperature. The first `n_dense` blocks have no experts; `n_ff_expert` and `n_ff_shared` are the
    widths of an expert and of the shared ones; `routing` are options of the mixture. `n_nextn` blocks behind the others
    are multi-token-prediction heads; the first of them is computed.
    """

    rope: Rope
    rank_q: int
    rank_kv: int
    nope_dim: int
    value_dim: int
    absorbed: bool
    scale: float
    temperature: tuple[float, int] | None
    n_dense: int
    n_ff_expert: int
    n_ff_shared: int
    n_nextn: int
    routing: dict[str, Any]


class DeepSeek2(Architecture):
    """`general.architecture = deepseek2`."""

    name = "deepseek2"

    def configure(self, metadata: Metadata) -> DeepSeek2Config:
        """Read the hyperparameters; without `*_length_mla`, heads are not absorbed."""

        def count(key: str, **limits: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", **{"minimum": 1, "maximum": 1 << 24} | limits)

        n_blocks = count("block_count", maximum=1 << 10)
        n_nextn = count("nextn_predict_layers", default=0, minimum=0, maximum=n_blocks - 1)
        n_rope, rank_kv = count("rope.dimension_count", minimum=2), count("attention.kv_lora_rank")
        key_dim = count("attention.key_length_mla", default=0, minimum=0)
        value_dim = count("attention.value_length_mla", default=0, minimum=0)
        absorbed = key_dim > 0 and value_dim > 0
        if (key_dim > 0) != (value_dim > 0):
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.attention.key_length_mla = {key_dim} and "
                f"{self.name}.attention.value_length_mla = {value_dim}, expected both or neither"
            )
        if absorbed:
            n_head_kv = count("attention.head_count_kv", maximum=1)
            count("attention.key_length", minimum=rank_kv + n_rope, maximum=rank_kv + n_rope)
            count("attention.value_length", minimum=rank_kv, maximum=rank_kv)
        else:
            n_head = count("attention.head_count")
            n_head_kv = count("attention.head_count_kv", default=n_head, minimum=n_head, maximum=n_head)
            key_dim, value_dim = count("attention.key_length"), count("attention.value_length")
        if key_dim <= n_rope:
            raise ModelFormatError(
                f"{metadata.source}: keys of {key_dim} numbers a head are not longer than "
                f"{self.name}.rope.dimension_count = {n_rope}"
            )
        rope, scale = self.rope_and_scale(metadata, n_rope, key_dim)
        n_ff_expert = count("expert_feed_forward_length")
        n_layer = n_blocks - n_nextn
        common = Config.from_gguf(metadata, head_dim=key_dim, n_head_kv=n_head_kv, n_layer=n_layer)
        temperature = metadata.get_float(f"{self.name}.attention.temperature_scale", default=0.0, minimum=0.0)
        return DeepSeek2Config.from_gguf(
            metadata,
            head_dim=key_dim,
            n_head_kv=n_head_kv,
            n_layer=n_layer,
            rope=rope,
            rank_q=count("attention.q_lora_rank", default=0, minimum=0),
            rank_kv=rank_kv,
            nope_dim=key_dim - n_rope,
            value_dim=value_dim,
            absorbed=absorbed,
            scale=scale,
            temperature=(temperature, count("attention.temperature_length")) if temperature else None,
            n_dense=count("leading_dense_block_count", default=0, minimum=0, maximum=n_layer),
            n_ff_expert=n_ff_expert,
            n_ff_shared=n_ff_expert * count("expert_shared_count", minimum=0, maximum=1 << 10),
            n_nextn=n_nextn,
            routing=self.routing(metadata, common),
        )

    def rope_and_scale(self, metadata: Metadata, n_rope: int, key_dim: int) -> tuple[Rope, float]:
        """RoPE and the factor of scores.

        YaRN's magnitude multiplies both parts of the scores. Where the file has a multiplier of its logarithm, it is in
        the factor, and RoPE has none.
        """
        rope = attrs.evolve(Rope.from_gguf(metadata, self.name, n_rope, interleaved=True), first=key_dim - n_rope)
        # Files store a tenth of the multiplier.
        multiplier = metadata.get_float(f"{self.name}.rope.scaling.yarn_log_multiplier", default=0.0, minimum=0.0) / 0.1
        tenth = -0.1 * math.log(rope.freq_scale)
        magnitude = rope.attn_factor * (1 + tenth)
        if rope.ext_factor and rope.freq_scale < 1 and multiplier:
            magnitude = rope.attn_factor
            rope = attrs.evolve(rope, attn_factor=rope.attn_factor / (1 + tenth))
        return rope, (magnitude * (1 + multiplier * tenth)) ** 2 / math.sqrt(key_dim)

    def routing(self, metadata: Metadata, common: Config) -> dict[str, Any]:
        """Options of the mixture."""
        lite = common.n_layer in (47, 48) and common.n_vocab == _VOCABULARY_WITH_SIGMOID
        scoring = metadata.get_int(f"{self.name}.expert_gating_func", default=0, minimum=0, maximum=4)
        return {
            "n_used": common.n_expert_used,
            "scoring": Scoring(scoring) if scoring else Scoring.SIGMOID if lite else Scoring.SOFTMAX,
            "renormalize": metadata.get_bool(f"{self.name}.expert_weights_norm", default=False),
            "weight_scale": metadata.get_float(f"{self.name}.expert_weights_scale", default=0.0, minimum=0.0) or 1.0,
            "groups": expert_groups(metadata, self.name, common.n_expert),
        }

    def tensors(self, config: DeepSeek2Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for i in range(c.n_layer):
            self.add_block(table.block(), c, i)
        for _ in range(c.n_nextn):
            block = table.block(nextn=True)
            self.add_block(block, c, c.n_layer)
            add_nextn(block, c)
        return table

    def add_block(self, block: TensorTable, c: DeepSeek2Config, i: int) -> None:
        """Tensors of block `i`."""
        n_q, n_v = c.n_head * c.head_dim, c.n_head * c.value_dim
        block.add("attn_norm", c.n_embd)
        if c.rank_q:
            block.add("attn_q_a", c.rank_q, c.n_embd)
            block.add("attn_q_a_norm", c.rank_q)
            block.add("attn_q_b", n_q, c.rank_q)
        else:
            block.add("attn_q", n_q, c.n_embd)
        block.add("attn_kv_a_mqa", c.rank_kv + c.rope.n_dims, c.n_embd)
        block.add("attn_kv_a_norm", c.rank_kv)
        if c.absorbed:
            block.add("attn_k_b", c.n_head, c.rank_kv, c.nope_dim)
            block.add("attn_v_b", c.n_head, c.value_dim, c.rank_kv)
        else:
            block.add("attn_kv_b", c.n_head * (c.nope_dim + c.value_dim), c.rank_kv)
        block.add("attn_output", c.n_embd, n_v)
        block.add("ffn_norm", c.n_embd)
        if i < c.n_dense:
            add_network(block, c, c.n_ff)
            return
        block.add_tensor("exp_probs_b.bias", c.n_expert, optional=True)
        add_experts(block, c, c.n_ff_expert, fused=True)
        add_network(block, c, c.n_ff_shared, SHARED)

    def forward(self, g: Graph, config: DeepSeek2Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x, cells = g.embed(w.token_embd), None
        for i, block in enumerate(w.blk):
            h, h_q = self.attention_inputs(g, c, block, x)
            cells = self.select(g, c, i, block, h, h_q, cells)
            x = self.feed_forward(g, c, block, x + self.attention(g, c, block, h, h_q, cells), i)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def nextn(self, g: Graph, config: DeepSeek2Config, weights: Weights) -> Value:
        """Token ids and hidden states to logits of the multi-token-prediction head."""
        c, block = config, weights.nextn[0]
        x = nextn_input(g, c, weights, block)
        x = x + self.attention(g, c, block, *self.attention_inputs(g, c, block, x), None)
        x = self.feed_forward(g, c, block, x, c.n_layer)
        return nextn_logits(g, c, weights, block, x)

    def attention_inputs(self, g: Graph, c: Any, block: Params, x: Value) -> tuple[Value, Value]:
        """Inputs of attention: x normalised, and compressed queries or the same."""
        h = g.rms_norm(x, block.attn_norm, c.rms_eps)
        return h, g.rms_norm(g.linear(h, block.attn_q_a), block.attn_q_a_norm, c.rms_eps) if c.rank_q else h

    def select(self, g: Graph, c: Any, i: int, block: Params, h: Value, h_q: Value, previous: Any) -> Any:
        """Cells that attention of block `i` reads, None for all.

        `previous` are those of the block before.
        """
        return None

    def feed_forward(self, g: Graph, c: DeepSeek2Config, block: Params, x: Value, i: int) -> Value:
        """Add the network or the experts of block `i`."""
        h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
        if i < c.n_dense:
            return x + network(g, block, h)
        return x + experts_and_shared(g, block, h, selection_bias=block.exp_probs_b_bias, **c.routing)

    def attention(self, g: Graph, c: DeepSeek2Config, block: Params, h: Value, h_q: Value, cells: Any) -> Value:
        """Multi-head latent attention of the normalised input, to chosen cells or all."""
        n_rope, d = c.rope.n_dims, c.head_dim
        q = g.linear(h_q, block.attn_q_b if c.rank_q else block.attn_q)
        compressed = g.linear(h, block.attn_kv_a_mqa)
        latent = g.rms_norm(g.columns(compressed, 0, c.rank_kv), block.attn_kv_a_norm, c.rms_eps)
        k_rope = g.columns(compressed, c.rank_kv, n_rope)
        if c.absorbed:
            rope, dims = attrs.evolve(c.rope, first=c.rank_kv), (c.rank_kv, n_rope)
            q_latent = g.batched_linear(g.columns(q, 0, c.nope_dim, of=d), block.attn_k_b)
            q = g.rope(g.concat(q_latent, g.columns(q, c.nope_dim, n_rope, of=d), of=dims), rope, sum(dims))
            k = g.rope(g.concat(latent, k_rope, of=dims), rope, sum(dims))
            kv = g.store(k, None, head_dim=sum(dims), value_dim=c.rank_kv)
            a = g.batched_linear(self.attend(g, c, block, q, kv, cells), block.attn_v_b)
        else:
            both = g.linear(latent, block.attn_kv_b)
            k_nope = g.columns(both, 0, c.nope_dim, of=c.nope_dim + c.value_dim)
            v = g.columns(both, c.nope_dim, c.value_dim, of=c.nope_dim + c.value_dim)
            q, k = (g.rope(x, c.rope, d) for x in (q, g.concat(k_nope, k_rope, of=(c.nope_dim, n_rope))))
            kv = g.store(k, v, head_dim=d, value_dim=c.value_dim)
            a = g.attention(self.warm(g, c, q), kv, scale=c.scale)
        return self.project_out(g, c, block, h, a)

    def attend(self, g: Graph, c: Any, block: Params, q: Value, kv: Any, cells: Any) -> Value:
        """Mean of the compressed values of cells for each head."""
        return g.attention(self.warm(g, c, q), kv, scale=c.scale, cells=cells)

    def project_out(self, g: Graph, c: Any, block: Params, h: Value, a: Value) -> Value:
        """Output of attention, given what was attended to and the input."""
        return g.linear(a, block.attn_output)

    def warm(self, g: Graph, c: DeepSeek2Config, q: Value) -> Value:
        """Queries with attention temperature, where the file has one."""
        return g.attention_temperature(q, *c.temperature) if c.temperature else q


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(DeepSeek2())
