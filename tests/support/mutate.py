"""Mutation testing of single modules by the tests that mirror them.

    make mutants                                        # thirteen mutants of each module below
    make mutants ARGS="--module kv/pool.py --number 40 --seed 3"

A mutant is a module in which one operator, number or condition differs. A mutant that its tests pass survives, and is
printed with its line. Ends with status 1 if fewer than 95 % are killed.

A process collects the tests of a module once, and a child of it notes which lines each test runs. Each mutant is a
further child: functions get the changed code, and the tests that run its line are tried, those that killed a mutant
before and quick ones first, until one fails. A change of what is run when the module is imported, and a kernel's that
has no lines to note, is tried by all tests, in a process that imports the changed module. Kernels of mutants are
compiled, and not kept; those without vectors run as Python.

Not changed, since no test should see it: annotations, texts of errors, warnings and log lines, `__repr__`, sizes of
caches of functions, and what compiles to the same code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "core" / "llamacli"
KV = ["kv", "session/test_reuse.py", "session/test_remove_range.py", "session/test_save_load.py"]
CHAT = [
    "chat/test_syntax.py",
    "chat/test_tags.py",
    "chat/test_literals.py",
    "chat/test_values.py",
    "chat/test_call_text.py",
    "chat/test_call_table.py::test_calls_of_small_templates",
]
MODULES = {
    "kernels/kv_types/cells.py": ["kernels/kv_types/test_cells.py"],
    "kernels/embedding.py": ["ops/test_embed.py", "kernels/test_linear.py"],
    "kernels/cached.py": ["kernels/test_cached.py", "ops/test_key_shift.py", "ops/test_attention.py"],
    "kernels/encoding.py": ["kernels/test_encoding.py"],
    "kernels/sampling.py": ["kernels/test_sampling_kernels.py"],
    "ops/shift_plan.py": ["ops/test_key_shift.py", "ops/test_rope.py"],
    "serve/queue.py": ["serve/test_queue.py"],
    "serve/planning.py": ["serve/test_planning.py", "serve/test_contents.py", "serve/test_scheduler.py"],
    "serve/scheduler.py": [
        "serve/test_scheduler.py", "serve/test_slow_draws.py", "serve/test_slots.py", "serve/test_adapters.py",
        "serve/test_contents.py", "serve/test_pictures.py",
    ],
    "serve/slots.py": ["serve/test_slots.py"],
    "serve/sequences.py": ["serve/test_scheduler.py", "serve/test_cache.py", "serve/test_planning.py"],
    "serve/cache.py": ["serve/test_cache.py", "serve/test_prompt_cache.py", "serve/test_scheduler.py"],
    "serve/texts.py": ["serve/test_texts.py", "serve/test_scheduler.py"],
    "serve/residency.py": ["serve/test_residency.py"],
    "generation/costs.py": ["generation/test_costs.py"],
    "generation/drafts.py": ["generation/test_drafts.py", "generation/test_drafters.py"],
    "kv/pool.py": KV,
    "kv/prefixes.py": KV,
    "kv/cache.py": KV,
    "kv/entries.py": KV,
    "kv/layout.py": ["kv/test_layout.py", "kv/test_pool.py", "generation/test_costs.py"],
    "kv/sequence.py": KV,
    "kv/sequence_pool.py": KV,
    "kv/snapshot.py": ["kv/test_snapshot.py", "kv/test_prompt_cache.py"],
    "kv/prompt_cache.py": ["kv/test_prompt_cache.py", "serve/test_prompt_cache.py"],
    "sampling/truncation.py": [
        "sampling/test_peer_cases.py", "sampling/test_peer_goldens.py", "sampling/test_properties.py",
        "sampling/test_default_chain.py", "sampling/test_choice.py",
    ],
    "sampling/penalties.py": ["sampling/test_penalties.py"],
    "sampling/choice.py": ["sampling/test_choice.py"],
    "sampling/candidates.py": ["sampling/test_candidates.py", "sampling/test_properties.py"],
    "sampling/merging.py": ["sampling/test_merging.py"],
    "sampling/stop_strings.py": ["sampling/test_stop_strings.py"],
    "sampling/restrictions.py": ["sampling/test_restrictions.py"],
    "sampling/triggers.py": ["sampling/test_triggers.py"],
    "sampling/reasoning.py": ["sampling/test_reasoning.py"],
    "sampling/gbnf.py": ["sampling/test_gbnf.py", "sampling/test_grammar.py"],
    "sampling/grammar.py": ["sampling/test_grammar.py", "sampling/test_gbnf.py"],
    "sampling/lexemes.py": ["sampling/test_gbnf.py", "sampling/test_grammar.py"],
    "sampling/patterns.py": ["sampling/test_patterns.py", "sampling/test_schemas.py"],
    "sampling/schemas.py": ["sampling/test_schemas.py", "sampling/test_grammar.py"],
    "tokenizer/best_scores.py": ["tokenizer/test_best_scores.py"],
    "tokenizer/longest_match.py": ["tokenizer/test_longest_match.py"],
    "tokenizer/merging.py": ["tokenizer/test_merging.py", "tokenizer/test_byte_level.py"],
    "tokenizer/pretokenizers.py": ["tokenizer/test_pretokenizers.py", "tokenizer/test_byte_level.py"],
    "tokenizer/sentencepiece.py": ["tokenizer/test_sentencepiece.py"],
    "tokenizer/tokenizer.py": ["tokenizer/test_special_tokens.py", "tokenizer/test_decoding.py"],
    "tokenizer/unigram.py": ["tokenizer/test_unigram.py"],
    "tokenizer/vocabulary.py": ["tokenizer/test_special_tokens.py", "tokenizer/test_loading.py"],
    "tokenizer/word_piece.py": ["tokenizer/test_word_piece.py"],
    "chat/call_text.py": CHAT,
    "chat/values.py": CHAT,
    "chat/tags.py": CHAT,
    "chat/literals.py": CHAT,
    "chat/calls.py": CHAT,
    "chat/channels.py": CHAT,
    "chat/syntax.py": CHAT,
    "chat/codec.py": ["chat/test_codec.py", CHAT[-1]],
    "chat/continuation.py": ["chat/test_continuation.py"],
    "chat/openai.py": ["chat/test_openai.py"],
    "chat/functions.py": ["chat/test_functions.py"],
    "chat/rendering.py": ["chat/test_rendering.py"],
    "serve/streams.py": ["serve/test_streams.py"],
    "serve/http/anthropic.py": ["serve/http/test_anthropic.py"],
    "serve/http/ollama.py": ["serve/http/test_ollama.py"],
    "serve/http/bodies.py": ["serve/http/test_bodies.py"],
    "serve/http/constraints.py": ["serve/http/test_constraints.py"],
}  # fmt: skip
"""Modules with index arithmetic, order or state, and their tests."""

PLAIN = {"kernels/sampling.py"}
"""Modules of kernels without vectors: they run as Python, so that lines are noted and nothing is compiled."""

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SPOKEN = {"debug", "info", "warning", "warn", "error", "exception", "log", "print", "pretty"}
"""Functions whose texts are for people."""

WARM = ["asyncio", "numpy", "hypothesis", "jinja2", "llguidance", "llvmlite.binding", "msgspec", "numba"]
"""Modules that the first process imports."""

CPU_SECONDS, WALL_SECONDS, COMPILE_SECONDS = 5, 60, 60
"""Least limits of a test of a mutant, and what one of kernels has in addition; a hang is a failure."""

PATHS = [ROOT / part for part in ("core", "tests", "tests/support", "tools", "examples/verb")]


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that can be changed, each with a name of the change."""
    skipped = {id(part) for node in ast.walk(tree) for root in _unseen(node) for part in ast.walk(root)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node, "comparison"
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMPUTED:
            yield node, "operator"
        elif isinstance(node, ast.BoolOp):
            yield node, "and, or"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "not"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "number"
        elif isinstance(node, ast.IfExp | ast.If | ast.While):
            yield node.test, "condition"


def _unseen(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        part = getattr(node, name, None)
        if isinstance(part, ast.AST):
            yield part
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        yield node
    spoken = isinstance(node, ast.Raise)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        spoken = name in SPOKEN
        if name == "lru_cache":
            yield node
    if spoken:
        yield from (part for part in ast.walk(node) if isinstance(part, ast.JoinedStr))


def mutate(node: ast.AST, kind: str) -> tuple[str, ast.AST]:
    """Change of a node: its text before, and the node instead."""
    before = ast.unparse(node)
    match node:
        case ast.Compare() if kind == "comparison":
            node.ops[0] = COMPARED[type(node.ops[0])]()
        case ast.BinOp() | ast.AugAssign() if kind == "operator":
            node.op = COMPUTED[type(node.op)]()
        case ast.BoolOp() if kind == "and, or":
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        case ast.Constant() if kind == "number":
            node.value += 1
        case ast.UnaryOp() if kind == "not":
            return before, node.operand
        case ast.expr():
            return before, ast.copy_location(ast.UnaryOp(ast.Not(), node), node)
    return before, node


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _lines(tree: ast.Module, node: ast.AST) -> set[int]:
    """Lines of a node, and the first of its statement."""
    inside = [part for part in ast.walk(tree) if isinstance(part, ast.stmt) and any(node is x for x in ast.walk(part))]
    first = max((part.lineno for part in inside), default=0)
    return {first, *range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", None) or 0) + 1)}


@dataclasses.dataclass
class Mutant:
    """Changed module.

    - `text`: what is changed, with the line.
    - `lines`: those of which a test must run one to see it.
    - `code`: of the module; `changed`: names and first lines of its functions that differ, "" among them if the module
      or the body of a class does.
    - `source`: that of the changed module.
    """

    text: str
    lines: set[int]
    code: CodeType
    changed: dict[tuple[str, int], CodeType]
    source: str


def mutants_of(path: Path, number: int, draw: random.Random) -> tuple[list[Mutant], int]:
    """Mutants of a module, in random order, and how many there are."""
    source = path.read_text("utf-8")
    n = len([*mutations(ast.parse(source))])
    original = dict(_functions(compile(ast.parse(source), str(path), "exec")))
    found = list[Mutant]()
    for i in draw.sample(range(n), n):
        if len(found) == number:
            break
        tree = ast.parse(source)
        node, kind = [*mutations(tree)][i]
        lines = _lines(tree, node)
        before, new = mutate(node, kind)
        if new is not node:
            tree = _Replace(node, new).visit(tree)
        tree = ast.fix_missing_locations(tree)
        code = compile(tree, str(path), "exec")
        changed = {key: one for key, one in _functions(code) if not _same(one, original.get(key))}
        if changed:
            text = f"line {getattr(node, 'lineno', 0)}: {kind}: {before[:70]}  ->  {ast.unparse(new)[:70]}"
            found.append(Mutant(text, lines, code, changed, ast.unparse(tree)))
    return found, n


def _functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    is_function = code.co_flags & 1
    yield (code.co_qualname if is_function else f"body of {code.co_qualname}", code.co_firstlineno), code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _functions(part)


def _same(new: CodeType, old: CodeType | None) -> bool:
    def values(code: CodeType) -> list[tuple[type, object]]:
        return [(type(value), value) for value in code.co_consts if not isinstance(value, CodeType)]

    return old is not None and new.co_code == old.co_code and repr(values(new)) == repr(values(old))


@dataclasses.dataclass
class Result:
    """Mutants of a module after their tests.

    - `survivors`: of them, descriptions.
    - `fresh`: numbers of mutants to be imported, and the tests to try, with their seconds of CPU time.
    - `unusable`: tests that fail without a change; `n_tests`: the others.
    """

    survivors: list[str] = dataclasses.field(default_factory=list)
    fresh: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    unusable: list[str] = dataclasses.field(default_factory=list)
    n_tests: int = 0


class Session:
    """Pytest plugin: collects tests, and tries mutants instead of running them once."""

    def __init__(self, path: Path, mutants: list[Mutant]):
        self.path, self._mutants = path, mutants
        self._at_import = set[tuple[str, int]]()
        self.result = Result(unusable=["collection"])

    def pytest_sessionstart(self) -> None:
        """Note functions that run while modules are imported."""

        def note(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call" and frame.f_code.co_filename == str(self.path):
                self._at_import.add((frame.f_code.co_qualname, frame.f_code.co_firstlineno))

        sys.setprofile(note)
        importlib.import_module(_module_name(self.path))  # if no test module does, it has no functions to patch

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants."""
        sys.setprofile(None)
        if session.testsfailed:
            return True
        gc.unfreeze()
        lines, seconds = _in_child(lambda: self._trace(session.items), 1200)
        items = {item.nodeid: item for item in session.items if item.nodeid in lines}
        unusable = [item.nodeid for item in session.items if item.nodeid not in lines]
        result = self.result = Result(unusable=unusable, n_tests=len(items))
        kills, traced = Counter[str](), set[int]().union(*lines.values())
        for number, mutant in enumerate(self._mutants):
            at_import = any(key in self._at_import or key[0].startswith("body of") for key in mutant.changed)
            untraced = "kernels" in self.path.parts and not mutant.lines & traced
            chosen = [name for name in items if at_import or untraced or lines[name] & mutant.lines]
            chosen.sort(key=lambda name: (-kills[name], seconds[name]))
            if at_import:
                result.fresh.append((number, {name: seconds[name] for name in chosen}))
                continue
            tried = [items[name] for name in chosen]
            killer = _in_child(functools.partial(self._try, mutant, tried, seconds), 0)
            if killer is None:
                result.survivors.append(mutant.text + ("" if chosen else "  (no test runs it)"))
            else:
                kills[killer] += 1
        return True

    def _trace(self, items: list[pytest.Item]) -> tuple[dict[str, set[int]], dict[str, float]]:
        path, lines, seconds = str(self.path), dict[str, set[int]](), dict[str, float]()
        here = set[int]()

        def local(frame: FrameType, event: str, _argument: object) -> Any:
            here.add(frame.f_lineno)
            return local

        def trace(frame: FrameType, _event: str, _argument: object) -> Any:
            return local(frame, "", None) if frame.f_code.co_filename == path else None

        for item, after in itertools.zip_longest(items, items[1:]):
            here = set()
            started = time.process_time()
            threading.settrace(trace)
            sys.settrace(trace)
            failed = _fails(item, after)
            sys.settrace(None)
            if not failed:
                lines[item.nodeid], seconds[item.nodeid] = here, time.process_time() - started
        return lines, seconds

    def _try(self, mutant: Mutant, items: list[pytest.Item], seconds: dict[str, float]) -> str | None:
        patch(mutant, self.path)
        return self._first_failure(items, seconds)

    def _first_failure(self, items: list[pytest.Item], seconds: dict[str, float]) -> str | None:
        more = COMPILE_SECONDS if "kernels" in self.path.parts else 0
        for item, after in itertools.zip_longest(items, items[1:]):
            _limit(more + 10 * seconds[item.nodeid])
            if _fails(item, after):
                return item.nodeid
        return None


class One(Session):
    """The same for one mutant that was imported."""

    def __init__(self, path: Path, mutant: Mutant, seconds: dict[str, float]):
        super().__init__(path, [mutant])
        self._seconds = seconds

    def pytest_sessionstart(self) -> None:
        """Note nothing."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests."""
        _forget_digests(self._mutants[0], self.path)
        if not session.testsfailed and self._first_failure(session.items, self._seconds) is None:
            self.result.survivors.append(self._mutants[0].text)
        return True


def _fails(item: pytest.Item, after: pytest.Item | None) -> bool:
    """Run a test, and keep the fixtures of the next one."""
    failed = []

    class Listener:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            failed.append(report.failed)

    manager, listener = item.config.pluginmanager, Listener()
    manager.register(listener)
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
    manager.unregister(listener)
    return any(failed)


def patch(mutant: Mutant, path: Path) -> None:
    """Give functions of a module their changed code."""
    new = dict(_functions(mutant.code))
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            code = function.__code__
            function.__code__ = new[code.co_qualname, code.co_firstlineno]
    _forget_digests(mutant, path)


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def _forget_digests(mutant: Mutant, path: Path) -> None:
    """Compile kernels of a changed module instead of loading them."""
    from llamacli.kernels import digest, jit

    name = _module_name(path)
    if name in digest.sources():
        digest.sources()[name] = mutant.source
        digest._hash.cache_clear()
        digest.source_digest.cache_clear()
        jit._Entry.save = lambda self, data: None  # type: ignore[method-assign]


def _limit(seconds: float) -> None:
    """End this process if it takes longer from now on."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + CPU_SECONDS + seconds) + 1, hard))
    signal.alarm(int(WALL_SECONDS + 2 * seconds))


def _in_child(work: Callable[[], Any], seconds: float) -> Any:
    """Result of a function in a child process.

    It is "ended" if the process fails or hangs.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        _limit(seconds)
        try:
            data = pickle.dumps(work())
            with os.fdopen(writer, "wb") as file:
                file.write(data)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return pickle.loads(data) if data else "ended"


def _run(tests: list[str], plugin: Session) -> Result:
    import hypothesis

    ignored = ["pytest.PytestAssertRewriteWarning"]
    if str(plugin.path.relative_to(PACKAGE)) in PLAIN:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
        importlib.import_module("numba").config.DISABLE_JIT = True
        ignored.append("RuntimeWarning")  # of NumPy's numbers, where compiled code overflows in silence
    with tempfile.TemporaryDirectory(prefix="llamacli-mutants") as folder:
        hypothesis.configuration.set_hypothesis_home_dir(folder)
        importlib.import_module("suite")
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases, database=None)
        hypothesis.settings.load_profile("mutants")
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=sys"]
        options += ["-m", "not slow and not browser", *(word for name in ignored for word in ("-W", f"ignore::{name}"))]
        pytest.main([*options, f"--basetemp={folder}/tests", *tests], plugins=[plugin])
    return plugin.result


def _run_imported(mutant: Mutant, path: Path, seconds: dict[str, float]) -> Result:
    load = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        return mutant.code if self.path == str(path) else load(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    return _run([*seconds], One(path, mutant, seconds))


def try_module(name: str, number: int, seed: int) -> tuple[Result, int, int]:
    """Result of a module, and the numbers of mutants tried and possible."""
    path = PACKAGE / name
    tests = [str(ROOT / "tests" / test) for test in MODULES[name]]
    mutants, n = mutants_of(path, number, random.Random(f"{seed} {name}"))
    result = _in_child(lambda: _run(tests, Session(path, mutants)), 10_000)
    for i, seconds in result.fresh:
        imported = _in_child(functools.partial(_run_imported, mutants[i], path, seconds), 60)
        result.survivors += [] if imported == "ended" else imported.survivors
    return result, len(mutants), n


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m mutate", description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", choices=MODULES, help="module; may be repeated (default: all)")
    parser.add_argument("--number", type=int, default=13, metavar="N", help="mutants of each (default: 13)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the choice (default: 1)")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(path) for path in PATHS]
    for name in WARM:
        importlib.import_module(name)
    n_tried = n_killed = 0
    for name in given.module or MODULES:
        result, n, n_possible = try_module(name, given.number, given.seed)
        if not result.n_tests:
            print(f"{name}: no test of it passes without a change: {', '.join(result.unusable)}", flush=True)
            return 1
        n_tried, n_killed = n_tried + n, n_killed + n - len(result.survivors)
        print(
            f"{name}: {n - len(result.survivors)} of {n} killed by {result.n_tests} tests, of {n_possible} possible",
            *(f"\n  {text}" for text in result.survivors),
            *(f"\n  not tried: {test} fails without a change" for test in result.unusable),
            sep="",
            flush=True,
        )
    print(f"{n_killed} of {n_tried} killed")
    return int(n_killed < 0.95 * n_tried)


if __name__ == "__main__":
    sys.exit(main())
