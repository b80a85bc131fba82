"""Mixture of experts (Jiang et al. 2024).

Each token is computed by its most probable experts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.kv import N_BATCH
from llamacli.ops import activations
from llamacli.ops.activations import Activation, Formula, checked_activation, formula_of
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.exchange import Gather
from llamacli.ops.lanewise import lower_lanewise, on_arrays
from llamacli.ops.linear import linear, low_rank_product, lower_linear, lower_low_rank, product
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Adapt, Array, LowRank, LowRanks, Param, Tensor, Value

_MIN_SUM = 2.0**-14
"""Lower bound of the sum of chosen probabilities, as GGML has it: the smallest normal float16."""


class Scoring(enum.IntEnum):
    """Scoring functions of a router's logits z, numbered as `expert_gating_func`.

    Softmax; sigmoid; softmax over the chosen experts' logits alone; sqrt(log(1 + e^z)).
    """

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3
    SQRT_SOFTPLUS = 4


@attrs.frozen
class Routing:
    """Choice and weights of experts.

    The `n_used` experts of largest score + `bias` are chosen, from the `groups[1]` of `groups[0]` equal groups whose
    two largest sums are largest. With `shared_by` above 1, as many neighbouring scores choose the same expert, whose
    weight is the score of its own number. Weights are scores without the bias; with `renormalize` these are scaled to
    sum to 1, and then all are multiplied by `scale`. Equal scores: the lower number first. `by_token`, (n_vocab,
    n_used), are the experts of each token instead; rows without an id have the best ones.
    """

    n_used: int
    renormalize: bool
    scoring: Scoring
    bias: Tensor | None
    groups: tuple[int, int] | None
    scale: float
    shared_by: int = 1
    by_token: Tensor | None = None

    def choose(
        self, logits: Array, bias: Array | None, chosen: Array | None = None
    ) -> tuple[npt.NDArray[np.intp], Array]:
        """Choose the experts of one token, and their weights.

        `logits` are float64 [n_expert]. The largest score comes first. `chosen` are numbers of experts, if they are
        known.
        """
        scores = _scores(self.scoring, logits)
        # Kernels compare scores in float32, so experts that are equal there must be equal here.
        ranking = (scores if bias is None else scores + bias).astype(np.float32)
        if self.groups:
            n_groups, n_groups_used = self.groups
            grouped = ranking.reshape(n_groups, -1)
            sums = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
            excluded = np.argsort(-sums, kind="stable")[n_groups_used:]
            grouped[excluded] = -np.inf
        best = np.argsort(-ranking, kind="stable")[: self.n_used] // self.shared_by
        best = best if chosen is None else chosen.astype(np.intp)
        weights = scores[best]
        if self.scoring is Scoring.SOFTMAX_OF_CHOSEN:
            weights = softmax(weights)
        if self.renormalize:
            weights = weights / max(weights.sum(), _MIN_SUM)
        return best, weights * self.scale


def _scores(scoring: Scoring, logits: Array) -> Array:
    match scoring:
        case Scoring.SOFTMAX:
            return softmax(logits)
        case Scoring.SIGMOID:
            return on_arrays(activations.sigmoid, logits)
        case Scoring.SQRT_SOFTPLUS:
            return np.sqrt(on_arrays(activations.softplus, logits))
        case Scoring.SOFTMAX_OF_CHOSEN:
            return logits


@attrs.frozen
class Expert:
    """Stacked matrices of all experts.

    Weight (n_expert, n_out, n_in), bias (n_expert, n_out), scale (n_expert,). The weight has low-rank changes.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    changes: LowRanks = ()

    @classmethod
    def of(cls, param: Param) -> Expert:
        """Tensors of a parameter."""
        return cls(param.weight, param.bias, param.scale)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are present."""
        return (*self.matrices(), *filter(None, (self.bias, self.scale)))

    def matrices(self) -> tuple[Tensor, ...]:
        """The weight, and the matrices of its low-rank changes."""
        return (self.weight, *(tensor for change in self.changes for tensor in (change.a, change.b)))

    def input_matrices(self) -> tuple[Tensor, ...]:
        """Matrices that multiply the input."""
        return (self.weight, *(change.a for change in self.changes))

    def adapted(self, adapt: Adapt) -> Expert:
        """The matrices with low-rank changes, see `Op.adapted`."""
        return attrs.evolve(self, changes=self.changes + adapt(self.weight))


@attrs.frozen(eq=False)
class MoE(Op):
    """Mixture of experts op.

    out = sum of w(e) * down_e(activation(gate_e x, up_e x)) over the chosen experts e, or, with `weigh_input`, sum of
    down_e(activation(gate_e w(e) x, up_e w(e) x)). Without gate, activation(up_e x). Each of gate, up and down is
    scale(e) * (weight(e) x) + bias(e); the scale of `down` multiplies its bias as well, unless the input is weighed.
    With `gather`, gate and up are rows of the matrices, and so is down, which reads the results
    of the others on all nodes.
    """

    x: Value
    router: Value
    gate: Expert | None
    up: Expert
    down: Expert
    routing: Routing
    activation: Activation | Formula
    weigh_input: bool
    gather: Gather | None = None

    def tensors(self) -> list[Tensor]:
        experts = filter(None, (self.gate, self.up, self.down))
        others = [*filter(None, (self.routing.bias, self.routing.by_token))]
        return [tensor for expert in experts for tensor in expert.tensors()] + others

    def matrices(self) -> list[Tensor]:
        return [matrix for expert in (self.gate, self.up, self.down) if expert for matrix in expert.matrices()]

    def adapted(self, adapt: Adapt) -> MoE:
        gate = self.gate and self.gate.adapted(adapt)
        return attrs.evolve(self, gate=gate, up=self.up.adapted(adapt), down=self.down.adapted(adapt))

    def exact_inputs(self) -> list[Value]:
        return [self.router]

    def compute(self, run: Run) -> Array:
        # Each token's experts are summed in the order of their probabilities.
        x, out = run[self.x], np.zeros((run.n, self.out.width))
        weights = {tensor: run[tensor] for tensor in self.tensors()}

        def apply(expert: Expert, e: int, row: Array, *, scaled: bool = True) -> Array:
            result = product(row, weights[expert.weight][e], is_tiled=run.is_tiled)
            for change in expert.changes:
                result = result + low_rank_product(
                    row, weights[change.a][e], weights[change.b][e], run.scale_of(change)
                )
            result = result * weights[expert.scale][e] if expert.scale and scaled else result
            return result + weights[expert.bias][e] if expert.bias else result

        bias = run[self.routing.bias] if self.routing.bias else None
        known = self._experts_of(run[self.routing.by_token]) if self.routing.by_token else None
        given = set() if run.span.inputs is None else set(run.span.inputs.rows.tolist())
        for i, logits in enumerate(run[self.router]):
            chosen = None if known is None or i in given else known[run.tokens[i]]
            for e, weight in zip(*self.routing.choose(logits, bias, chosen), strict=True):
                row = x[i : i + 1] * (weight if self.weigh_input else 1)
                up = apply(self.up, e, row)
                inputs = [apply(self.gate, e, row), up] if self.gate else [up]
                hidden = on_arrays(formula_of(self.activation), *inputs)
                hidden = self.gather.whole(hidden).astype(np.float64) if self.gather else hidden
                if self.weigh_input:
                    out[i] += apply(self.down, e, hidden)[0]
                else:
                    weight *= weights[self.down.scale][e] if self.down.scale else 1
                    out[i] += weight * apply(self.down, e, hidden, scaled=False)[0]
        return out

    def lower(self, to: Lowering) -> None:
        # Steps choose experts, sort the work by expert, compute each expert's rows in one product, and combine.
        from llamacli.kernels import experts

        n_expert, n_ff, _ = self.up.weight.shape
        routing, router, x = self.routing, f32(self.router), f32(self.x)
        n_used, bias = routing.n_used, to.vector(routing.bias) if routing.bias else None
        n_groups, n_groups_used = routing.groups or (1, 1)

        def scratch(name: str, kind: str, width: int, slots: int = 0) -> Slot:
            return Slot((self, name), kind, width, slots)

        chosen, slots, rows = (scratch(name, "int64", n_used) for name in ("chosen", "slots", "rows"))
        weights, scores = scratch("weights", "float32", n_used), scratch("scores", "float32", 3 * router.width)
        starts = scratch("starts", "int64", n_expert + 1)
        scale = to.vector(self.down.scale) if self.down.scale and not self.weigh_input else None
        by_token = None
        if routing.by_token:
            table = to.vector(routing.by_token).reshape(routing.by_token.shape[0], -1)[:, :n_used]
            by_token = to.memory(np.ascontiguousarray(self._experts_of(table)))
        to.step(
            experts.route, experts.ROUTE, router=router, scratch=scores, n_expert=router.width, n_used=n_used,
            shared_by=routing.shared_by, scoring=routing.scoring, bias=bias, n_groups=n_groups,
            n_groups_used=n_groups_used, by_token=by_token,
            renormalize=routing.renormalize, scale=scale, weight_scale=routing.scale, chosen=chosen, weights=weights,
            writes=("scratch", "chosen", "weights"),
        )  # fmt: skip
        to.step(
            experts.sort, experts.SORT, chosen=chosen, n_expert=n_expert, n_used=n_used, starts=starts, slots=slots,
            rows=rows, writes=("starts", "slots", "rows"),
        )  # fmt: skip
        self._fetch(to, starts)
        gathered = scratch("x", "f32", x.width, n_used)
        inputs = [expert for expert in (self.gate, self.up) if expert]
        if self.weigh_input:
            self._weigh(to, x, gathered, slots, weights)
        else:
            matrices = [matrix for expert in inputs for matrix in expert.input_matrices()]
            forms = {to.matrix(matrix).packing.activation for matrix in matrices}
            for form in sorted(forms | ({"f32"} if to.watches_products else set())):
                self._gather(to, to.rounded(x, form), attrs.evolve(gathered, form=form), rows)
        products = [scratch(f"product {i}", "f32", n_ff, n_used) for i in range(len(inputs))]
        for expert, product_slot in zip(inputs, products, strict=True):
            self._project(to, gathered, expert, product_slot, starts)
        out = f32(self.out)
        hidden, down = (scratch(name, "f32", width, n_used) for name, width in (("hidden", n_ff), ("down", out.width)))
        lower_lanewise(to, "gated" if self.gate else "map", formula_of(self.activation), products, hidden)
        hidden = self._gather_hidden(to, hidden, starts) if self.gather else hidden
        ones = to.shared(("ones", n_used), lambda: to.memory(np.ones((N_BATCH, n_used), np.float32)))
        if self.weigh_input:
            self._project(to, hidden, self.down, down, starts)
        else:
            self._multiply(to, hidden, self.down, down, starts, self.down.bias)
        to.step(
            experts.combine, experts.COMBINE, x=down, out=out, width=out.width, slots=slots, n_used=n_used,
            weights=ones if self.weigh_input else weights,
        )  # fmt: skip

    def _experts_of(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Experts by token; ModelFormatError for numbers that none has."""
        n_expert = self.up.weight.shape[0]
        if self.routing.by_token and not np.isin(table, np.arange(n_expert)).all():
            raise ModelFormatError(f"tensor {self.routing.by_token.name} has numbers other than 0 to {n_expert - 1}")
        return table

    def _fetch(self, to: Lowering, starts: Slot) -> None:
        """Append a step that reads the chosen experts from disk.

        Only where weights are mapped.
        """
        matrices = [to.matrix(expert.weight) for expert in (self.gate, self.up, self.down) if expert]
        stacks = [matrix.stack for matrix in matrices if matrix.stack]

        def fetch(_: HostRows, at: Callable[[Slot], Array]) -> None:
            chosen = np.flatnonzero(np.diff(at(starts).reshape(-1)[: starts.width])).tolist()
            for stack in stacks:
                stack.fetch(chosen)

        if stacks:
            to.host_step(fetch, [starts], [])

    def _gather_hidden(self, to: Lowering, own: Slot, starts: Slot) -> Slot:
        gather, whole = self.gather, Slot((self, "whole"), "f32", self.down.weight.shape[-1], own.slots)
        assert gather is not None

        def exchange(_: HostRows, at: Callable[[Slot], Array]) -> None:
            n = int(at(starts).reshape(-1)[starts.width - 1])
            gather.into(at(whole)[:n], at(own)[:n, : own.width])

        to.host_step(exchange, [own, starts], [whole])
        return whole

    def _weigh(self, to: Lowering, x: Slot, target: Slot, slots: Slot, weights: Slot) -> None:
        from llamacli.kernels import experts

        to.step(
            experts.weigh, experts.WEIGH, x=x, out=target, width=x.width, slots=slots, weights=weights,
            n_used=self.routing.n_used,
        )  # fmt: skip

    def _gather(self, to: Lowering, source: Slot, target: Slot, rows: Slot) -> None:
        from llamacli.kernels import experts

        to.step(experts.gather, experts.GATHER, x=source, out=target, rows=rows, n_used=self.routing.n_used)

    def _project(self, to: Lowering, x: Slot, expert: Expert, out: Slot, starts: Slot) -> None:
        """Append the steps of each expert's product.

        A scale is applied between product and bias.
        """
        from llamacli.kernels import experts

        if expert.scale is None:
            self._multiply(to, x, expert, out, starts, expert.bias)
            return
        unscaled = attrs.evolve(out, owner=(out.owner, "unscaled"))
        self._multiply(to, x, expert, unscaled, starts)
        scale, biases = to.vector(expert.scale), to.vector(expert.bias) if expert.bias else to.zeros
        n_expert = expert.weight.shape[0]
        to.step(
            experts.rescale, experts.RESCALE, x=unscaled, out=out, width=out.width, starts=starts, n_expert=n_expert,
            scale=scale, bias=biases,
        )  # fmt: skip

    def _multiply(
        self, to: Lowering, x: Slot, expert: Expert, out: Slot, starts: Slot, bias: Tensor | None = None
    ) -> None:
        lower_linear(to, x, expert.weight, out, bias, starts=starts)
        for change in expert.changes:
            lower_low_rank(to, x, change, out, starts, Slot((self, "rows"), "int64", self.routing.n_used))

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        router = linear(g, x, param("router", 5, x.width))
        gate, up = (param(name, 5, 40, x.width) for name in ("gate", "up"))
        yield moe(g, x, router, gate=gate, up=up, down=param("down", 5, x.width, 40, bias=True), n_used=2)
        scaled = [Param(p.weight, p.bias, param(f"{p.weight.name}.scale", 5).weight) for p in (
            param("gate_s", 5, 40, x.width, bias=True), param("up_s", 5, 40, x.width), param("down_s", 5, x.width, 40),
        )]  # fmt: skip
        yield moe(g, x, router, gate=scaled[0], up=scaled[1], down=scaled[2], n_used=2, activation=Activation.GEGLU)
        down = param("down", 5, x.width, 40)
        for scoring in Scoring:
            yield moe(g, x, router, gate=gate, up=up, down=down, n_used=3, scoring=scoring, weight_scale=1.5)
        squared = activations.relu_squared
        options: dict[str, Any] = {"gate": None, "up": up, "down": down, "n_used": 2, "activation": squared}
        yield moe(g, x, router, scoring=Scoring.SIGMOID, selection_bias=param("bias", 5), **options)
        yield moe(g, x, router, weigh_input=True, renormalize=False, **options)
        yield moe(g, x, router, **options | {"down": param("narrow", 5, 24, 40)})
        six = linear(g, x, param("six", 6, x.width))
        gate, up = (param(f"{name}_6", 6, 40, x.width) for name in ("gate", "up"))
        yield moe(g, x, six, gate=gate, up=up, down=param("down_6", 6, x.width, 40), n_used=2, groups=(3, 2))
        gate, up, down = (param(f"{p.weight.name}_3", 3, *p.weight.shape[1:]) for p in (gate, up, options["down"]))
        yield moe(g, x, six, gate=gate, up=up, down=down, n_used=3, shared_by=2)
        yield from _adapted_examples(g, x, router, param, scaled)


