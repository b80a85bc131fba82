"""Mixture of experts (Jiang et al. 2024).

Each token is computed by its most probable experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from llamacli.ops.activations import Activation, Formula, formula_of
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.lanewise import lower_lanewise, on_arrays
from llamacli.ops.linear import linear, lower_linear, product
from llamacli.ops.lowering import Lowering, Slot, f32, stride
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

_MIN_SUM = 2.0**-14
"""Lower bound of the sum of chosen probabilities, as GGML has it: the smallest normal float16."""


@attrs.frozen
class Expert:
    """Stacked matrices of all experts.

    Weight (n_expert, n_out, n_in), bias (n_expert, n_out), scale (n_expert,).
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    @classmethod
    def of(cls, param: Param) -> Expert:
        """Tensors of a parameter."""
        return cls(param.weight, param.bias, param.scale)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are present."""
        return tuple(filter(None, (self.weight, self.bias, self.scale)))


@attrs.frozen(eq=False)
class MoE(Op):
    """Mixture of experts op, with gated experts.

    out = sum of p(e) * down_e(activation(gate_e x, up_e x)) over the `n_used` experts e of largest p, where p =
    softmax(router). Each of gate, up and down is scale(e) * (weight(e) x) + bias(e); the scale of `down` multiplies its
    bias as well. With `renormalize` the chosen probabilities are scaled to sum to 1.
    """

    x: Value
    router: Value
    gate: Expert
    up: Expert
    down: Expert
    n_used: int
    renormalize: bool
    activation: Activation | Formula

    def tensors(self) -> list[Tensor]:
        """See Op."""
        return [tensor for expert in (self.gate, self.up, self.down) for tensor in expert.tensors()]

    def matrices(self) -> list[Tensor]:
        """See Op."""
        return [self.gate.weight, self.up.weight, self.down.weight]

    def exact_inputs(self) -> list[Value]:
        """See Op."""
        return [self.router]

    def compute(self, run: Run) -> Array:
        """See Op.

        Each token's experts are summed in the order of their probabilities.
        """
        x, out = run[self.x], np.zeros((run.n, self.out.width))
        weights = {tensor: run[tensor] for tensor in self.tensors()}

        def apply(expert: Expert, e: int, row: Array, *, scaled: bool = True) -> Array:
            result = product(row, weights[expert.weight][e])
            result = result * weights[expert.scale][e] if expert.scale and scaled else result
            return result + weights[expert.bias][e] if expert.bias else result

        for i, probabilities in enumerate(softmax(run[self.router])):
            # Kernels compare probabilities in float32, so experts that are equal there must be equal here.
            chosen = np.argsort(-probabilities.astype(np.float32), kind="stable")[: self.n_used]
            shares = probabilities[chosen]
            if self.renormalize:
                shares = shares / max(shares.sum(), _MIN_SUM)
            if self.down.scale:
                shares = shares * weights[self.down.scale][chosen]
            for e, share in zip(chosen, shares, strict=True):
                gate, up = apply(self.gate, e, x[i : i + 1]), apply(self.up, e, x[i : i + 1])
                hidden = on_arrays(formula_of(self.activation), gate, up)
                out[i] += share * apply(self.down, e, hidden, scaled=False)[0]
        return out

    def lower(self, to: Lowering) -> None:
        """See Op.

        Steps choose experts, sort the work by expert, compute each expert's rows in one product, and combine.
        """
        from llamacli.kernels import experts

        n_expert, n_ff, _ = self.gate.weight.shape
        n_used, router, x = self.n_used, f32(self.router), f32(self.x)

        def scratch(name: str, kind: str, width: int, slots: int = 0) -> Slot:
            return Slot((self, name), kind, width, slots)

        chosen, slots, rows = (scratch(name, "int64", n_used) for name in ("chosen", "slots", "rows"))
        weights, probabilities = scratch("weights", "float32", n_used), scratch("probabilities", "float32", n_expert)
        starts = scratch("starts", "int64", n_expert + 1)
        scale = to.vector(self.down.scale) if self.down.scale else 0
        to.step(
            experts.route,
            experts.ROUTE,
            [router],
            [probabilities, chosen, weights],
            lambda at: {
                "router": at(router), "stride": stride(at(router)), "probabilities": at(probabilities),
                "n_expert": n_expert, "n_used": n_used, "renormalize": self.renormalize, "scale": scale,
                "chosen": at(chosen), "weights": at(weights),
            },
        )  # fmt: skip
        to.step(
            experts.sort,
            experts.SORT,
            [chosen],
            [starts, slots, rows],
            lambda at: {
                "chosen": at(chosen), "n_expert": n_expert, "n_used": n_used, "starts": at(starts), "slots": at(slots),
                "rows": at(rows),
            },
        )  # fmt: skip
        gathered = scratch("x", "f32", x.width, n_used)
        for form in sorted({to.matrix(e.weight).packing.activation for e in (self.gate, self.up)}):
            self._gather(to, to.rounded(x, form), attrs.evolve(gathered, form=form), rows)
        gate, up, hidden = (scratch(name, "f32", n_ff, n_used) for name in ("gate", "up", "hidden"))
        down, out = scratch("down", "f32", x.width, n_used), f32(self.out)
        self._project(to, gathered, self.gate, gate, starts)
        self._project(to, gathered, self.up, up, starts)
        lower_lanewise(to, "gated", formula_of(self.activation), [gate, up], hidden)
        lower_linear(to, hidden, self.down.weight, down, self.down.bias, starts=starts)
        to.step(
            experts.combine,
            experts.COMBINE,
            [down, slots, weights],
            [out],
            lambda at: {
                "x": at(down), "x_stride": stride(at(down)), "out": at(out), "out_stride": stride(at(out)),
                "width": out.width, "slots": at(slots), "weights": at(weights), "n_used": n_used,
            },
        )  # fmt: skip

    def _gather(self, to: Lowering, source: Slot, target: Slot, rows: Slot) -> None:
        from llamacli.kernels import experts

        to.step(
            experts.gather,
            experts.GATHER,
            [source, rows],
            [target],
            lambda at: {
                "x": at(source), "out": at(target), "row_bytes": stride(at(source)), "rows": at(rows),
                "n_used": self.n_used,
            },
        )  # fmt: skip

    def _project(self, to: Lowering, x: Slot, expert: Expert, out: Slot, starts: Slot) -> None:
        """Append the steps of each expert's product.

        A scale is applied between product and bias.
        """
        from llamacli.kernels import experts

        if expert.scale is None:
            lower_linear(to, x, expert.weight, out, expert.bias, starts=starts)
            return
        unscaled = attrs.evolve(out, owner=(out.owner, "unscaled"))
        lower_linear(to, x, expert.weight, unscaled, starts=starts)
        scale, biases = to.vector(expert.scale), to.vector(expert.bias) if expert.bias else to.zeros
        n_expert = expert.weight.shape[0]
        to.step(
            experts.rescale,
            experts.RESCALE,
            [unscaled, starts],
            [out],
            lambda at: {
                "x": at(unscaled), "x_stride": stride(at(unscaled)), "out": at(out), "out_stride": stride(at(out)),
                "width": out.width, "starts": at(starts), "n_expert": n_expert, "scale": scale, "bias": biases,
                "bias_stride": stride(biases) if biases.ndim > 1 else 0,
            },
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """See Op."""
        router = linear(g, x, param("router", 5, x.width))
        gate, up = (param(name, 5, 40, x.width) for name in ("gate", "up"))
        yield moe(g, x, router, gate=gate, up=up, down=param("down", 5, x.width, 40, bias=True), n_used=2)
        scaled = [Param(p.weight, p.bias, param(f"{p.weight.name}.scale", 5).weight) for p in (
            param("gate_s", 5, 40, x.width, bias=True), param("up_s", 5, 40, x.width), param("down_s", 5, x.width, 40),
        )]  # fmt: skip
        yield moe(g, x, router, gate=scaled[0], up=scaled[1], down=scaled[2], n_used=2, activation=Activation.GEGLU)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def moe(
    g: Recorder,
    x: Value,
    router: Value,
    *,
    gate: Param,
    up: Param,
    down: Param,
    n_used: int,
    renormalize: bool = True,
    activation: Activation | Formula = Activation.SWIGLU,
) -> Value:
    """Record a mixture of gated experts.

    Each token is given to its `n_used` most probable ones. With `renormalize` the probabilities of the chosen are
    scaled to sum to 1, which is a softmax over them alone. Scales of the parameters, (n_expert,), multiply each
    expert's products.
    """
    n_expert, n_ff, n_in = gate.weight.shape
    fits = up.weight.shape == gate.weight.shape and down.weight.shape == (n_expert, x.width, n_ff)
    expect("moe", fits and n_in == x.width, f"experts {gate.weight.name} on width {x.width}")
    expect("moe", router.width == n_expert >= n_used > 0, f"{n_used} of {n_expert} experts")
    experts = Expert.of(gate), Expert.of(up), Expert.of(down)
    return g.record(MoE(g.value(x.width), x, router, *experts, n_used, renormalize, activation))
