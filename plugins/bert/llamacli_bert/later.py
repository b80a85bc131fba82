"""Later BERTs with norms behind their parts.

Nomic Embed 2, Jina Embeddings 2 and 3. Nussbaum and Duderstadt 2025 (arXiv:2502.07972), Guenther et al. 2023
(arXiv:2310.19923), Sturua et al. 2024 (arXiv:2409.10173).
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Config,
    Graph,
    Metadata,
    Params,
    Rope,
    TensorTable,
    Value,
    gelu,
    hookimpl,
)
from llamacli_bert import Bert, BertConfig

LLAMACLI_API = 1

ALIBI = 8.0


class JinaBert3(Bert):
    """`general.architecture = jina-bert-v3`: BERT with RoPE."""

    name = "jina-bert-v3"
    has_positions = False

    def rope(self, metadata: Metadata, common: Config) -> Rope:
        """RoPE of halves of heads (NeoX order)."""
        return Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class NomicMoeConfig(BertConfig):
    """Block i has experts if i mod `period` is 1.

    With 0 none has.
    """

    period: int


class NomicBertMoe(JinaBert3):
    """`general.architecture = nomic-bert-moe`: experts in every second block, chosen by softmax."""

    name = "nomic-bert-moe"

    def configure(self, metadata: Metadata) -> NomicMoeConfig:
        """Read the hyperparameters."""
        common = super().configure(metadata)
        period = metadata.get_int(f"{self.name}.moe_every_n_layers", default=0, minimum=0, maximum=1 << 10)
        fields = {name: getattr(common, name) for name in ("layer_norm_eps", "n_types", "rope")}
        return NomicMoeConfig.from_gguf(metadata, **fields, period=period)

    def has_experts(self, c: Any, i: int) -> bool:
        """True if block i has experts."""
        return c.period > 0 and i % c.period == 1

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Matrices of the network or of the experts of block i."""
        if not self.has_experts(c, i):
            super().add_feed_forward(block, c, i)
            return
        block.add("ffn_gate_inp", c.n_expert, c.n_embd)
        block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
        block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, x: Value) -> Value:
        """Network or experts of block i, with GELU."""
        if not self.has_experts(c, i):
            return super().feed_forward(g, c, i, block, x)
        return g.moe(
            x,
            g.linear(x, block.ffn_gate_inp),
            gate=None,
            up=block.ffn_up_exps,
            down=block.ffn_down_exps,
            n_used=c.n_expert_used,
            renormalize=False,
            activation=gelu,
        )


class JinaBert2(Bert):
    """`general.architecture = jina-bert-v2`: ALiBi, and a gate in the network.

    Gate and up may be one matrix; files without a gate have GELU.
    """

    name = "jina-bert-v2"
    has_positions = False
    alibi = ALIBI

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add("token_types", config.n_types, config.n_embd)
        return table

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Matrices of the network, and further norms.

        Files need the bias behind attention, which other BERTs may lack.
        """
        block.add("attn_output", c.n_embd, c.n_embd, needs_bias=True)
        block.add("attn_q_norm", c.n_embd, optional=True, bias=True)
        block.add("attn_k_norm", c.n_head_kv * c.head_dim, optional=True, bias=True)
        block.add("attn_norm_2", c.n_embd, optional=True, bias=True)
        block.add("ffn_gate", c.n_ff, c.n_embd, optional=True)
        block.add("ffn_up", c.n_ff, c.n_embd, bias=True, other=(2 * c.n_ff, c.n_embd))
        block.add("ffn_down", c.n_embd, c.n_ff, needs_bias=True)

    def attended(self, g: Graph, c: BertConfig, block: Params, x: Value) -> Value:
        """Normalised sum of a value and the attention to it.

        In some models twice.
        """
        h = super().attended(g, c, block, x)
        return g.layer_norm(h + x, block.attn_norm_2, c.layer_norm_eps) if block.attn_norm_2 else h

    def place(self, g: Graph, c: BertConfig, block: Params, q: Value, k: Value) -> tuple[Value, Value]:
        """Whole queries and keys behind their norms, if there are any."""
        q = g.layer_norm(q, block.attn_q_norm, c.layer_norm_eps) if block.attn_q_norm else q
        return q, g.layer_norm(k, block.attn_k_norm, c.layer_norm_eps) if block.attn_k_norm else k

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, x: Value) -> Value:
        """Network with GELU, gated in most models."""
        up = block.ffn_up
        if block.ffn_gate:
            hidden = g.geglu(g.linear(x, block.ffn_gate), g.linear(x, up))
        elif up.weight.shape[0] == 2 * c.n_ff:
            hidden = g.geglu(*(g.linear(x, part) for part in up.split(c.n_ff, c.n_ff)))
        else:
            hidden = g.map(g.linear(x, up), gelu)
        return g.linear(hidden, block.ffn_down)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    for architecture in (NomicBertMoe, JinaBert2, JinaBert3):
        register(architecture())