def _adapted_examples(
    g: Recorder, x: Value, router: Value, param: MakeParam, scaled: Sequence[Param]
) -> Iterator[Value]:
    """Record mixtures whose experts have low-rank changes.

    With scales, without, and with a weighed input.
    """

    def changes(name: str, n_out: int, n_in: int) -> LowRanks:
        a, b = param(f"{name}.a", 5, 3, n_in).weight, param(f"{name}.b", 5, n_out, 3).weight
        return LowRank(a, b, 0.5), LowRank(a, b, 0.25)

    gate, up, down = (Expert.of(one) for one in scaled)
    plain = Expert.of(param("gate_plain", 5, 40, x.width))
    routing = Routing(2, True, Scoring.SOFTMAX, None, None, 1.0)
    up = attrs.evolve(up, changes=changes("up", 40, x.width))
    down = attrs.evolve(down, changes=changes("down", x.width, 40))
    for one in (gate, plain):
        experts = attrs.evolve(one, changes=changes("gate", 40, x.width)), up, down
        yield g.record(MoE(g.value(x.width), x, router, *experts, routing, Activation.SWIGLU, False))
    yield g.record(MoE(g.value(x.width), x, router, None, up, down, routing, activations.relu_squared, True))


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def moe(
    g: Recorder,
    x: Value,
    router: Value,
    *,
    gate: Param | None,
    up: Param,
    down: Param,
    n_used: int,
    renormalize: bool = True,
    activation: Activation | Formula = Activation.SWIGLU,
    scoring: Scoring = Scoring.SOFTMAX,
    selection_bias: Param | None = None,
    groups: tuple[int, int] | None = None,
    weight_scale: float = 1.0,
    weigh_input: bool = False,
    shared_by: int = 1,
    by_token: Param | None = None,
) -> Value:
    """Record a mixture of experts.

    Each token is given to the `n_used` experts of the largest scores, which weigh their results, or their input with
    `weigh_input`. With `renormalize` the weights are scaled to sum to 1; `weight_scale` multiplies them then.
    `selection_bias`, (n_expert,), is added to scores for the choice alone (Wang et al. 2024); `groups` are (number of
    groups, number of those that may be chosen from). Without `gate`, the activation is a function of one argument.
    Scales of the parameters, (n_expert,), multiply each expert's products. With `shared_by`, as many neighbouring
    logits of the router choose one expert e, which can be chosen more than once; its weight is the score e (adjugate
    experts, Wu et al. 2025). With `by_token`, (n_vocab, n_used), tokens have the experts of these numbers (hash
    layers, Roller et al. 2021), and inputs without an id have the best ones.

    Formula: `out = sum(w[e] * down[e](f(gate[e](x), up[e](x))))` over the chosen experts e, with `w` the scores of the
        router's logits
    Shapes: x [n, n_embd], router [n, n_expert * shared_by]; gate and up (n_expert, n_ff, n_embd), down (n_expert,
        n_out, n_ff); out [n, n_out]
    Limits: n_used <= n_expert; sums of weights are at least 2^-14 when they are renormalised
    Example: `g.moe(x, g.linear(x, b.ffn_gate_inp), gate=b.ffn_gate_exps, up=b.ffn_up_exps, down=b.ffn_down_exps,
        n_used=2)`
    """
    for param in (up, down, *([gate] if gate else [])):
        shape, name = param_of("moe", param).weight.shape, param.weight.name
        expect("moe", len(shape) == 3, f"{name} {shape} and a matrix an expert")
        expect("moe", param.bias is None or param.bias.shape == shape[:2], f"{name} {shape} and its bias")
        expect("moe", param.scale is None or param.scale.shape == shape[:1], f"{name} {shape} and its scale")
    n_expert, n_ff, n_in = up.weight.shape
    fits = (gate or up).weight.shape == up.weight.shape and down.weight.shape[::2] == (n_expert, n_ff)
    expect("moe", fits and n_in == x.width, f"experts {up.weight.name} on width {x.width}")
    n_logits = n_expert * shared_by
    expect("moe", router.width == n_logits >= n_used > 0, f"{n_used} of {n_expert} experts and {router.width} logits")
    n_groups, n_groups_used = groups or (1, 1)
    size = n_logits // max(1, n_groups)
    fits = 0 < n_groups_used <= n_groups and size * n_groups == n_logits and size * n_groups_used >= n_used
    expect("moe", fits and (size > 1 or n_groups == 1), f"{n_groups_used} of {n_groups} groups and {n_expert} experts")
    bias = selection_bias.weight if selection_bias else None
    expect("moe", bias is None or bias.shape == (n_logits,), f"a selection bias and {n_logits} logits")
    table = by_token.weight if by_token else None
    expect("moe", table is None or table.shape[1:] == (n_used,), f"{table and table.name} and {n_used} experts")
    routing = Routing(n_used, renormalize, scoring, bias, groups, weight_scale, shared_by, table)
    parts = Expert.of(gate) if gate else None, Expert.of(up), Expert.of(down)
    activation = checked_activation("moe", activation)
    return g.record(MoE(g.value(down.weight.shape[1]), x, router, *parts, routing, activation, weigh_input))
