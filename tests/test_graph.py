import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamacli import Graph, PluginError, Rope, Value
from llamacli.graph import Activation, Param, Tensor, verbs
from llamacli.kv.layout import KVSpec
from llamacli.ops.add import Add
from llamacli.ops.embed import Embed
from llamacli.ops.linear import Linear


def param(name: str, *shape: int, bias: bool = False) -> Param:
    return Param(Tensor(f"{name}.weight", shape), Tensor(f"{name}.bias", shape[:1]) if bias else None)


@pytest.fixture
def g() -> Graph:
    return Graph()


@pytest.fixture
def x(g: Graph) -> Value:
    """An activation 8 wide."""
    return g.embed(param("token_embd", 50, 8))


def test_ops_are_recorded_in_order(g: Graph, x: Value) -> None:
    h = g.linear(x, param("up", 12, 8, bias=True))
    total = h + h
    embed, linear, add = g.ops
    assert isinstance(embed, Embed)
    assert isinstance(linear, Linear)
    assert isinstance(add, Add)
    assert (embed.out, linear.x, linear.out, add.a, add.out) == (x, x, h, h, total)
    assert (x.width, h.width, total.width) == (8, 12, 12)
    assert [tensor.name for op in g.ops for tensor in op.tensors()] == ["token_embd.weight", "up.weight", "up.bias"]


def test_every_store_is_a_layer(g: Graph, x: Value) -> None:
    k = g.linear(x, param("k", 4, 8))
    for layer, window in enumerate([None, 5]):
        kv = g.store(k, k, head_dim=2, window=window)
        for _ in range(2):
            out = g.attention(x, kv, scale=1.0)
            assert (g.ops[-1].layer, out.width) == (layer, 8)
    assert g.states == [KVSpec(2, 2), KVSpec(2, 2, window=5)]


def test_fused_parameters_are_split_by_rows() -> None:
    parts = param("qkv", 10, 8, bias=True).split(6, 4)
    assert [(part.weight.shape, part.weight.first_row) for part in parts] == [((6, 8), 0), ((4, 8), 6)]
    assert [(part.bias.shape, part.bias.first_row) for part in parts if part.bias] == [((6,), 0), ((4,), 6)]
    gate, up = param("gate_up", 3, 10, 8).split(5, 5)
    assert (gate.weight.shape, up.weight.first_row) == ((3, 5, 8), 5)
    with pytest.raises(PluginError, match=r"qkv.weight \(10, 8\) has 10 rows; it cannot be split into 6 \+ 3"):
        param("qkv", 10, 8).split(6, 3)


def test_rope_takes_factors(g: Graph, x: Value) -> None:
    g.rope(x, Rope(4, True), 4, param("rope_freqs", 2))
    assert g.ops[-1].factors.name == "rope_freqs.weight"
    g.rope(x, Rope(4, True), 4)
    assert g.ops[-1].factors is None


