#!/usr/bin/env python3
"""Compare the speed of llamacli and llama.cpp, alternating within one run.

    pip install llama-cpp-python                  # builds llama.cpp: about 6 minutes on 2 cores
    python benchmarks/compare.py FILE.gguf [FILE.gguf ...] -p 512 -n 32 [-d 4096] [-r 5] [--json OUT.json]
    python benchmarks/compare.py --all FOLDER     # all comparisons of docs/performance.md; writes the files first

Both use the same files and the same number of threads. Prints a row per test: the median ratio of neighbouring runs
with its interquartile range, and median tokens per second of both. The peer runs with flash attention on and off in a
first repetition, which does not count; in the others only with the faster setting.
"""

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import make_model
import numpy as np

import llamacli
from llamacli.util.system import allowed_cpus, cpu_name, peak_rss


class Ours:
    """llamacli."""

    name = "llamacli"

    def __init__(self, path: str, threads: int, n_ctx: int):
        self._model = llamacli.load_model(path, threads=threads)
        self._session = self._model.create_session(n_ctx=n_ctx, reuse=False)
        self.n_vocab = self._model.config.n_vocab

    def start(self, n_past: int) -> None:
        """Rewind to a position; the cached tokens do not matter for speed."""
        self._session.rewind(n_past)

    def evaluate(self, tokens: list[int]) -> None:
        """Evaluate tokens."""
        self._session.eval(tokens)

    def close(self) -> None:
        """Free the memory."""
        self._session.close()
        self._model.close()


class Peer:
    """llama.cpp through llama-cpp-python's low-level API."""

    def __init__(self, path: str, threads: int, n_ctx: int, flash_attention: int, *, repack: bool = True):
        import llama_cpp as lib

        self.name = f"llama.cpp, flash attention {'on' if flash_attention else 'off'}"
        self._lib = lib
        self._silence = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self._model = lib.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp refused {path}")
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = n_ctx, 512, 512
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = flash_attention
        self._context = lib.llama_init_from_model(self._model, settings)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._n_past = 0

    def start(self, n_past: int) -> None:
        """Rewind to a position that was reached before."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), 0, n_past, -1)
        self._n_past = n_past

    def evaluate(self, tokens: list[int]) -> None:
        """Evaluate tokens."""
        for start in range(0, len(tokens), 512):
            chunk = tokens[start : start + 512]
            ids = (self._lib.llama_token * len(chunk))(*chunk)
            if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(ids, len(chunk))):
                raise SystemExit("llama.cpp's decode failed")
            self._n_past += len(chunk)
        self._lib.llama_synchronize(self._context)

    def close(self) -> None:
        """Free the memory."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


ALL = (  # shape, name in the table, type, tokens of a prompt, tokens generated
    ("llama-1b", "1B", "Q8_0", 512, 32),
    ("llama-1b", "1B", "Q4_0", 512, 32),
    ("llama-1b", "1B", "Q4_K_M", 512, 32),
    ("llama-1b", "1B", "F16", 512, 16),
    ("smollm2-135m", "135M", "Q8_0", 512, 128),
    ("smollm2-135m", "135M", "Q4_0", 512, 128),
    ("llama-1b", "1B", "Q8_0", 4096, 32),
)
"""Comparisons of docs/performance.md; behind a long prompt, tokens are generated at its depth."""

Row = tuple[str, str, float, float, float, float, float]
"""Name, test, medians of both engines, ratio and its quartiles."""

COSTS = ("seconds of load to first token", "MB of peak memory")
"""Rows where smaller is better."""


def timed(engine: Ours | Peer, tokens: list[int], at_once: int) -> float:
    """Seconds to evaluate tokens, `at_once` per call."""
    started = time.perf_counter()
    for i in range(0, len(tokens), at_once):
        engine.evaluate(tokens[i : i + at_once])
    return time.perf_counter() - started


