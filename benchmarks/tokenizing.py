#!/usr/bin/env python3
"""Compare the speed of encoding text with llama.cpp's.

    pip install llama-cpp-python
    python benchmarks/tokenizing.py FILE.gguf ... [--text FILE] [-n 1000000] [-r 7]

The files need only a vocabulary. The engines take turns, each encodes the text -r times; prints the CPU time of loading
and of the first encode, the median MB per second of CPU time of both, and the median of the ratios of the turns.
Without --text, the text is this project's own sources and documentation.
"""

import argparse
import statistics
import time
from pathlib import Path

import llama_cpp

from llamacli import load_tokenizer

_quiet = llama_cpp.llama_log_callback(lambda *_: None)


class Peer:
    """llama.cpp's tokenizer of one file."""

    def __init__(self, path: str):
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp refuses {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text without special tokens."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, False)
        return list(ids[:n])


def own_text() -> str:
    """Return this project's Markdown files and Python sources."""
    root = Path(__file__).resolve().parents[1]
    paths = sorted(path for suffix in ("md", "py") for path in root.rglob(f"*.{suffix}"))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def compare(path: str, text: str, repetitions: int) -> None:
    """Measure one vocabulary and print a row."""
    start = time.thread_time()
    ours = load_tokenizer(path)
    loaded = time.thread_time()
    ours.encode("Hello")
    first = time.thread_time()
    peer = Peer(path)
    times: list[tuple[float, float]] = []
    for _ in range(repetitions):
        marks = [time.thread_time()]
        results = []
        for engine in (lambda: ours.encode(text, add_special=False), lambda: peer.encode(text)):
            results.append(engine())
            marks.append(time.thread_time())
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
        if results[0] != results[1]:
            raise SystemExit(f"{path}: the ids differ")
    size = len(text.encode()) / 1e6
    mine, theirs = (size / statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(
        f"{Path(path).name:32} load {loaded - start:5.2f} s  first {first - loaded:5.2f} s  "
        f"{mine:6.2f} MB/s  llama.cpp {theirs:6.2f} MB/s  ratio {ratio:5.2f}"
    )


def main() -> None:
    """Parse the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--text")
    parser.add_argument("-n", type=int, default=1_000_000, help="characters of the text")
    parser.add_argument("-r", type=int, default=7, help="turns")
    options = parser.parse_args()
    llama_cpp.llama_log_set(_quiet, None)
    text = Path(options.text).read_text(encoding="utf-8") if options.text else own_text()
    for path in options.files:
        compare(path, text[: options.n], options.r)


if __name__ == "__main__":
    main()
