"""Record the goldens of tiny models: `python -m oracle.record [VARIANT ...]`.

With `--model FILE`, records the greedy continuation of BOS of a real model instead, ids only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import tiny_variants
from oracle import goldens, peer

N_STORY = 200


def record(name: str, directory: Path) -> None:
    """Run llama.cpp on a variant and its float32 weights; save the golden."""
    path = tiny_variants.write(directory / f"{name}.gguf", name)
    exact = tiny_variants.write(directory / f"{name}-f32.gguf", name, dequantized=True)
    tokens, n_ctx, encoded = goldens.TOKENS.tolist(), goldens.N_CTX, goldens.ENCODED
    run = peer.run(path, tokens, goldens.N_PROMPT, goldens.N_GREEDY, n_ctx, encoded)
    golden = goldens.Golden(
        sha256=goldens.sha256(path),
        logits=run["logits"][goldens.POSITIONS],
        top1=run["logits"].argmax(-1).astype(np.int32),
        greedy=run["greedy"],
        gaps=run["gaps"],
        exact=peer.run(exact, tokens, 1, 0, n_ctx, encoded)["logits"][goldens.POSITIONS],
    )
    change = golden.save(name)
    n_sure = goldens.sure(golden.gaps, 1e-3)
    n_different = len(set(golden.greedy.tolist()))
    print(f"{name}, {change}: {n_different} different greedy tokens, {n_sure} before the first narrow gap")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", help="names in tiny_variants.VARIANTS; none is all")
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.model:
        story = peer.run(arguments.model, [], 0, N_STORY, goldens.N_CTX)["greedy"]
        np.save(goldens.DIRECTORY / f"{arguments.model.name}.npy", story.astype(np.uint16))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            for variant in arguments.variants or tiny_variants.VARIANTS:
                record(variant, Path(temporary))
