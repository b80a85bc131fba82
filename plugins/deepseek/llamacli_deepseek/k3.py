"""Kimi K3 (Moonshot AI 2026): residuals by attention over depth.

Kimi Linear with full-rank gates, a bounded decay, a gate behind latent attention, experts in a latent space, and SITU
networks. Every few blocks the residual stream is kept and begun again; each branch reads a softmax-weighted mean of
what was kept and of the stream.
"""

import functools
from collections.abc import Sequence
from typing import Any

import attrs

from llamacli.plugin import (
    SHARED,
    Graph,
    Metadata,
    Params,
    TensorTable,
    Value,
    Vocabulary,
    Weights,
    add_experts,
    add_network,
    experts,
    hookimpl,
    network,
)
from llamacli_deepseek.kda import KdaConfig, KimiLinear

LLAMACLI_API = 1


@functools.cache
def situ(beta: float, beta_up: float) -> Any:
    """SITU: beta * tanh(gate / beta) * sigmoid(gate) * beta_up * tanh(up / beta_up).

    With 0 for `beta_up`, up as it is.
    """

    def situ(v: Vocabulary, gate: Any, up: Any) -> Any:
        bounded = beta_up * v.tanh(up * (1 / beta_up)) if beta_up > 0 else up
        return beta * v.tanh(gate * (1 / beta)) * v.sigmoid(gate) * bounded

    return situ


def maximum(v: Vocabulary, x: Any, y: Any) -> Any:
    """The larger of two numbers."""
    return v.maximum(x, y)


def exp_of_difference(v: Vocabulary, x: Any, y: Any) -> Any:
    """e^(x - y)."""
    return v.exp(x - y)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class K3Config(KdaConfig):
    """Hyperparameters of Kimi K3.

    The stream is kept every `period` blocks, 0 for never. Routed experts read `n_latent` numbers, 0 for the input.
    `betas` are those of SITU.
    """

    period: int
    n_latent: int
    betas: tuple[float, float]


class KimiK3(KimiLinear):
    """`general.architecture = kimi-k3`."""

    name = "kimi-k3"
    config = K3Config
    a_shape = ()
    always_renormalizes = False
    has_gate = True
    decay_sign = -1.0

    def other_fields(self, metadata: Metadata, n_blocks: int) -> dict[str, Any]:
        """Fields that architectures differ in."""
        count = functools.partial(self.count, metadata, minimum=0)
        return super().other_fields(metadata, n_blocks) | {
            "bound": metadata.get_float(f"{self.name}.kda.gate_lower_bound", default=0.0, maximum=0.0),
            "rank_q": count("attention.q_lora_rank", default=0),
            "period": count("attn_res.block_size"),
            "n_latent": count("expert_latent_length", default=0),
            "betas": tuple(metadata.get_float(f"{self.name}.activation.situ_{key}") for key in ("beta", "linear_beta")),
        }

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        if config.period:
            table.add("output_res_score", config.n_embd)
        return table

    def add_latent(self, block: TensorTable, c: Any) -> None:
        """Tensors of latent attention, with the gate that it may have."""
        super().add_latent(block, c)
        block.add("attn_gate", c.n_head * c.value_dim_mla, c.n_embd, optional=True)

    def add_gates(self, block: TensorTable, c: Any, width: int) -> None:
        """Matrices of decays, in two steps, and of gates."""
        block.add("ssm_f_a", c.kda_dim, c.n_embd)
        block.add("ssm_f_b", width, c.kda_dim)
        block.add("ssm_g", width, c.n_embd)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of network or experts, and of the means that branches read."""
        block.add("ffn_norm", c.n_embd)
        if c.period:
            block.add("attn_res_score", c.n_embd)
            block.add("ffn_res_score", c.n_embd)
        if not self.has_experts(c, i):
            add_network(block, c, c.n_ff)
            return
        block.add_tensor(c.mixture.bias, c.n_expert)
        add_experts(block, c, c.mixture.n_ff, n_in=c.n_latent)
        if c.n_latent:
            block.add("ffn_routed_down", c.n_latent, c.n_embd)
            block.add("ffn_routed_up", c.n_embd, c.n_latent)
            block.add("ffn_routed_norm", c.n_latent, optional=True)
        add_network(block, c, c.mixture.n_ff_shared, SHARED)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x, kept = g.embed(w.token_embd), list[tuple[Value, Value]]()
        for i, block in enumerate(w.blk):
            h = self.mean(g, c, x, kept, block, "attn_res_score")
            keeps = c.period > 0 and i % c.period == 0
            if keeps:
                kept.append((x, g.rms_norm(x, None, c.eps)))
            a = self.attention(g, c, w, i, block, g.rms_norm(h, block.attn_norm, c.eps))
            x = a if keeps else x + a
            h = self.mean(g, c, x, kept, block, "ffn_res_score")
            x = x + self.feed_forward(g, c, i, block, g.rms_norm(h, block.ffn_norm, c.eps))
        x = self.mean(g, c, x, kept, w, "output_res_score")
        return g.linear(g.rms_norm(x, w.output_norm, c.eps), w.output)

    def mean(self, g: Graph, c: Any, x: Value, kept: Sequence[tuple[Value, Value]], params: Params, name: str) -> Value:
        """Mean of what was kept and the stream, weighted by softmax.

        `kept` are values, and the same normalised, of which the scores are made.
        """
        if not c.period:
            return x
        score = getattr(params, name).reshaped(1, c.n_embd)
        values, normed = zip(*kept, (x, g.rms_norm(x, None, c.eps)), strict=True)
        scores = [g.linear(value, score) for value in normed]
        top = functools.reduce(lambda a, b: g.gated(a, b, maximum), scores)
        parts = [g.gated(one, top, exp_of_difference) for one in scores]
        total = functools.reduce(g.add, [g.mul(value, part) for value, part in zip(values, parts, strict=True)])
        return g.div(total, functools.reduce(g.add, parts))

    def inputs(self, g: Graph, block: Params, h: Value) -> tuple[Value, Value]:
        """Inputs of decays, in two steps, and gate."""
        return g.linear(g.linear(h, block.ssm_f_a), block.ssm_f_b), g.linear(h, block.ssm_g)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network or experts of block i."""
        activation = situ(*c.betas)
        if not self.has_experts(c, i):
            return network(g, block, h, activation=activation)
        routing = c.mixture.routing | {"activation": activation, "selection_bias": block.exp_probs_b_bias}
        latent = g.linear(h, block.ffn_routed_down) if c.n_latent else h
        routed = experts(g, block, latent, h, **routing)
        if c.n_latent:
            if block.ffn_routed_norm:
                routed = g.rms_norm(routed, block.ffn_routed_norm, c.eps)
            routed = g.linear(routed, block.ffn_routed_up)
        return routed + network(g, block, h, SHARED, activation)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(KimiK3())
