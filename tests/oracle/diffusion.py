"""Record llama.cpp's logits of diffusion models, and masks filled by them: `python -m oracle.diffusion`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tiny_variants
from oracle.goldens import DIRECTORY, N_CTX, POSITIONS, TOKENS, sha256
from oracle.peer import Peer

GOLDEN = DIRECTORY / "diffusion.npz"
VARIANTS = [name for name, variant in tiny_variants.ENCODERS.items() if variant.family == "diffusion"]
MASK = 127

CANVAS = [*TOKENS[:20].tolist(), *[MASK] * 17, *TOKENS[20:25].tolist(), MASK]
STEPS, BLOCK_LENGTH = 7, 6


def filled(peer: Peer, *, shift: bool, steps: int, block_length: int) -> list[int]:
    """CANVAS with its masks filled greedily, the surest first."""
    ids = list(CANVAS)
    masked = [i for i, token in enumerate(ids) if token == MASK]
    blocks = [masked[i : i + block_length] for i in range(0, len(masked), block_length)]
    for block in blocks:
        n_steps, left = max(1, steps // len(blocks)), set(block)
        for step in range(n_steps):
            n = len(block) // n_steps + (step < len(block) % n_steps)
            rows = peer.eval(ids, position=0).astype(np.float64)
            found = []
            for i in sorted(left):
                row = rows[max(0, i - 1) if shift else i].copy()
                row[MASK] = -np.inf
                p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
                found.append((-p.max(), i, int(p.argmax())))
            for _, i, token in sorted(found)[:n]:
                ids[i] = token
                left.discard(i)
    return ids


if __name__ == "__main__":
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            path = tiny_variants.write(Path(folder) / f"{variant}.gguf", variant)
            exact = tiny_variants.write(Path(folder) / f"{variant}-f32.gguf", variant, dequantized=True)
            shift = tiny_variants.ENCODERS[variant].options.get("shift", False) is None
            with Peer(exact, N_CTX) as peer:
                arrays[f"{variant} exact"] = peer.eval(TOKENS.tolist())[POSITIONS]
                arrays[f"{variant} whole"] = np.array(filled(peer, shift=shift, steps=STEPS, block_length=len(CANVAS)))
                arrays[f"{variant} blocks"] = np.array(filled(peer, shift=shift, steps=9, block_length=BLOCK_LENGTH))
            with Peer(path, N_CTX) as peer:
                arrays[f"{variant} logits"] = peer.eval(TOKENS.tolist())[POSITIONS]
            arrays[f"{variant} sha256"] = np.array(sha256(path))
    np.savez_compressed(GOLDEN, **arrays)