def test_experts(g: Graph, x: Value) -> None:
    router = g.linear(x, param("gate_inp", 4, 8))
    experts = {"gate": param("gate", 4, 6, 8), "up": param("up", 4, 6, 8), "down": param("down", 4, 8, 6)}
    assert g.moe(x, router, **experts, n_used=2).width == 8
    op = g.ops[-1]
    assert (op.routing.n_used, op.routing.renormalize) == (2, True)
    assert [tensor.name for tensor in op.tensors()] == ["gate.weight", "up.weight", "down.weight"]


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("add", lambda g, x: x + g.linear(x, param("w", 4, 8))),
        ("rms_norm", lambda g, x: g.rms_norm(x, param("n", 4), 1e-5)),
        ("linear", lambda g, x: g.linear(x, param("w", 8, 4))),
        ("rope", lambda g, x: g.rope(x, Rope(4, True), 3)),
        ("rope", lambda g, x: g.rope(x, Rope(8, True), 4)),
        ("rope", lambda g, x: g.rope(x, Rope(3, True), 4)),
        ("rope", lambda g, x: g.rope(x, Rope(0, True), 4)),
        ("rope", lambda g, x: g.rope(x, Rope(4, True), 4, param("factors", 1))),
        ("rope", lambda g, x: g.rope(x, Rope(4, True), 4, param("f", 2), param("long", 1))),
        ("rms_norm", lambda g, x: g.rms_norm(x, None, 1e-5, head_dim=3)),
        ("rms_norm", lambda g, x: g.rms_norm(x, param("n", 8), 1e-5, head_dim=4)),
        ("store", lambda g, x: g.store(x, g.linear(x, param("v", 4, 8)), head_dim=2)),
        ("store", lambda g, x: g.store(x, x, head_dim=3)),
        ("store", lambda g, x: g.store(x, x, head_dim=4, window=0)),
        ("attention", lambda g, x: attention(g, x, g.linear(x, param("q", 12, 8)))),
        ("attention", lambda g, x: attention(g, x, x, sinks=param("sinks", 4))),
        ("scale", lambda g, x: g.scale(x, param("factor", 2))),
        ("columns", lambda g, x: g.columns(x, 4, 5)),
        ("columns", lambda g, x: g.columns(x, 4, 0)),
        ("sigmoid_gate", lambda g, x: g.sigmoid_gate(x, x)),
        ("gated", lambda g, x: g.swiglu(x, g.linear(x, param("w", 4, 8)))),
        ("moe", lambda g, x: moe(g, x, up=param("up", 4, 5, 8))),
        ("moe", lambda g, x: moe(g, x, up=param("up", 6, 8))),
        ("moe", lambda g, x: moe(g, x, down=Param(param("down", 4, 8, 6).weight, None, Tensor("s", (1,))))),
        ("moe", lambda g, x: moe(g, x, down=Param(param("down", 4, 8, 6).weight, Tensor("b", (8,))))),
        ("add", lambda g, x: g.add(x, param("vector", 2, 8))),
        ("linear", lambda g, x: g.linear(x, Param(Tensor("w.weight", (6, 8)), Tensor("w.bias", (3,))))),
        ("linear", lambda g, x: g.linear(x, param("w", 2, 6, 8))),
        ("embed", lambda g, x: g.embed(param("table", 8))),
        ("positions", lambda g, x: g.positions(param("table", 8))),
        ("rope", lambda g, x: g.rope(x, Rope(4, True), 0)),
        ("store", lambda g, x: g.store(x, x, head_dim=0)),
        ("moe", lambda g, x: moe(g, x, down=param("down", 4, 6, 8))),
        ("moe", lambda g, x: moe(g, x, n_used=5)),
        ("moe", lambda g, x: moe(g, x, n_used=0)),
        ("moe", lambda g, x: moe(g, x, n_expert=3)),
    ],
)
def test_operands_that_do_not_fit_raise_plugin_errors(
    verb: str, call: Callable[[Graph, Value], Value], g: Graph, x: Value
) -> None:
    with pytest.raises(PluginError, match=f"^{verb}: .* do not fit together"):
        call(g, x)


NAN, VECTOR = float("nan"), np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"scale: factor must be a number from .* not an array of shape \(8,\)", lambda g, x: g.scale(x, VECTOR)),
        ("scale: factor must be .* not nan", lambda g, x: g.scale(x, NAN)),
        ("scale: factor must be .* not None", lambda g, x: g.scale(x, None)),
        ("scale: factor must be .* not True", lambda g, x: g.scale(x, True)),
        ("scale: factor must be .* not inf", lambda g, x: g.scale(x, float("inf"))),
        ("attention: scale must be .* not an array", lambda g, x: attention(g, x, x, scale=VECTOR)),
        ("attention: scale must be .* not None", lambda g, x: attention(g, x, x, scale=None)),
        ("attention: softcap must be .* not -1", lambda g, x: attention(g, x, x, softcap=-1)),
        ("attention: softcap must be .* not 0", lambda g, x: attention(g, x, x, softcap=0.0)),
        ("softcap: cap must be .* not 0", lambda g, x: g.softcap(x, 0.0)),
        ("rms_norm: eps must be a number from 0 to 1, not None", lambda g, x: g.rms_norm(x, None, None)),
        ("rms_norm: eps must be a number from 0 to 1, not -1", lambda g, x: g.rms_norm(x, None, -1)),
        ("rms_norm: eps must be a number from 0 to 1, not 64", lambda g, x: g.rms_norm(x, None, 64, 8)),
        ("layer_norm: eps must be .* not 'x'", lambda g, x: g.layer_norm(x, None, "x")),
        ("gated: activation must be one of swiglu, geglu, .* not 'relu'", lambda g, x: g.gated(x, x, "relu")),
        ("moe: activation must be one of swiglu, .* not 'relu'", lambda g, x: moe(g, x, activation="relu")),
        ("map: function must be an activation.* not 'gelu'", lambda g, x: g.map(x, "gelu")),
        ("scale: a value of width 4 belongs to another forward pass", lambda g, x: g.scale(Value(Graph(), 4), 2.0)),
    ],
)
def test_operands_of_wrong_types_raise_plugin_errors(
    message: str, call: Callable[[Graph, Value], Value], g: Graph, x: Value
) -> None:
    with pytest.raises(PluginError, match=message):
        call(g, x)


