"""Compare llamacli with llama.cpp on a GGUF file: `python -m oracle.compare FILE`.

Both run the same random tokens, with keys and values in float32, and decode greedily after them. Prints for every
position the normalised mean squared error and whether the most probable token is the same, then the totals. llama.cpp
may be in another interpreter: `--peer-python`, or the variable PEER_PYTHON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import llamacli
from oracle.goldens import nmse, sure

NARROW = 1e-3
"""Top-2 gaps below this are ties: which token is picked says nothing."""

CONTEXT_STEP = 256
"""The peer's contexts are multiples of this."""


def run_peer(python: str, model: Path, tokens: list[int], n_greedy: int, n_ctx: int) -> dict[str, npt.NDArray[Any]]:
    """Results of `oracle.peer`, run by an interpreter that has llama_cpp."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "peer.npz"
        command = [python, "-m", "oracle.peer", str(model.resolve()), str(out)]
        command += ["--greedy", str(n_greedy), "--context", str(n_ctx), "--tokens"]
        tests = Path(__file__).resolve().parents[1]
        done = subprocess.run([*command, *map(str, tokens)], cwd=tests, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        with np.load(out) as arrays:
            return dict(arrays)


def main() -> None:
    """Run both and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mode", default="fp32", choices=list(llamacli.QuantMode), help="default: fp32")
    parser.add_argument("--tokens", type=int, default=32, help="length of the random sequence; default: 32")
    parser.add_argument("--text", help="a text instead of random tokens")
    parser.add_argument("--greedy", type=int, default=32, help="tokens to decode greedily; default: 32")
    parser.add_argument("--context", type=int, default=0, help="length of the context; default: as much as is needed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer-python", default=os.environ.get("PEER_PYTHON", sys.executable))
    options = parser.parse_args()

    with llamacli.load_model(options.file, options.mode) as model:
        if options.text:
            tokens = model.encode(options.text)
        else:
            tokens = np.random.default_rng(options.seed).integers(model.config.n_vocab, size=options.tokens).tolist()
        n_ctx = -(-max(options.context, len(tokens) + options.greedy) // CONTEXT_STEP) * CONTEXT_STEP
        peer = run_peer(options.peer_python, options.file, tokens, options.greedy, n_ctx)
        with model.create_session(n_ctx=n_ctx, kv_type="f32") as session:
            logits = session.eval(tokens, all_logits=True)
            ids = [token.id for token in session.generate([], max_tokens=options.greedy, ignore_eos=True)]

    same = logits.argmax(-1) == peer["logits"].argmax(-1)
    for position, (token, expected, actual) in enumerate(zip(tokens, peer["logits"], logits, strict=True)):
        top1 = "same" if same[position] else "OTHER"
        print(f"{position:6} {token:8}  NMSE {nmse(expected, actual):.2e}  {top1} top 1")
    differing = (i for i, (a, b) in enumerate(zip(ids, peer["greedy"], strict=True)) if a != b)
    n_equal, n_sure = next(differing, len(ids)), sure(peer["gaps"], NARROW)
    print(f"NMSE {nmse(peer['logits'], logits):.2e}, top 1 agrees at {same.sum()} of {len(same)} positions")
    print(f"greedy: {n_equal} of {len(ids)} tokens equal; the peer's first near tie comes after {n_sure}")


if __name__ == "__main__":
    main()
