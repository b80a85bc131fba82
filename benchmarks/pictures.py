#!/usr/bin/env python3
"""Measure the encoding of a picture: processor seconds, beside llama.cpp's mtmd.

    python benchmarks/pictures.py                              # SmolVLM 256M's and Qwen3-VL 2B's encoders, F16
    python benchmarks/pictures.py smolvlm --type Q8_0 --threads 2 --runs 5 --json pictures.json

The files are random, of the shapes of these models' mmproj files. A tile of 512 x 512 pixels, 1024 patches, is encoded
by both in turns, after one run each that is not counted; the fastest run of each counts, and the ratio is the peer's
seconds by ours. With one thread seconds are those of the process's processor time, which other programs hardly
change, else of the wall clock. The NMSE is that of our embeddings against the peer's.
"""

# ruff: noqa: E402 - the cases are those of the tests

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import media_cases
from llamacli import load_model
from llamacli.media.encoder import Tile
from llamacli.media.pictures import Picture
from llamacli.testing.peer import Peer
from llamacli.testing.peer_media import PeerEncoder
from llamacli.testing.tiny_media import drawn
from oracle.goldens import nmse

SIDE = 512

SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "smolvlm": (
        "idefics3",
        {
            "embedding_length": 768, "attention.head_count": 12, "feed_forward_length": 3072, "block_count": 12,
            "image_size": SIDE, "patch_size": 16, "projector.scale_factor": 4, "preproc_image_size": SIDE,
            "projection_dim": 576,
        },
        {"embedding_length": 576},
    ),
    "qwen3vl": (
        "qwen3vl",
        {
            "embedding_length": 1024, "attention.head_count": 16, "feed_forward_length": 4096, "block_count": 24,
            "image_size": 768, "patch_size": 16, "projection_dim": 2048,
            "is_deepstack_layers": [i in (5, 11, 17) for i in range(24)],
        },
        {"embedding_length": 2048, "n_deepstack_layers": 3, "block_count": 3},
    ),
}  # fmt: skip
"""Case of `media_cases`, keys of the encoder and of the text model, by name."""


def seconds(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds of a call."""
    started = clock()
    function()
    return clock() - started


def measure(folder: Path, name: str, kind: str, threads: int, runs: int) -> dict[str, Any]:
    """Row of the table: an encoder with weights of a type."""
    case, keys, text_keys = SHAPES[name]
    given = media_cases.CASES[case]
    options = {**given.options, "type": kind} if kind != "F32" else given.options
    media_cases.CASES[name] = attrs.evolve(
        given, keys={**given.keys, **keys}, options=options, text_keys={**given.text_keys, **text_keys}
    )
    text = media_cases.write_text(folder / f"{name}.gguf", name)
    mmproj = media_cases.write_mmproj(folder / f"mmproj-{name}.gguf", name)
    picture = drawn(SIDE, SIDE)
    clock = time.process_time if threads == 1 else time.perf_counter
    with contextlib.ExitStack() as opened:
        peer = opened.enter_context(Peer(text, 64))
        other = opened.enter_context(PeerEncoder(peer, mmproj, threads=threads))
        model = opened.enter_context(load_model(text, threads=threads, mmproj=mmproj))
        encoder = model.media_encoder()
        tile = [part for part in encoder.layout(Picture.of(picture)) if isinstance(part, Tile)][-1]
        owner, parts = other.chunks(picture)
        opened.callback(other.api.mtmd_input_chunks_free, owner)
        chunk = [part for part in parts if not other.is_text(part)][-1]

        def ours() -> Any:
            encoder._kept.clear()
            return encoder.encode(tile)

        def theirs() -> Any:
            return other.rows(chunk)

        error = nmse(theirs(), ours())
        times = [(seconds(ours, clock), seconds(theirs, clock)) for _ in range(runs)]
    own, peers = (min(column) for column in zip(*times, strict=True))
    tokens = len(tile.ids)
    return {"encoder": name, "type": kind, "tokens": tokens, "ours_s": own, "peer_s": peers, "ratio": peers / own,
            "nmse": error}  # fmt: skip


def main() -> None:
    """Measure the encoders of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encoders", nargs="*", choices=[*SHAPES, []], default=[])
    parser.add_argument("--type", nargs="+", default=["F16"], choices=["F32", "F16", "BF16", "Q8_0"], dest="kinds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    print("| encoder | type | tokens | ours, s | llama.cpp, s | ratio | NMSE |\n|---|---|---:|---:|---:|---:|---:|")
    for name in given.encoders or SHAPES:
        for kind in given.kinds:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(Path(folder), name, kind, given.threads, given.runs)
            rows.append(row)
            cells = (row["tokens"], *(f"{row[key]:.2f}" for key in ("ours_s", "peer_s", "ratio")), f"{row['nmse']:.0e}")
            print(f"| {name} | {kind} |", " | ".join(map(str, cells)), "|", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
