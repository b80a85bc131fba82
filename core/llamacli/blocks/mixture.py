"""Feed-forward networks: a dense one, or routed and shared experts.

Dai et al. 2024 (arXiv:2401.06066): fine-grained experts chosen by a router, beside shared ones that every token passes
through. All are SwiGLU networks. Names of tensors end with `_exps` for routed experts and `_shexp` for shared ones.
"""

from __future__ import annotations

from typing import Any, Self

import attrs

from llamacli.architecture import Config
from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, Value
from llamacli.ops.activations import Activation, Formula
from llamacli.ops.moe import Scoring
from llamacli.tensor_table import Params, TensorTable

SHARED = "_shexp"
"""Suffix of the tensors of shared experts."""


def expert_groups(metadata: Metadata, architecture: str, n_expert: int) -> tuple[int, int] | None:
    """Groups of experts: their number, and how many are used.

    A single group is None.

    Raises ModelFormatError naming the keys that are invalid or contradict each other.
    """
    count, used = f"{architecture}.expert_group_count", f"{architecture}.expert_group_used_count"
    n_groups = metadata.get_int(count, default=0, minimum=0, maximum=n_expert)
    n_used = metadata.get_int(used, default=0, minimum=0)
    if n_groups > 1 and n_expert % n_groups:
        raise ModelFormatError(
            f"{metadata.source}: {count} = {n_groups} does not divide {architecture}.expert_count = {n_expert}"
        )
    if n_used > max(1, n_groups) or (n_groups > 1 and not n_used):
        raise ModelFormatError(
            f"{metadata.source}: {used} = {n_used}, expected a number from 1 to {count} = {max(1, n_groups)}"
        )
    return (n_groups, n_used) if n_groups > 1 else None


def expert_options(metadata: Metadata, architecture: str) -> dict[str, Any]:
    """Hyperparameters of routed and shared experts behind dense blocks.

    `n_dense`, the number of blocks without experts; `n_ff_expert` and `n_ff_shared`, the widths of a routed expert and
    of the shared ones together; `weight_scale`, the factor of the weights of routed experts, for which 0 means 1.

    Raises ModelFormatError for invalid keys, groups of experts and multi-token-prediction heads.
    """

    def count(key: str, minimum: int, maximum: int, **default: int) -> int:
        return metadata.get_int(f"{architecture}.{key}", minimum=minimum, maximum=maximum, **default)

    count("expert_group_count", 0, 1, default=0)
    count("nextn_predict_layers", 0, 0, default=0)
    n_ff_expert = count("expert_feed_forward_length", 1, 1 << 24)
    count("expert_count", 1, 1 << 14)
    return {
        "n_dense": count("leading_dense_block_count", 0, count("block_count", 1, 1 << 10)),
        "n_ff_expert": n_ff_expert,
        "n_ff_shared": n_ff_expert * count("expert_shared_count", 1, 1 << 14),
        "weight_scale": metadata.get_float(f"{architecture}.expert_weights_scale", default=0.0, minimum=0.0) or 1.0,
    }


def add_network(block: TensorTable, c: Config, n_ff: int, suffix: str = "") -> None:
    """Add a SwiGLU network, `n_ff` wide; shared experts have the suffix SHARED."""
    block.add(f"ffn_gate{suffix}", n_ff, c.n_embd)
    block.add(f"ffn_up{suffix}", n_ff, c.n_embd)
    block.add(f"ffn_down{suffix}", c.n_embd, n_ff)


def add_experts(block: TensorTable, c: Config, n_ff: int, *, fused: bool = False, n_in: int = 0) -> None:
    """Add router and experts, `n_ff` wide; gate and up may be `fused`.

    Experts read and write `n_in` numbers, by default `c.n_embd`.
    """
    shape = c.n_expert, n_ff, n_in or c.n_embd
    block.add("ffn_gate_inp", c.n_expert, c.n_embd)
    if fused:
        block.add_fused("ffn_gate_up_exps", ffn_gate_exps=shape, ffn_up_exps=shape)
    else:
        block.add("ffn_gate_exps", *shape)
        block.add("ffn_up_exps", *shape)
    block.add("ffn_down_exps", c.n_expert, n_in or c.n_embd, n_ff)


def network(
    g: Graph, block: Params, h: Value, suffix: str = "", activation: Activation | Formula = Activation.SWIGLU
) -> Value:
    """SwiGLU network of the normalised input, or one of another gated activation."""
    gate, up, down = (getattr(block, f"ffn_{part}{suffix}") for part in ("gate", "up", "down"))
    return g.linear(g.gated(g.linear(h, gate), g.linear(h, up), activation), down)


