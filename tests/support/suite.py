"""Pytest plugin: profiles, and one kernel cache for all processes."""

import contextlib
import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import pytest

from llamacli.chat import isolation
from llamacli.engine import ReferenceEngine
from llamacli.testing.parametrize import Check
from llamacli.util.folders import user_folder
from paths import add_plugin_paths

add_plugin_paths()

PROFILE = os.environ.get("LLAMACLI_TEST_PROFILE", "test")
"""Profile: `full` tries all examples, `test` a fifth of them, `quick` at most 10, and one case of a test.

`long` is `full`, but longer against the server, and Hypothesis draws other examples in each run.
"""

FIFTH, TEN = 5, 10
LEFT_OUT = ("slow", "deep", "medium", "browser", "ray")
"""Marks of tests that the quick profile leaves out."""

STARTING = {"start", "server", "start_server", "shared_server", "serve"}
"""Fixtures that start a process or a server: what uses them is marked `medium`."""

STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind", "subprocess.Popen"}
"""Audit events of a new process or server."""

# No deadline: how long an example takes says more about what else the machine does.
for name, n_examples in (("full", 100), ("long", 100), ("test", 100 // FIFTH), ("quick", TEN)):
    hypothesis.settings.register_profile(name, deadline=None, derandomize=name != "long", max_examples=n_examples)
hypothesis.settings.load_profile(PROFILE)


REPRESENTATIVES = {
    "apertus": "apertus", "bert": "bert", "deepseek4": "deepseek4", "gemma3n": "gemma3n", "graniteswitch":
    "graniteswitch", "grok": "grok", "hy_v4": "hy_v4", "kimi_linear": "kimi-linear", "llama4": "llama4", "mha":
    "llama", "minimax_m3_mqa": "minimax-m3", "mpt": "mpt", "qwen35moe_nextn": "qwen35moe", "rwkv6qwen2": "rwkv6qwen2",
    "rwkv7": "rwkv7", "smallthinker": "smallthinker", "t5": "t5",
}  # fmt: skip
"""Tiny models, and their architectures, whose graphs have each verb with each of its flags (`test_suite.py`).

They stand for all in tests of the core; with the others these are slow.
"""

OWN = {"tables", "keys", "tensors", "declarations", "parameters"}
"""Checks of what an architecture's own code may have wrong, which none stands for; results are compared by goldens."""

KV_TYPES = ["f32", "f16", "q8_0"]
"""Cache types whose attention `make test` compiles, seconds for each; with others, tests on kernels are slow.

`make test-bounds` has all, between forbidden pages.
"""

MAX_STARTS = 60
"""Processes that the tests of a file may start without being slow: each takes a second or two."""

STRIDE = FIFTH if PROFILE in ("quick", "test") else 1
"""Step through the instants or offsets of a test marked `deep`."""


def examples(n: int, **options: Any) -> hypothesis.settings:
    """Settings of a Hypothesis test with `n` examples in the full profile."""
    n_tried = {"quick": min(n // FIFTH, TEN), "test": n // FIFTH}.get(PROFILE, n)
    return hypothesis.settings(max_examples=max(1, n_tried), **options)


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters that are slow, but for some."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Parameters of a product: pairwise coverage, and the rest as `slow`."""
    values = [list(axis) for axis in axes]
    points = list(itertools.product(*(range(len(axis)) for axis in values)))
    pairs = {point: set(itertools.combinations(enumerate(point), 2)) for point in points}
    left, chosen = set().union(*pairs.values()), list[tuple[int, ...]]()
    while left:
        chosen.append(max(points, key=lambda point: len(pairs[point] & left)))
        left -= pairs[chosen[-1]]
    params = []
    for point in [*chosen, *(point for point in points if point not in set(chosen))]:
        case = [axis[i] for axis, i in zip(values, point, strict=True)]
        marks = () if len(params) < len(chosen) else pytest.mark.slow
        params.append(pytest.param(*case, id="-".join(map(str, case)), marks=marks))
    return params


@contextlib.contextmanager
def calls_at_most(n: int) -> Iterator[None]:
    """Fail if more than `n` functions are called, of Python or C."""
    n_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert n_calls <= n


def check_each(check: Callable[..., None], cases: Iterable[tuple[str, *tuple[Any, ...]]]) -> None:
    """Check cases (name, *arguments), and list all that fail."""
    failed = []
    for name, *arguments in cases:
        try:
            check(*arguments)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled kernels between workers, and with programs that tests start."""
    folder = os.environ.get("LLAMACLI_CACHE") or user_folder("cache") or config.rootpath / ".pytest_cache" / "llamacli"
    os.environ["LLAMACLI_CACHE"] = str(folder)
    sys.addaudithook(_count_start)
    if hasattr(config, "workerinput"):
        _compile_once(Path(folder) / "locks")
    if PROFILE == "quick":
        isolation._pool._works, isolation._pool._has_warned = False, True  # templates are rendered in this process


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts something or is stood for; choose quick cases."""
    for item in items:
        if PROFILE != "quick" and hasattr(item, "callspec") and _is_stood_for(item, item.callspec.params):
            item.add_marker("slow")
        if STARTING.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("medium")
    if PROFILE == "quick":
        kept = _quick(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _is_stood_for(item: pytest.Item, params: Mapping[str, Any]) -> bool:
    file, check, kv_type = item.nodeid, params.get("check"), params.get("kv_type", KV_TYPES[0])
    if isinstance(check, Check) and check.name not in OWN:
        return check.name == "cache_types" or check.family.architecture.name not in REPRESENTATIVES.values()
    if _is_reference(params.get("engine")) and not file.startswith(("tests/ops", "tests/engine")):
        return True
    compiled = not file.startswith(("tests/kv", "tests/kernels/kv_types/test_types"))
    return compiled and kv_type not in KV_TYPES and not item.config.pluginmanager.hasplugin("llamacli.testing.guarded")


def _is_reference(engine: object) -> bool:
    return engine is ReferenceEngine or isinstance(engine, ReferenceEngine)


def _quick(items: list[pytest.Item]) -> set[pytest.Item]:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in LEFT_OUT):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for found in cases.values():
        kept.update(found if found[0].get_closest_marker("every_case") else found[:1])
    return kept


@pytest.fixture(autouse=True, scope="session")
def _nothing_starts() -> Iterator[None]:
    """Fail a quick test that starts a process or a server."""
    active = PROFILE == "quick"

    def refuse(event: str, _: object) -> None:
        if active and event in STARTS:
            pytest.fail(f"{event} in a quick test: mark it `medium`")

    if active:
        sys.addaudithook(refuse)
    yield
    active = False


_starts = Counter[str]()
"""Processes that tests have started, by file."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail where tests of a file start too many processes."""
    yield
    n, file = _starts.pop("", 0), item.nodeid.partition("::")[0]
    if not item.get_closest_marker("slow"):
        _starts[file] += n
        assert not n or _starts[file] <= MAX_STARTS, f"tests of {file} start more than {MAX_STARTS} processes"


def _count_start(event: str, _: object) -> None:
    if event == "subprocess.Popen":
        _starts[""] += 1


def pytest_collection_finish() -> None:
    """Exempt loaded modules from garbage collections, which many tests call for."""
    gc.collect()
    gc.freeze()


def _compile_once(folder: Path) -> None:
    """Lock each kernel while a worker compiles it; the others load it."""
    from llamacli.kernels import jit

    folder.mkdir(parents=True, exist_ok=True)
    compile_alone = jit.Compiled.compile

    def compile_locked(self: jit.Compiled) -> int:
        if self._address is not None:
            return self._address
        with filelock.FileLock(folder / f"{self.name}.lock"):
            return compile_alone(self)

    jit.Compiled.compile = compile_locked  # type: ignore[method-assign]
