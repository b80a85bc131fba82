"""Profiles and helpers of the tests themselves."""

import ast
import itertools
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest

import suite
import tiny_variants
from conftest import TinyGguf, first_variants
from llamacli.gguf import open_gguf
from llamacli.plugins import Plugins
from llamacli.testing.tiny import TinyModel

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}


class Item:
    """A test item with a name and marks."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._marks else None


def test_quick_profile_takes_one_case_of_each_test() -> None:
    cases = [Item(f"a[{i}]") for i in range(5)]
    every = [Item(f"b[{i}]", "every_case") for i in range(5)]
    left_out = [Item(f"c[{mark}]", mark) for mark in suite.LEFT_OUT]
    assert suite._quick([*cases, *every, *left_out]) == {cases[0], *every}


def test_pairwise_covers_each_pair_and_leaves_the_rest_to_slow() -> None:
    axes = ["abcde", range(4), [True, False]]
    params = suite.pairwise(*axes)
    assert {param.values for param in params} == set(itertools.product(*axes))
    chosen = [param.values for param in params if not param.marks]
    assert len(chosen) < 25
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(values[one], values[other]) for values in chosen}
        assert pairs == set(itertools.product(axes[one], axes[other]))


def features(tiny: TinyModel) -> set[tuple[object, ...]]:
    """Verbs of a graph, their flags, and what the whole graph is."""
    graph = tiny.recorded()[3]
    fields = {(type(op), name, value) for op in graph.ops for name, value in attrs.asdict(op, recurse=False).items()}
    flags = {field for field in fields if isinstance(field[2], bool | str | None)}
    return {(type(op),) for op in graph.ops} | flags | {(graph.needs_whole_input, graph.n_encoder > 0)}


@pytest.mark.slow
def test_representatives_have_every_verb_and_flag(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    found = dict[str, set[tuple[object, ...]]]()
    every = tiny_variants.VARIANTS | tiny_variants.ENCODERS | tiny_variants.CLASSIFIERS
    for name in first_variants(every) | {*suite.REPRESENTATIVES}:
        path = tiny_gguf(name)
        architecture = plugins.architecture(open_gguf(path).metadata["general.architecture"])
        found[name] = features(TinyModel(architecture, name, path, None))
        assert suite.REPRESENTATIVES.get(name, architecture.name) == architecture.name
    represented = set().union(*(found[name] for name in suite.REPRESENTATIVES))
    assert {name: missing for name in found if (missing := found[name] - represented)} == {}


def test_all_failed_cases_are_listed() -> None:
    def check(n: int) -> None:
        assert n < 2, f"{n} is large"

    suite.check_each(check, [("one", 1)])
    with pytest.raises(AssertionError, match=r"two: .*2 is large(.|\n)*three: .*3 is large"):
        suite.check_each(check, [("one", 1), ("two", 2), ("three", 3)])


def wall_clocks(source: str) -> list[int]:
    """Lines of assertions that compare wall clocks, outside of slow tests."""
    return [
        check.lineno
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if not any("mark.slow" in ast.unparse(decorator) for decorator in function.decorator_list)
        for check in ast.walk(function)
        if isinstance(check, ast.Assert)
        for compared in ast.walk(check.test)
        if isinstance(compared, ast.Compare)
        if any(isinstance(node, ast.Attribute) and node.attr in CLOCKS for node in ast.walk(compared))
    ]


def test_no_assertion_compares_wall_clocks() -> None:
    root = Path(__file__).parents[1]
    left_to_others = {root / "tests/serve/ray/test_engine.py", *(root / "tests/browser").iterdir()}
    assert [
        f"{path.relative_to(root)}:{line}"
        for path in (*root.glob("tests/**/test_*.py"), *root.glob("plugins/*/tests/test_*.py"))
        if path not in left_to_others
        for line in wall_clocks(path.read_text())
    ] == []
    assert wall_clocks("def test():\n    x = time.monotonic()\n    assert time.monotonic() - x < 1") == [3]
    assert wall_clocks("@pytest.mark.slow\ndef test():\n    assert time.perf_counter() < 1") == []


def test_calls_are_counted() -> None:
    with suite.calls_at_most(20):
        [abs(i) for i in range(10)]
    with pytest.raises(AssertionError), suite.calls_at_most(20):
        [abs(i) for i in range(30)]


@pytest.mark.medium
def test_a_file_that_starts_many_processes_fails(request: pytest.FixtureRequest, monkeypatch) -> None:
    monkeypatch.setattr(suite, "_starts", Counter({request.node.nodeid.partition("::")[0]: suite.MAX_STARTS}))
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    call = suite.pytest_runtest_call(request.node)
    next(call)
    with pytest.raises(AssertionError, match="start more than"):
        next(call)


@pytest.mark.skipif(suite.PROFILE != "quick", reason="other profiles start processes and servers")
def test_quick_tests_start_nothing() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"subprocess\.Popen in a quick test"):
        subprocess.run([sys.executable, "-c", ""], check=True)
    with socket.socket() as server, pytest.raises(pytest.fail.Exception, match=r"socket\.bind in a quick test"):
        server.bind(("127.0.0.1", 0))
