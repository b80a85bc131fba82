"""Nemotron-H and Nemotron 3: state spaces, a little attention, squared ReLU.

Blakeman et al. 2025 (Nemotron-H, arXiv:2504.03624). A layer is a state space (SSD), attention without positions, or a
feed-forward network without gate, dense or a mixture of experts; RMSNorm before it.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Duality,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Scoring,
    TensorTable,
    Value,
    Weights,
    relu_squared,
)

_WIDTH = 1 << 24


@attrs.frozen
class Layer:
    """Kind of a layer.

    `n_head_kv` heads of keys and values, or a network of width `n_ff`, or a state space where both are 0.
    """

    n_head_kv: int
    n_ff: int


@attrs.frozen
class Experts:
    """Mixture of experts.

    Widths of routed experts, and how many are chosen, by layer; the width of shared ones, and of a projection around
    the routed ones, 0 if there is none; if the weights of the chosen ones are scaled to sum to 1, and by what they are
    multiplied.
    """

    widths: tuple[int, ...]
    n_used: tuple[int, ...]
    n_ff_shared: int
    n_latent: int
    renormalize: bool
    scale: float


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class HybridConfig(Config):
    """Hyperparameters of Nemotron-H; `experts` is None where networks are dense."""

    layers: tuple[Layer, ...]
    space: Duality
    attention_scale: float
    experts: Experts | None = None


class NemotronH(Architecture):
    """`general.architecture = nemotron_h`: Nemotron-H and Nemotron Nano 2."""

    name = "nemotron_h"

    def configure(self, metadata: Metadata) -> HybridConfig:
        """Read the hyperparameters."""
        name = self.name
        n_layer = metadata.get_int(f"{name}.block_count", minimum=1, maximum=1 << 10)
        metadata.get_int(f"{name}.nextn_predict_layers", default=0, maximum=0)
        metadata.get_float(f"{name}.attention.layer_norm_epsilon", default=0.0, minimum=0.0, maximum=1.0)  # of no norm
        heads, n_ff = (
            metadata.get_ints(f"{name}.{key}", n_layer, minimum=0, maximum=_WIDTH)
            for key in ("attention.head_count_kv", "feed_forward_length")
        )
        if len({*heads} - {0}) > 1 or any(a and b for a, b in zip(heads, n_ff, strict=True)):
            raise ModelFormatError(
                f"{metadata.source}: {name}.attention.head_count_kv = {list(heads)}, expected one number and 0, and 0 "
                "where feed_forward_length is above 0"
            )
        experts = self.read_experts(metadata, n_ff)
        shape = {"n_head_kv": max(*heads, 1), "n_ff": max(n_ff), "n_layer": n_layer}
        shape |= {"n_expert_used": max(experts.n_used)} if experts else {}
        common = Config.from_gguf(metadata, **shape)
        scale = metadata.get_float(f"{name}.attention.scale", default=0.0, minimum=0.0)
        return HybridConfig.from_gguf(
            metadata,
            **shape,
            layers=tuple(Layer(*kind) for kind in zip(heads, n_ff, strict=True)),
            space=Duality.from_gguf(metadata, name),
            attention_scale=scale or common.head_dim**-0.5,
            experts=experts,
        )

    def read_experts(self, metadata: Metadata, n_ff: tuple[int, ...]) -> Experts | None:
        """Mixture of experts, if there is one."""
        return None

    def tensors(self, config: HybridConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        n_q = c.n_head * c.head_dim
        for i, layer in enumerate(c.layers):
            block, n_kv = table.block(), layer.n_head_kv * c.head_dim
            block.add("attn_norm", c.n_embd)
            if n_kv:
                block.add_fused(
                    "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
                )
                block.add("attn_output", c.n_embd, n_q, bias=True)
            elif layer.n_ff and c.experts:
                self.add_experts(block, c, c.experts, i)
            elif layer.n_ff:
                block.add("ffn_up", layer.n_ff, c.n_embd, bias=True)
                block.add("ffn_down", c.n_embd, layer.n_ff, bias=True)
            else:
                c.space.add_tensors(block, c.n_embd, needs_bias=False)
        return table

    def add_experts(self, block: TensorTable, c: HybridConfig, experts: Experts, i: int) -> None:
        """Router, routed experts and the shared one of layer i."""
        width, n_ff = experts.n_latent or c.n_embd, experts.widths[i]
        block.add("ffn_gate_inp", c.n_expert, c.n_embd)
        block.add_tensor("exp_probs_b.bias", c.n_expert)
        block.add("ffn_up_exps", c.n_expert, n_ff, width)
        block.add("ffn_down_exps", c.n_expert, width, n_ff)
        if experts.n_latent:
            block.add("ffn_latent_down", width, c.n_embd)
            block.add("ffn_latent_up", c.n_embd, width)
        block.add("ffn_up_shexp", experts.n_ff_shared, c.n_embd)
        block.add("ffn_down_shexp", c.n_embd, experts.n_ff_shared)

    def forward(self, g: Graph, config: HybridConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, (block, layer) in enumerate(zip(w.blk, c.layers, strict=True)):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            if layer.n_head_kv:
                x = x + self.attention(g, c, block, h)
            elif layer.n_ff and c.experts:
                x = x + self.mixture(g, c.experts, i, block, h)
            elif layer.n_ff:
                up = g.linear(h, block.ffn_up, scale_last=True)
                x = x + g.linear(g.map(up, relu_squared), block.ffn_down, scale_last=True)
            else:
                x = x + c.space.layer(g, block, h, c.rms_eps)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def attention(self, g: Graph, c: HybridConfig, block: Params, h: Value) -> Value:
        """Attention without positions."""
        q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
        a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.attention_scale)
        return g.linear(a, block.attn_output)

    def mixture(self, g: Graph, experts: Experts, i: int, block: Params, h: Value) -> Value:
        """Routed experts, chosen by sigmoids with a bias, plus the shared one."""
        options: dict[str, Any] = {
            "n_used": experts.n_used[i], "renormalize": experts.renormalize, "scoring": Scoring.SIGMOID,
            "selection_bias": block.exp_probs_b_bias, "weight_scale": experts.scale, "activation": relu_squared,
        }  # fmt: skip
        inner = g.linear(h, block.ffn_latent_down) if experts.n_latent else h
        router = g.linear(h, block.ffn_gate_inp)
        routed = g.moe(inner, router, gate=None, up=block.ffn_up_exps, down=block.ffn_down_exps, **options)
        if experts.n_latent:
            routed = g.linear(routed, block.ffn_latent_up)
        shared = g.linear(g.map(g.linear(h, block.ffn_up_shexp), relu_squared), block.ffn_down_shexp)
        return routed + shared


class NemotronHMoe(NemotronH):
    """`general.architecture = nemotron_h_moe`: Nemotron 3 Nano, Super and Puzzle."""

    name = "nemotron_h_moe"

    def read_experts(self, metadata: Metadata, n_ff: tuple[int, ...]) -> Experts:
        """Widths of the experts, and how they are weighed."""
        metadata.get_int(f"{self.name}.expert_count", minimum=1)
        metadata.get_int(f"{self.name}.expert_shared_count", default=1, minimum=0)  # the width is that of all
        metadata.get_int(f"{self.name}.expert_group_count", default=1, maximum=1)
        return Experts(
            self._of_layers(metadata, "expert_feed_forward_length", n_ff),
            self._of_layers(metadata, "expert_used_count", n_ff),
            metadata.get_int(f"{self.name}.expert_shared_feed_forward_length", minimum=1, maximum=_WIDTH),
            metadata.get_int(f"{self.name}.moe_latent_size", default=0, minimum=0, maximum=_WIDTH),
            metadata.get_bool(f"{self.name}.expert_weights_norm", default=False),
            metadata.get_float(f"{self.name}.expert_weights_scale", default=0.0) or 1.0,
        )

    def _of_layers(self, metadata: Metadata, key: str, n_ff: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of all layers, above 0 where there is a network."""
        found = metadata.get_ints(f"{self.name}.{key}", len(n_ff), minimum=0, maximum=_WIDTH)
        if any(width and not n for width, n in zip(n_ff, found, strict=True)):
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.{key} = {list(found)}, expected numbers above 0 where "
                "feed_forward_length is"
            )
        return found
