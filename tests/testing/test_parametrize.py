"""Checks of architectures: each passes a right plugin and finds a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest

from llamacli import Config, Graph, TensorTable, Value, Weights
from llamacli.errors import PluginError
from llamacli.gguf import Metadata
from llamacli.loaders import open_model_file
from llamacli.ops.base import Op
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.testing import ConformanceError, parametrize_with_checks
from llamacli.testing.parametrize import FILES, PROCESSES, RESULTS, Check, checks_of
from llamacli.testing.tiny import Family, own_variants, write_architecture
from llamacli_l2 import L2Llama


@parametrize_with_checks([L2Llama()], slow=pytest.mark.slow)
def test_right_plugin(check: Check) -> None:
    check()


@attrs.frozen(eq=False)
class Changed(Op):
    """Op that adds a function of its rows, without a kernel."""

    x: Value
    function: Callable[[Run, np.ndarray], np.ndarray]

    def compute(self, run: Run) -> np.ndarray:
        return run[self.x] + self.function(run, run[self.x])


class Behind(L2Llama):
    """Decoder with a faulty op behind its logits."""

    function: Callable[[Run, np.ndarray], np.ndarray]

    def forward(self, g: Graph, config: Config, weights: Weights) -> Value:
        logits = super().forward(g, config, weights)
        function = self.function
        return g.record(Changed(g.value(logits.width), logits, function))


def behind(function: Callable[[Run, np.ndarray], np.ndarray]) -> L2Llama:
    architecture = Behind()
    architecture.function = function
    return architecture


class Stateful:
    """Function that adds the number of its calls."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self, run: Run, x: np.ndarray) -> np.ndarray:
        self.n_calls += 1
        return np.full_like(x, 0.01 * self.n_calls)


@attrs.frozen(eq=False)
class WrongSteps(Changed):
    """Op whose steps compute something else than `compute`."""

    def lower(self, to: Lowering) -> None:
        to.host_op(lambda run: run[self.x] + 0.3, self.inputs(), self.out)


class Wrong(L2Llama):
    """Decoder with an op that kernels compute wrongly."""

    def forward(self, g: Graph, config: Config, weights: Weights) -> Value:
        logits = super().forward(g, config, weights)
        return g.record(WrongSteps(g.value(logits.width), logits, lambda run, x: 0 * x))


class UnreadTensor(L2Llama):
    """Decoder that declares a tensor which it does not read."""

    def tensors(self, config: Config) -> TensorTable:
        table = super().tensors(config)
        table.add("extra", config.n_embd)
        return table


class UncheckedKey(L2Llama):
    """Decoder that reads a key without checking it."""

    def configure(self, metadata: Metadata) -> Config:
        int(metadata[f"{self.name}.block_count"])
        return super().configure(metadata)


class OptionalTensor(L2Llama):
    """Decoder whose table says that a tensor which it needs is optional."""

    def tensors(self, config: Config) -> TensorTable:
        table = super().tensors(config)
        table.add("output", config.n_vocab, config.n_embd, optional=True)
        return table


class Forgotten(L2Llama):
    """Decoder that multiplies a part by zero."""

    def forward(self, g: Graph, config: Config, weights: Weights) -> Value:
        logits = super().forward(g, config, weights)
        return g.scale(logits, 0.0) + g.linear(g.embed(weights.token_embd), weights.output)


def depends_on_rows(run: Run, x: np.ndarray) -> np.ndarray:
    return np.full_like(x, 0.01 * run.n)


def mixes(run: Run, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.mean(0), x.shape)


def depends_on_position(run: Run, x: np.ndarray) -> np.ndarray:
    return np.full_like(x, 0.1) * run.positions[:, None]


def depends_on_memory(run: Run, x: np.ndarray) -> np.ndarray:
    """The type of the cache, seen by the size of its pages."""
    return np.full_like(x, float(run.sequence.kv_type.k == "q4_0") * 100)


FAULTS: dict[str, tuple[L2Llama, set[str]]] = {
    "unread tensor": (UnreadTensor(), {"tables"}),
    "unchecked key": (UncheckedKey(), {"keys"}),
    "optional tensor": (OptionalTensor(), {"tensors"}),
    "forgotten part": (Forgotten(), {"parameters"}),
    "number of rows": (behind(depends_on_rows), {"pieces", "last_rows"}),
    "other rows": (behind(mixes), {"declarations", "pieces", "last_rows"}),
    "position": (behind(depends_on_position), {"declarations"}),
    "wrong kernel": (Wrong(), {"mode_fp32", "mode_auto", "mode_q8", "mode_q4", "cut"}),
    "cache": (behind(depends_on_memory), {"cache_types"}),
}
"""Faulty plugins, and the checks that must find each."""

