"""Mutation testing of single modules by the tests that mirror them.

    make mutants                                        # ten mutants of each module below
    make mutants ARGS="--module kv/pool.py --number 40 --seed 3"

A mutant is a copy of the package in which one operator, number or condition of a module differs. The tests of the
module run on it: a mutant that they pass survives, and is printed with its line. Ends with status 1 if fewer than 95 %
are killed. Mutants of kernels have no cache of their own: the source is in the key of compiled code.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "core" / "llamacli"
MODULES = {
    "kernels/kv_types/cells.py": ["tests/kernels/kv_types"],
    "kernels/embedding.py": ["tests/ops/test_embed.py"],
    "serve/queue.py": ["tests/serve/test_queue.py"],
    "serve/planning.py": ["tests/serve/test_planning.py", "tests/serve/test_scheduler.py"],
    "generation/costs.py": ["tests/generation/test_costs.py"],
    "kv/pool.py": ["tests/kv/test_pool.py"],
    "kv/prefixes.py": ["tests/kv/test_prefixes.py"],
    "sampling/truncation.py": ["tests/sampling/test_properties.py", "tests/sampling/test_default_chain.py"],
    "sampling/penalties.py": ["tests/sampling/test_penalties.py"],
    "sampling/choice.py": ["tests/sampling/test_choice.py"],
    "chat/tags.py": ["tests/chat/test_call_table.py", "tests/chat/test_named.py"],
    "chat/literals.py": ["tests/chat/test_call_table.py", "tests/chat/test_named.py"],
}
"""Modules with index arithmetic, order or state, and their tests."""

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that can be changed, each with a name of the change."""
    skipped = {id(part) for node in ast.walk(tree) for part in _annotations(node)}
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


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        part = getattr(node, name, None)
        if isinstance(part, ast.AST):
            yield from ast.walk(part)


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
            return before, ast.UnaryOp(ast.Not(), node)
    return before, node


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def mutant_of(source: str, number: int) -> tuple[str, str, int]:
    """Source with a change; its description, and the number of changes."""
    tree = ast.parse(source)
    found = [*mutations(tree)]
    node, kind = found[number % len(found)]
    line = getattr(node, "lineno", 0)
    before, new = mutate(node, kind)
    if new is not node:
        tree = _Replace(node, new).visit(tree)
    text = f"line {line}: {kind}: {before[:70]}  ->  {ast.unparse(new)[:70]}"
    return ast.unparse(ast.fix_missing_locations(tree)), text, len(found)


def passes(package: Path, tests: list[str], seconds: float) -> bool:
    """Test if tests pass with a package; a hang is a failure."""
    environment = {**os.environ, "PYTHONPATH": str(package), "LLAMACLI_TEST_PROFILE": "test"}
    paths = [str(package), "tests", "tests/support", "tools", "examples/verb"]
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-o", f"pythonpath={' '.join(paths)}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return False


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m mutate", description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", choices=MODULES, help="module; may be repeated (default: all)")
    parser.add_argument("--number", type=int, default=10, metavar="N", help="mutants of each (default: 10)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the choice (default: 1)")
    given = parser.parse_args()
    n_tried = n_killed = 0
    with tempfile.TemporaryDirectory(prefix="llamacli-mutants") as folder:
        copy = Path(folder) / "llamacli"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in given.module or MODULES:
            source, draw, tests = (PACKAGE / name).read_text(), random.Random(f"{given.seed} {name}"), MODULES[name]
            started = time.monotonic()
            if not passes(copy.parent, tests, 900):
                print(f"{name}: its tests fail without a change", flush=True)
                return 1
            limit = 60 + 5 * (time.monotonic() - started)
            *_, n = mutant_of(source, 0)
            killed = 0
            chosen = draw.sample(range(n), min(given.number, n))
            for number in chosen:
                changed, text, _ = mutant_of(source, number)
                (copy / name).write_text(changed)
                if passes(copy.parent, tests, limit):
                    print(f"  {name}, {text}", flush=True)
                else:
                    killed += 1
            (copy / name).write_text(source)
            print(f"{name}: {killed} of {len(chosen)} killed, of {n} possible", flush=True)
            n_tried, n_killed = n_tried + len(chosen), n_killed + killed
    print(f"{n_killed} of {n_tried} killed")
    return int(n_killed < 0.95 * n_tried)


if __name__ == "__main__":
    sys.exit(main())