def measure(
    engines: list[Ours | Peer], options: argparse.Namespace, repetitions: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Tokens per second by test: of llamacli and of the faster peer.

    Engines alternate, after a warm-up repetition that chooses the peer.
    """
    n_prompt, n_gen, depth = options.n_prompt, options.n_gen, options.depth
    random = np.random.default_rng(0)
    tokens = random.integers(0, engines[0].n_vocab, max(n_prompt, n_gen, depth, 1)).tolist()
    for engine in engines:
        engine.start(0)
        engine.evaluate(tokens[:depth] if depth else tokens[:1])
    behind = depth + (n_prompt if options.after_prompt else 0)

    def speed(engine: Ours | Peer, n: int, n_past: int, at_once: int) -> float:
        engine.start(n_past)
        return n / timed(engine, tokens[:n], at_once)

    tests = ((f"prompt {n_prompt}", n_prompt, depth, n_prompt), ("generate", n_gen, behind, 1))
    results: dict[str, tuple[list[float], list[float]]] = {}
    for name, *sizes in tests:
        if sizes[0]:
            _, *warm = [speed(engine, *sizes) for engine in engines]
            pair = engines[0], engines[1 + warm.index(max(warm))]
            runs = [[speed(engine, *sizes) for engine in pair] for _ in range(repetitions)]
            results[f"{name} at depth {sizes[1]}" if sizes[1] else name] = tuple(map(list, zip(*runs, strict=True)))
    return results


def rows(path: str, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of a file."""
    n_ctx = options.n_prompt + options.n_gen + options.depth + 64
    engines: list[Ours | Peer] = [Ours(path, options.threads, n_ctx)]
    engines += [Peer(path, options.threads, n_ctx, flash, repack=not options.no_repack) for flash in (0, 1)]
    results = measure(engines, options, options.repetitions)
    for engine in engines:
        engine.close()
    gc.collect()
    for test, (ours, peer) in results.items():
        ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        medians = (statistics.median(ours), statistics.median(peer), statistics.median(ratios))
        yield options.label or Path(path).stem, test, *medians, low, high


def started(path: str, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of startup time and peak memory, measured in separate processes."""
    figures: dict[str, list[list[float]]] = {"ours": [], "peer": []}
    for _ in range(4):
        for engine, own in figures.items():
            command = [sys.executable, __file__, "--start", engine, path, "-t", str(options.threads)]
            command += ["--no-repack"] if options.no_repack else []
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            own.append([float(figure) for figure in answer.split()[-2:]])
    for column, test in enumerate(COSTS):
        ours, peer = ([run[column] for run in runs[1:]] for runs in figures.values())
        ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
        medians = (statistics.median(ours), statistics.median(peer), statistics.median(ratios))
        yield options.label or Path(path).stem, test, *medians, ratios[0], ratios[-1]


def start(engine: str, path: str, threads: int, *, repack: bool) -> None:
    """Load, evaluate a token, and print seconds and megabytes used."""
    begun = time.perf_counter()
    runner = Ours(path, threads, 576) if engine == "ours" else Peer(path, threads, 576, 1, repack=repack)
    runner.start(0)
    runner.evaluate([1])
    print(time.perf_counter() - begun, (peak_rss() or 0) / 2**20)


def save(table: list[Row], path: Path) -> None:
    """Write the rows as a result that tools/measurements.py reads."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    found = {
        "title": "Prompts and generation beside llama.cpp",
        "machine": f"{cpu_name()}, {len(allowed_cpus())} cores",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "command": " ".join(["benchmarks/compare.py", *(Path(part).name for part in sys.argv[1:])]),
        "peer": f"llama.cpp of llama-cpp-python {metadata.version('llama-cpp-python')}",
        "columns": ["task", "llamacli tok/s", "llama.cpp tok/s", "ratio", "low", "high"],
        "rows": [[f"{test}, {name}", *(float(f"{one:.3g}") for one in rest)] for name, test, *rest in table],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def everything(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    """Arguments of the comparisons in ALL; missing files are written first."""
    folder.mkdir(parents=True, exist_ok=True)
    for shape, name, kind, n_prompt, n_gen in ALL:
        path = folder / f"{shape}-{kind}.gguf"
        if not path.exists():
            make_model.write(str(path), shape, kind)
        row = {"label": f"{name} {kind}", "n_prompt": n_prompt, "n_gen": n_gen, "depth": 0}
        if n_prompt > 512:
            row |= {"after_prompt": True, "repetitions": min(options.repetitions, 2)}
        yield str(path), argparse.Namespace(**vars(options) | row)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*")
    parser.add_argument(
        "--all", metavar="FOLDER", help="all comparisons of docs/performance.md, on files written to FOLDER"
    )
    parser.add_argument("--start", choices=["ours", "peer"], help="only load FILE and evaluate a token")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-d", "--depth", type=int, default=0)
    parser.add_argument("--after-prompt", action="store_true", help="generate behind the prompt")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--no-repack", action="store_true", help="the peer keeps weights as stored (some builds crash)")
    parser.add_argument("--json", metavar="FILE", help="write a result for benchmarks/results")
    parser.set_defaults(label="")
    options = parser.parse_args()
    if options.start:
        start(options.start, options.files[0], options.threads, repack=not options.no_repack)
        return
    works = [(path, options) for path in options.files]
    if options.all:
        works += list(everything(Path(options.all), options))
    table = []
    print("| task | ratio | interquartile range | llamacli tok/s | llama.cpp tok/s |\n|---|---|---|---|---|")
    lines = itertools.chain.from_iterable(rows(*work) for work in works)
    costs = started(*works[0]) if options.all else ()
    for row in itertools.chain(lines, costs):
        table.append(row)
        name, test, ours, peer, ratio, low, high = row
        print(f"| {test}, {name} | {ratio:.2f} | {low:.2f} to {high:.2f} | {ours:.4g} | {peer:.4g} |", flush=True)
    if options.json:
        save(table, Path(options.json))


if __name__ == "__main__":
    main()
