#!/usr/bin/env python3
"""Measure matrix product kernels on one core: bytes a second.

    python benchmarks/kernels.py                                    # each type, 1 row
    python benchmarks/kernels.py Q4_K Q6_K --rows 1 2 4 16 --isa avx2 avx512 --json kernels.json
    python benchmarks/kernels.py Q4_K --ggml DIR                    # with llama-cpp-python's lib folder
    python benchmarks/kernels.py Q4_K --other /tmp/before           # with another checkout
    python benchmarks/kernels.py Q4_K --ahead 4096                  # with another prefetch distance

A row of the table has the bytes of packed weights a second, in GB, from memory and from the second-level cache, the
share of a plain read that the first is, and ratios to the other checkout and to ggml's kernel, each from memory and
from the cache: rows of weights a second. Each instruction set and checkout runs in a process of its own; they take
turns, and the fastest of all runs counts. ggml's weights are repacked as llama.cpp does at load.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 2048
SIZES = {"memory": 96 << 20, "cache": 1 << 19}
"""Bytes of weights: more than caches hold, and half of a small second-level cache."""

RUN_S = 0.015


def random_bytes(*shape: int) -> np.ndarray:
    """Weights whose scales are ordinary numbers in every format."""
    return np.random.default_rng(0).integers(0x38, 0x3C, shape, np.uint8)


def fastest(function: Any, *args: Any) -> float:
    """Processor seconds of a call: the fastest of some, for RUN_S."""
    best, end = math.inf, time.perf_counter() + RUN_S
    while time.perf_counter() < end:
        started = time.thread_time()
        function(*args)
        seconds = time.thread_time() - started
        best = min(best, seconds or math.inf)  # a coarse clock may not have advanced
    return best


class Packed:
    """Kernels of llamacli, in a process of an instruction set."""

    def __init__(self) -> None:
        from llamacli.util.memory import anonymous

        self._memory = anonymous(SIZES["memory"] * 5 // 4)
        self._memory[:] = np.tile(random_bytes(1 << 16), len(self._memory) >> 16)
        self._kept: list[np.ndarray] = []

    def read(self) -> tuple[float, float]:
        """GB a second of a plain read: of memory, of the cache."""
        memory, cache = (self._memory[:size] for size in SIZES.values())
        return memory.nbytes / fastest(memory.max) / 1e9, cache.nbytes / fastest(cache.max) / 1e9

    def run(self, name: str, n_rows: int, size: int, ahead: int | None) -> tuple[float, float]:
        """Bytes of a row of weights, and rows a second."""
        from llamacli.kernels.layout import BLOCK_BYTES, LINEAR, RUN
        from llamacli.kernels.linear import linear
        from llamacli.kernels.registry import packing_of
        from llamacli.quantization import TensorType

        kind = TensorType[name]
        packing = packing_of(kind)
        assert packing
        n_blocks = WIDTH // packing.block
        tile = n_blocks * packing.n_bytes
        n_tiles = max(1, size // tile)
        x = random_bytes(n_rows, WIDTH // 32 * BLOCK_BYTES[packing.activation])
        out, bias = np.zeros((n_rows, n_tiles * 16), np.float32), np.zeros(n_tiles * 16, np.float32)
        args, run = np.zeros(1, LINEAR), np.zeros(1, RUN)
        for key, value in {
            "weight": self._memory.ctypes.data, "tile_bytes": tile, "n_tiles": n_tiles, "n_blocks": n_blocks,
            "x": x.ctypes.data, "x_stride": x.strides[0], "out": out.ctypes.data, "out_stride": out.strides[0],
            "bias": bias.ctypes.data, "n_groups": 1,
        }.items():  # fmt: skip
            args[key] = value
        run["n_rows"] = n_rows
        with contextlib.suppress(ImportError):  # an older checkout
            from llamacli.kernels.layout import AHEAD
            from llamacli.kernels.prefetch import known_distance

            run["ahead"] = ahead or known_distance() or AHEAD
        seconds = fastest(linear(kind).call, args.ctypes.data, run.ctypes.data, 0, 1)
        return tile / 16, 16 * n_tiles / seconds


class Worker:
    """Process that measures for a checkout and an instruction set."""

    def __init__(self, root: Path, isa: str):
        paths = [root / "core", *sorted((root / "plugins").iterdir())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "LLAMACLI_ISA": isa}
        command = [sys.executable, __file__, "--worker"]
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of Packed there."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([method, args]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a worker ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def work() -> None:
    """Answer requests on standard input."""
    packed = Packed()
    for line in sys.stdin:
        method, args = json.loads(line)
        print(json.dumps(getattr(packed, method)(*args)), flush=True)


# --- ggml ------------------------------------------------------------------------------------------------------------
class _InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """`ggml_cplan`."""

    _fields_ = (
        ("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p), ("abort", ctypes.c_void_p), ("data", ctypes.c_void_p), ("ref", ctypes.c_bool),
    )  # fmt: skip


class Ggml:
    """Matrix products of ggml by one thread."""

    def __init__(self, folder: Path):
        self._base, self._cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so"), 3) for name in ("base", "cpu"))
        p, i = ctypes.c_void_p, ctypes.c_int
        self._repacked = self._cpu._Z35ggml_backend_cpu_repack_buffer_typev
        for function, result, args in (
            (self._base.ggml_init, p, [_InitParams]), (self._base.ggml_free, None, [p]),
            (self._base.ggml_new_tensor_2d, p, [p, i, ctypes.c_int64, ctypes.c_int64]),
            (self._base.ggml_mul_mat, p, [p, p, p]), (self._base.ggml_new_graph, p, [p]),
            (self._base.ggml_build_forward_expand, None, [p, p]), (self._base.ggml_get_data, p, [p]),
            (self._base.ggml_backend_alloc_ctx_tensors_from_buft, p, [p, p]),
            (self._base.ggml_backend_buffer_free, None, [p]),
            (self._base.ggml_backend_tensor_set, None, [p, p, ctypes.c_size_t, ctypes.c_size_t]),
            (self._base.ggml_backend_cpu_buffer_type, p, []), (self._repacked, p, []),
            (self._cpu.ggml_graph_plan, _Plan, [p, i, p]),
            (self._cpu.ggml_graph_compute, i, [p, ctypes.POINTER(_Plan)]),
        ):  # fmt: skip
            function.restype, function.argtypes = result, args
        self._cpu.ggml_cpu_init()

    def run(self, name: str, n_rows: int, size: int) -> float:
        """Rows of weights a second."""
        from llamacli.quantization import TensorType, nbytes

        base, kind = self._base, TensorType[name]
        row = nbytes(kind, (WIDTH,))
        n_out = size // row // 64 * 64
        weights, values = (base.ggml_init(_InitParams(64 << 20, None, no_alloc)) for no_alloc in (True, False))
        weight = base.ggml_new_tensor_2d(weights, int(kind), WIDTH, n_out)
        is_repacked = name in ("Q4_0", "Q4_K", "Q2_K", "IQ4_NL", "MXFP4")  # by x86 builds
        buffer_type = self._repacked() if is_repacked else base.ggml_backend_cpu_buffer_type()
        buffer = base.ggml_backend_alloc_ctx_tensors_from_buft(weights, buffer_type)
        raw = np.tile(random_bytes(1 << 16), n_out * row // (1 << 16) + 1)
        base.ggml_backend_tensor_set(weight, raw.ctypes.data, 0, n_out * row)
        x = base.ggml_new_tensor_2d(values, 0, WIDTH, n_rows)
        ctypes.memmove(base.ggml_get_data(x), np.ones((n_rows, WIDTH), np.float32).ctypes.data, 4 * n_rows * WIDTH)
        graph, n_products = base.ggml_new_graph(values), max(1, (4 << 20) // size)
        for _ in range(n_products):
            base.ggml_build_forward_expand(graph, base.ggml_mul_mat(values, weight, x))
        plan = self._cpu.ggml_graph_plan(graph, 1, None)
        space = np.zeros(plan.work_size + 64, np.uint8)
        plan.work_data = space.ctypes.data
        seconds = fastest(self._cpu.ggml_graph_compute, graph, ctypes.byref(plan))
        base.ggml_backend_buffer_free(buffer)
        base.ggml_free(weights)
        base.ggml_free(values)
        return n_out * n_products / seconds


# --- table -----------------------------------------------------------------------------------------------------------
def measure(
    kind: str, n_rows: int, workers: list[Worker], ggml: Ggml | None, repetitions: int, ahead: int | None
) -> dict[str, dict[str, Any]]:
    """Results by place, memory or cache."""
    results: dict[str, dict[str, Any]] = {}
    for number, (place, size) in enumerate(SIZES.items()):
        speeds: list[list[float]] = []
        for _ in range(repetitions):
            answers = [worker.ask("run", kind, n_rows, size, ahead) for worker in workers]
            others = [ggml.run(kind, n_rows, size)] if ggml else []
            speeds.append([workers[0].ask("read")[number], *(speed for _, speed in answers), *others])
        read, ours, *rest = (max(column) for column in zip(*speeds, strict=True))
        row_bytes = answers[0][0]
        results[place] = {"gb_s": ours * row_bytes / 1e9, "share": ours * row_bytes / 1e9 / read, "read_gb_s": read}
        names = ["other"][: len(workers) - 1] + ["ggml"][: ggml is not None]
        results[place] |= {f"to_{name}": ours / speed for name, speed in zip(names, rest, strict=True)}
    return results


def main() -> None:
    """Parse the command line and measure."""
    from llamacli.kernels.cpu import host
    from llamacli.kernels.isa import available
    from llamacli.kernels.registry import packings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="tensor types; default: all")
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="rows of activations; default: 1")
    parser.add_argument("--isa", nargs="*", default=[available()[-1]], choices=available(), help="default: the best")
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--ggml", type=Path, help="folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("-r", type=int, default=7, help="turns; default: 7")
    parser.add_argument("--ahead", type=int, help="prefetch distance in bytes; default: that of this CPU")
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    ggml, results = Ggml(options.ggml) if options.ggml else None, []
    print("type      rows isa          GB/s  share   cache" + "  other" * bool(options.other) + "   ggml" * bool(ggml))
    for isa in options.isa:
        workers = [Worker(root, isa) for root in (ROOT, options.other) if root]
        for kind in options.types or [kind.name for kind in packings()]:
            for n_rows in options.rows:
                found = measure(kind, n_rows, workers, ggml, options.r, options.ahead)
                memory, cache = found["memory"], found["cache"]
                ratios = [f"{found[place][key]:5.2f}" for key in memory if key[:3] == "to_" for place in found]
                print(f"{kind:9} {n_rows:4} {isa:10} {memory['gb_s']:6.1f} {memory['share']:6.2f}"
                      f" {cache['gb_s']:7.1f}  " + " ".join(ratios), flush=True)  # fmt: skip
                results.append({"type": kind, "rows": n_rows, "isa": isa, **found})
        for worker in workers:
            worker.close()
    if options.json:
        machine = {"cpu": host()[1], "date": time.strftime("%Y-%m-%d")}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
