#!/usr/bin/env python3
"""Simulate matrix product kernels on other CPUs, by llvm-mca.

    python benchmarks/mca.py                                               # each type
    python benchmarks/mca.py Q4_K Q6_K --rows 1 6 --isa avx2 --cpu skylake znver3 --ghz 3 --plot mca.png

The innermost loop of a register tile is compiled for the instruction set, and llvm-mca simulates it for each CPU whose
costs of instructions it knows, with all loads from the first-level cache. A row of the table has the bytes of packed
weights a second, in GB at `--ghz`, which one core multiplies by that many rows: compare it with `kernels.py`. Where it
is above the memory's speed, memory is the bound. llvm-mca is part of LLVM; its version decides which CPUs it knows
(`llvm-mca -mcpu=help`), and others are left out. It does not check that a CPU has the instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

CPUS = {
    "avx2": ("skylake", "znver3"),
    "avxvnni": ("alderlake",),
    "avx512": ("icelake-server", "znver4"),
    "avx512bf16": ("sapphirerapids", "znver4", "znver5"),
}
"""CPUs of an instruction set, by LLVM's names. Older versions take the costs of Skylake for Intel's."""
MOST_ROWS = {"avx2": 6, "avxvnni": 6, "avx512": 12, "avx512bf16": 12}
"""Rows of the largest register tile."""
ITERATIONS = 200

_PRODUCTS = {"vpdpbusd": 4, "vpmaddubsw": 4}
"""Columns of a row that an instruction multiplies, by the beginning of its name."""


class Loop(NamedTuple):
    """Innermost loop of a tile, and its bytes of weights."""

    code: str
    n_bytes: float


def assembly(name: str, n_rows: int) -> tuple[str, Any]:
    """Assembly of a register tile, and its packing."""
    from llvmlite import binding
    from llvmlite import ir as llvm

    from llamacli.kernels.isa import target_machine
    from llamacli.kernels.register_tiles import emit_tile
    from llamacli.kernels.registry import packing_of
    from llamacli.quantization import TensorType

    packing = packing_of(TensorType[name])
    assert packing
    module = llvm.Module()
    function = llvm.Function(module, llvm.FunctionType(llvm.VoidType(), [llvm.IntType(64)] * 9), "tile")
    b = llvm.IRBuilder(function.append_basic_block())
    emit_tile(b, packing, n_rows, *function.args)
    b.ret_void()
    machine = target_machine()
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    parsed = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed), packing


def innermost_loop(text: str, packing: Any, n_rows: int) -> Loop:
    """Loop with the most products, and its bytes of weights."""
    found: list[tuple[int, list[str]]] = []
    lines = [line.split("#")[0].rstrip() for line in text.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    for i, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        start = labels.get(jump[1], i) if jump else i
        body = lines[start + 1 : i + 1]
        if start < i and not any(one.endswith(":") for one in body):
            found.append((sum(_columns(one) for one in body), body))
    columns, body = max(found)
    vectors = 1 if any("%zmm" in one for one in body) else 2  # of 16 rows
    n_bytes = columns / (n_rows * vectors) * packing.n_bytes / packing.block
    return Loop("\n".join(one for one in body if re.match(r"\s+[a-z{]", one)), n_bytes)


def _columns(line: str) -> int:
    name = line.replace("{vex}", "").split()[:1]
    return next((n for start, n in _PRODUCTS.items() if name and name[0].startswith(start)), 0)


def cycles(tool: str, code: str, cpu: str) -> float | None:
    """Cycles of an iteration; None if the CPU is unknown."""
    command = [tool, "-mtriple=x86_64", f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]
    run = subprocess.run(command, input=code, text=True, capture_output=True, check=False)
    total = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
    if run.returncode or not total or "not a recognized processor" in run.stderr:
        return None
    return int(total[1]) / ITERATIONS


def measure(tool: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table for this process's instruction set."""
    from llamacli.kernels.registry import packings

    names = options.types or [kind.name for kind in packings() if kind.name not in ("F16", "F32", "BF16")]
    rows = []
    for name in names:
        for n_rows in options.rows or (1, 4, MOST_ROWS[options.only]):
            loop = innermost_loop(*assembly(name, n_rows), n_rows)
            speeds = {}
            for cpu in options.cpu or CPUS[options.only]:
                if spent := cycles(tool, loop.code, cpu):
                    speeds[cpu] = round(loop.n_bytes / spent * options.ghz, 1)
            rows.append({"type": name, "rows": n_rows, "isa": options.only, "gb_s": speeds})
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a bar for each row and CPU."""
    import matplotlib.pyplot as plt

    bars = [
        (f"{row['type']}, {row['rows']}, {row['isa']}", cpu, gb_s) for row in rows for cpu, gb_s in row["gb_s"].items()
    ]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(bars)), layout="constrained")
    for cpu in dict.fromkeys(cpu for _, cpu, _ in bars):
        own = [i for i, bar in enumerate(bars) if bar[1] == cpu]
        axes.barh(own, [bars[i][2] for i in own], label=cpu)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel("GB of packed weights a second, one core, from the first-level cache")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="tensor types of integers; default: all")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of a register tile; default: 1, 4 and the most")
    parser.add_argument("--isa", nargs="+", choices=list(CPUS), default=list(CPUS))
    parser.add_argument("--cpu", nargs="+", help="CPUs, by LLVM's names; default: some of each instruction set")
    parser.add_argument("--ghz", type=float, default=3.0, help="clock [%(default)s]")
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--plot", type=Path, help="picture of the results; needs matplotlib")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tool = shutil.which("llvm-mca")
    if tool is None:
        parser.error("llvm-mca was not found: it is part of LLVM, as in the package `llvm`")
    if options.only:
        from llamacli.kernels.isa import compile_for

        compile_for(options.only)
        print(json.dumps(measure(tool, options)))
        return
    rows = []
    for name in options.isa:  # a process compiles for one
        command = [sys.executable, *sys.argv, "--only", name]
        rows += json.loads(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)
    cpus = list(dict.fromkeys(cpu for row in rows for cpu in row["gb_s"]))
    print(f"{'type':8} {'rows':>4} {'isa':10}", *(f"{cpu:>14}" for cpu in cpus))
    for row in rows:
        speeds = (f"{row['gb_s'].get(cpu, ''):>14}" for cpu in cpus)
        print(f"{row['type']:8} {row['rows']:4} {row['isa']:10}", *speeds)
    if options.json:
        version = subprocess.run([tool, "--version"], check=True, text=True, capture_output=True).stdout
        found = {"llvm": re.findall(r"LLVM version (\S+)", version), "ghz": options.ghz, "results": rows}
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