@pytest.mark.parametrize("name", ["swiglu", Activation.SWIGLU])
def test_activations_by_name(name: str, g: Graph, x: Value) -> None:
    g.gated(x, x, name)
    assert g.ops[-1].activation is Activation.SWIGLU


def test_numbers_of_every_type_are_floats_of_the_op(g: Graph, x: Value) -> None:
    for factor in (2, np.float32(2), np.int64(2)):
        g.scale(x, factor)
        assert (g.ops[-1].factor, type(g.ops[-1].factor)) == (2.0, float)


def test_unknown_verbs_list_those_that_exist(g: Graph, x: Value) -> None:
    with pytest.raises(PluginError, match=r"unknown verb g\.rmsnorm; did you mean g\.rms_norm\?") as raised:
        g.rmsnorm(x)
    assert all(verb in str(raised.value) for verb in ("attention", "embed", "linear", "map", "store"))
    with pytest.raises(PluginError, match=r"g\.silu: it is a function, g\.map\(x, silu\), from llamacli.plugin"):
        g.silu(x)
    assert not hasattr(g, "rmsnorm")
    assert {"swiglu", "linear", "map"} <= set(verbs())
    assert "tail" not in verbs()


@pytest.mark.parametrize(
    ("build", "unread"),
    [
        (lambda g, x: g.scale(x, 2.0), r"scale \(op 2 of 3, width 8\)"),
        (lambda g, x: g.store(x, x, head_dim=4), r"store \(op 2 of 3, width 0\)"),
    ],
)
def test_results_that_nothing_reads(build: Callable[[Graph, Value], object], unread: str, g: Graph, x: Value) -> None:
    build(g, x)
    g.scale(x, 3.0)
    assert [re.fullmatch(unread, text) is not None for text in g.unread()] == [True]


def test_results_that_are_read(g: Graph, x: Value) -> None:
    attention(g, x, x)
    assert g.unread() == []


def attention(g: Graph, x: Value, q: Value, **options: Any) -> Value:
    return g.attention(q, g.store(x, x, head_dim=4), **{"scale": 1.0} | options)


def moe(g: Graph, x: Value, *, n_expert: int = 4, n_used: int = 2, **changed: Param) -> Value:
    experts = {"gate": param("gate", 4, 6, 8), "up": param("up", 4, 6, 8), "down": param("down", 4, 8, 6)}
    return g.moe(x, g.linear(x, param("router", n_expert, 8)), **experts | changed, n_used=n_used)


def test_routers_are_exact_behind_scales_and_sums(g: Graph, x: Value) -> None:
    scaled = Param(Tensor("router.weight", (4, 8)), Tensor("router.bias", (4,)), Tensor("router.scale", (1,)))
    experts = {"gate": param("gate", 4, 6, 8), "up": param("up", 4, 6, 8), "down": param("down", 4, 8, 6)}
    g.moe(x, g.linear(x, scaled), **experts, n_used=2)
    assert g.exact_tensors() == {"router.weight"}


def test_without_an_output_layer_there_is_nothing_to_cut(g: Graph, x: Value) -> None:
    g.scale(x, 2.0)
    with pytest.raises(PluginError, match="the forward pass has no output layer"):
        g.without_output()