def experts(g: Graph, block: Params, h: Value, routed_by: Value | None = None, **routing: Any) -> Value:
    """Routed experts of the normalised input; `routing` are options of `g.moe`.

    The router reads `routed_by`, by default the same.
    """
    router = g.linear(routed_by or h, block.ffn_gate_inp)
    parts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
    return g.moe(h, router, **parts, **routing)


def experts_and_shared(g: Graph, block: Params, h: Value, **routing: Any) -> Value:
    """Sum of routed and shared experts."""
    return experts(g, block, h, **routing) + network(g, block, h, SHARED)


@attrs.frozen
class Mixture:
    """Sizes and routing of experts behind dense blocks.

    The first `n_dense` blocks have none. Routed experts are `n_ff` wide, the shared ones together `n_ff_shared`, 0
    without any. `bias` is the tensor of the selection bias, which files may lack unless `needs_bias`; "" for none.
    `routing` are options of `g.moe`.
    """

    n_dense: int
    n_ff: int
    n_ff_shared: int
    bias: str
    needs_bias: bool
    routing: dict[str, Any]

    @classmethod
    def from_gguf(
        cls,
        metadata: Metadata,
        architecture: str,
        *,
        scoring: Scoring | None = None,
        default_scoring: Scoring | None = None,
        renormalize: bool | None = None,
        n_shared: int | None = 0,
        n_ff: int | None = None,
        bias: str = "",
        needs_bias: bool = False,
        activation: Activation | Formula = Activation.SWIGLU,
    ) -> Self:
        """Read the keys `{architecture}.expert_*`.

        `scoring` and `renormalize` are those of an architecture whose files do not say; a default is that of files that
        lack the key. `n_shared` is the default of the number of shared experts, None if files must have it; `n_ff` is
        the default width of experts, for 0 too. Raises ModelFormatError naming the key that is missing, of a wrong type
        or out of range.
        """

        def count(key: str, minimum: int, maximum: int, default: int | None = None) -> int:
            name = f"{architecture}.{key}"
            known = {} if default is None else {"default": default}
            return metadata.get_int(name, minimum=minimum, maximum=maximum, **known)

        n_expert = count("expert_count", 1, 1 << 14)
        width = count("expert_feed_forward_length", 0 if n_ff else 1, 1 << 24, n_ff) or n_ff or 0
        n_ff_shared = 0
        if n_shared != 0 or f"{architecture}.expert_shared_count" in metadata:
            shared = width * count("expert_shared_count", 0, 1 << 10, n_shared)
            n_ff_shared = count("expert_shared_feed_forward_length", 0, 1 << 24, shared) or shared
        if scoring is None:
            scoring = Scoring(count("expert_gating_func", min(Scoring), max(Scoring), default_scoring))
        if renormalize is None:
            renormalize = metadata.get_bool(f"{architecture}.expert_weights_norm", default=False)
        return cls(
            n_dense=count("leading_dense_block_count", 0, 1 << 10, 0),
            n_ff=width,
            n_ff_shared=n_ff_shared,
            bias=bias,
            needs_bias=needs_bias,
            routing={
                "n_used": count("expert_used_count", 1, n_expert),
                "scoring": scoring,
                "renormalize": renormalize,
                "weight_scale": metadata.get_float(f"{architecture}.expert_weights_scale", default=0.0, minimum=0.0)
                or 1.0,
                "groups": expert_groups(metadata, architecture, n_expert),
                "activation": activation,
            },
        )

    def names(self) -> list[str]:
        """Names of the parameters of a block with experts, the router's first."""
        parts = ("gate", "up", "down", "gate_up")
        names = [
            "ffn_gate_inp",
            *(f"ffn_{part}_exps" for part in parts),
            *(f"ffn_{part}{SHARED}" for part in parts[:3]),
        ]
        return [*names, self.bias]

    def add_tensors(self, block: TensorTable, c: Config) -> None:
        """Add the tensors of a block with experts."""
        if self.bias:
            block.add_tensor(self.bias, c.n_expert, optional=not self.needs_bias)
        add_experts(block, c, self.n_ff, fused=True)
        if self.n_ff_shared:
            add_network(block, c, self.n_ff_shared, SHARED)

    def layer(
        self, g: Graph, block: Params, h: Value, shared: Activation | Formula = Activation.SWIGLU, **routing: Any
    ) -> Value:
        """Routed experts of the normalised input, plus shared ones (activation `shared`)."""
        bias = getattr(block, self.bias.replace(".", "_")) if self.bias else None
        routed = experts(g, block, h, **{**self.routing, "selection_bias": bias, **routing})
        return routed + network(g, block, h, SHARED, shared) if self.n_ff_shared else routed
