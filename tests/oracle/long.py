"""Record llama.cpp's logits of a long text: `python -m oracle.long`.

Blocks of 128 tokens, and the choice of few blocks among many, are beyond the 48 tokens of other goldens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import tiny_variants
from llamacli.testing.peer import Peer
from oracle.goldens import DIRECTORY, sha256

PATH = DIRECTORY / "long.npz"
VARIANTS = ("deepseek4",)
TOKENS = np.random.RandomState(3).randint(0, 128, 600).tolist()
"""Tokens at which no two blocks have equal scores where the choice ends."""

N_CTX, STEP = 1024, 25
"""Length of the context; every so many logits are recorded."""


def main() -> None:
    """Record some logits of each variant."""
    arrays = {}
    with tempfile.TemporaryDirectory() as temporary:
        for variant in VARIANTS:
            path = tiny_variants.write(Path(temporary) / f"{variant}.gguf", variant, dequantized=True)
            with Peer(path, N_CTX) as peer:
                arrays[variant] = peer.eval(TOKENS)[::STEP]
            arrays[f"{variant} sha256"] = np.array(sha256(path))
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
