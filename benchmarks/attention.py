#!/usr/bin/env python3
"""Measure attention: bytes of the cache and operations a second.

    python benchmarks/attention.py                                       # 8,000 cells, one thread
    python benchmarks/attention.py 3x3x64 8x4x128 --depth 1056 8000 --types f16 q8_0 --threads 2
    python benchmarks/attention.py --rows 512 --depth 4096 [--tiles]     # the last 512 tokens of a prompt, by AMX
    python benchmarks/attention.py --other /tmp/before                   # with another checkout, in turns

A shape is heads of keys x heads of queries for each x numbers of a head. Layers are as many as fill 300 MB, so that
the caches hold none of them; each layer's fastest run counts, and the median layer is printed. The digest of the
results is that of equal bits.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BYTES = 300 << 20


class Layers:
    """Cells of several layers with the step of each."""

    def __init__(self, shape: str, kind: str, depth: int, options: argparse.Namespace):
        from llamacli.kernels import attention as kernels
        from llamacli.kernels.attention import ATTENTION, attention, partial_bytes, scratch_bytes
        from llamacli.kernels.layout import ROW, RUN
        from llamacli.kernels.team import STEP, Team
        from llamacli.kv import KVLayout, KVPool, KVSequence
        from llamacli.kv.layout import KVSpec
        from llamacli.util.memory import anonymous, view

        threads, n_rows = options.threads, options.rows
        n_head_kv, group, head_dim = map(int, shape.split("x"))
        random = np.random.default_rng(0)
        spec = KVSpec(n_head_kv=n_head_kv, head_dim=head_dim, value_dim=head_dim)
        page_bytes = KVLayout.of([spec], kind).groups[0].page_bytes
        self.n_bytes = page_bytes * depth // 16
        n_layers = max(1, min(60, BYTES // self.n_bytes))
        layout = KVLayout.of([spec] * n_layers, kind)
        self._pool = KVPool(layout)
        self._sequence = sequence = KVSequence(self._pool, depth + 16)
        sequence.reserve(0, depth)
        n_page = self._pool.groups[0].page_bytes
        numbers = random.integers(0x20, 0x3C, n_page, dtype=np.uint8)  # ordinary numbers in every type
        for page in filter(None, sequence.tables[0]):
            view(int(page), n_page)[:] = numbers
        queries = random.standard_normal((n_rows, n_head_kv * group * head_dim)).astype(np.float32)
        self._out = np.zeros_like(queries)
        shared = sequence.addresses.ctypes.data, sequence.seq_len, depth, *[0] * (len(ROW) - 5)
        rows = np.array([(cell, cell, *shared) for cell in range(depth - n_rows, depth)], ROW)
        self.n_operations = 4 * n_head_kv * group * head_dim * sum(range(depth - n_rows + 1, depth + 1))
        make, in_tiles = attention, {}
        if options.tiles:  # older checkouts have none
            make, in_tiles = kernels.tiled_attention, {"in_tiles": True}
        scratch = anonymous(threads * -(-scratch_bytes(head_dim, head_dim, **in_tiles) // 64) * 64)
        scratch = scratch.reshape(threads, -1)
        partials = np.zeros(partial_bytes(head_dim, threads), np.uint8)
        self._run = np.zeros(1, RUN)
        self._run["n_rows"], self._run["rows"] = n_rows, rows.ctypes.data
        self._team, self._kept = Team(threads), [queries, rows, scratch, partials]
        self._steps: list[tuple[Any, Any]] = []
        for layer in range(n_layers):
            args, step = np.zeros(1, ATTENTION), np.zeros(1, STEP)
            for name, value in {
                "q": queries.ctypes.data, "q_stride": queries.strides[0], "out": self._out.ctypes.data,
                "out_stride": self._out.strides[0], "layer": layer, "n_head_kv": n_head_kv, "group": group,
                "head_dim": head_dim, "value_dim": head_dim, "scratch": scratch.ctypes.data,
                "scratch_stride": scratch.strides[0], "window": 1 << 40, "chunk": 1 << 40,
                "partials": partials.ctypes.data, "partial_bytes": partials.nbytes, "scale": 0.02,
            }.items():  # fmt: skip
                args[name] = value
            step["function"], step["args"] = make(layout.kv_type).address, args.ctypes.data
            self._steps.append((args, step))

    def fastest(self, seconds: float) -> float:
        """Seconds of the median layer, of the fastest run of each."""
        best, end = np.full(len(self._steps), np.inf), time.perf_counter() + seconds
        while time.perf_counter() < end:
            for i, (_, step) in enumerate(self._steps):
                started = time.perf_counter()
                self._team.run(step.ctypes.data, 0, 1, self._run.ctypes.data)
                best[i] = min(best[i], time.perf_counter() - started)
        return float(np.median(best))

    def digest(self) -> str:
        """Digest of the results of the last layer."""
        return hashlib.sha256(self._out.tobytes()).hexdigest()[:8]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a table: one for each depth, type and shape."""
    rows = []
    for depth in options.depth:
        for kind in options.types:
            for shape in options.shapes:
                layers = Layers(shape, kind, depth, options)
                seconds = layers.fastest(options.seconds)
                row = {"depth": depth, "type": kind, "shape": shape, "us": round(1e6 * seconds, 1)}
                speeds = {"gb_s": round(layers.n_bytes / seconds / 1e9, 1)}
                speeds["gop_s"] = round(layers.n_operations / seconds / 1e9, 1)
                rows.append(row | speeds | {"digest": layers.digest()})
    return rows


def measure_in(root: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Rows of a checkout, measured in a process of its own."""
    paths = [root / "core", *sorted((root / "plugins").iterdir())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, __file__, *arguments, "--json"]
    done = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    """Print a table, or the rows of this process as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["1x1x64", "3x3x64", "8x4x64", "8x4x128", "1x8x256"])
    parser.add_argument("--depth", type=int, nargs="+", default=[8000], help="cells that the token sees")
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0"], help="types of the cache")
    parser.add_argument("--rows", type=int, default=1, help="tokens, the last of the cells")
    parser.add_argument("--tiles", action="store_true", help="by AMX")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=2, help="turns with --other")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options)))
        return
    own = [*options.shapes, "--depth", *map(str, options.depth), "--types", *options.types]
    own += ["--threads", str(options.threads), "--seconds", str(options.seconds), "--rows", str(options.rows)]
    own += ["--tiles"] * options.tiles
    roots = [ROOT, *([options.other] if options.other else [])]
    found = [[measure_in(root, own) for root in roots] for _ in range(options.turns if options.other else 1)]
    print(
        f"{'depth':>6} {'type':6}{'shape':9}{'us':>9}{'GB/s':>7}{'Gop/s':>7}"
        + "  other  ratio  bits" * bool(options.other)
    )
    for number, row in enumerate(found[0][0]):
        speeds = [max(turn[side][number]["gb_s"] for turn in found) for side in range(len(roots))]
        us = min(turn[0][number]["us"] for turn in found)
        operations = max(turn[0][number]["gop_s"] for turn in found)
        line = f"{row['depth']:6} {row['type']:6}{row['shape']:9}{us:9.1f}{speeds[0]:7.1f}{operations:7.1f}"
        if options.other:
            equal = row["digest"] == found[0][1][number]["digest"]
            ratio = min(turn[1][number]["us"] for turn in found) / us
            line += f"{speeds[1]:7.1f}{ratio:7.2f}  {'equal' if equal else 'differ'}"
        print(line)


if __name__ == "__main__":
    main()