STATEFUL = ("batches", "threads", "fork", "rewind", "saved_state")
"""Checks that find results which depend on earlier calls."""


@pytest.mark.parametrize(
    ("fault", "check"), [(fault, check) for fault, (_, checks) in FAULTS.items() for check in sorted(checks)]
)
def test_faults_are_found(fault: str, check: str) -> None:
    architecture, _ = FAULTS[fault]
    (found,) = (one for one in checks_of(architecture) if one.name == check and one.scope != "others")
    with pytest.raises((ConformanceError, PluginError)):
        found()


@pytest.mark.parametrize("name", STATEFUL)
def test_state_beside_the_cache_is_found(name: str) -> None:
    (found,) = (one for one in checks_of(behind(Stateful())) if one.name == name and one.scope == "first")
    with pytest.raises(ConformanceError, match="the logit is"):
        found()


def test_every_check_has_a_fault() -> None:
    found = {check for _, checks in FAULTS.values() for check in checks}
    assert found | {*STATEFUL, "memory"} == {*FILES, *RESULTS, *PROCESSES}


@pytest.mark.slow
def test_kernels_that_leave_their_memory_are_found() -> None:
    (check,) = (one for one in checks_of(Reckless()) if one.name == "memory")
    with pytest.raises(ConformanceError, match=r"with a forbidden page .* the process ended with -\d+"):
        check()


class Reckless(L2Llama):
    """Decoder with a kernel that reads far behind its row."""

    def forward(self, g: Graph, config: Config, weights: Weights) -> Value:
        logits = super().forward(g, config, weights)
        return g.record(ReadsFar(g.value(logits.width), logits))


@attrs.frozen(eq=False)
class ReadsFar(Op):
    """Sum with a number that is not its own."""

    x: Value

    def compute(self, run: Run) -> np.ndarray:
        return run[self.x]

    def lower(self, to: Lowering) -> None:
        from llamacli.kernels.api import Kernel, carray, pointer
        from llamacli.kernels.layout import record
        from llamacli.ops.lowering import f32

        layout = record("x", "out")

        def reads_far(args: int, run: int, thread: int, n_threads: int) -> None:
            a = carray(pointer(args), 1, layout)[0]
            x = carray(pointer(a.x - 1000000), 2000000, np.float32)
            out = carray(pointer(a.out), 1, np.float32)
            for i in range(0, 2000000, 1000):
                out[0] += x[i]

        to.step(Kernel(reads_far), layout, x=f32(self.x), out=f32(self.out))


class TestTinyFiles:
    def test_variants_of_other_architectures_are_left_out(self) -> None:
        other = L2Llama()
        other.name = "other"
        variants = own_variants(L2Llama()) | {"other": (write_architecture, {"architecture": other}, 1e-8)}
        assert [model.name for model in Family(L2Llama(), variants).models] == ["all", "required", "fused"]
        assert [model.name for model in Family(other, variants).models] == ["other"]

    def test_no_variant_at_all(self) -> None:
        with pytest.raises(PluginError, match="none of the variants is a file of architecture 'l2llama'"):
            _ = Family(L2Llama(), {}).models

    def test_models_of_one_structure_are_checked_once(self) -> None:
        assert [model.name for model in Family(L2Llama()).distinct] == ["all"]

    def test_keys_replace_those_of_a_tiny_decoder(self, tmp_path: Path) -> None:
        path = write_architecture(tmp_path / "a.gguf", architecture=L2Llama(), keys={"block_count": 1, "odd": 3})
        file = open_model_file(path, [])
        assert (file.metadata["l2llama.block_count"], file.metadata["l2llama.odd"]) == (1, 3)
        assert "l2llama.attention.layer_norm_epsilon" not in file.metadata, "the architecture does not read it"
        assert "blk.0.attn_q.weight" in file.tensors
        assert "blk.1.attn_q.weight" not in file.tensors


def test_ids_name_the_check() -> None:
    mark = parametrize_with_checks([L2Llama()]).mark
    ids = [param.id for param in mark.args[1]]
    assert len(ids) == len(set(ids))
    assert {"l2llama-tables", "l2llama-pieces", "l2llama-pieces-others", "l2llama-memory"} <= set(ids)
