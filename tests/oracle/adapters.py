"""Record llama.cpp's logits of tiny models with LoRA adapters: `python -m oracle.adapters`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import adapters
import tiny_variants
from llamacli.testing.peer import Peer
from oracle.goldens import DIRECTORY, N_CTX, POSITIONS, TOKENS, sha256

PATH = DIRECTORY / "adapters.npz"


def digests(model: Path, given: list[tuple[Path, float]]) -> str:
    """Digests of the files of a case, in one line."""
    return " ".join(sha256(path) for path in [model, *(path for path, _ in given)])


def main() -> None:
    """Record all cases."""
    arrays = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in adapters.CASES.items():
            folder = Path(temporary) / name
            folder.mkdir()
            model = tiny_variants.write(folder / "model.gguf", case.variant)
            given = case.write(model, folder)
            with Peer(model, N_CTX) as peer:
                peer.set_adapters(given)
                arrays[name] = peer.eval(TOKENS.tolist())[POSITIONS]
            arrays[f"{name} sha256"] = np.array(digests(model, given))
            print(name, float(np.abs(arrays[name]).max()))
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
