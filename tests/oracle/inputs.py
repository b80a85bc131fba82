"""Record llama.cpp's logits after embeddings and M-RoPE positions: `python -m oracle.inputs`.

The weights are float32. See `input_cases`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import tiny_variants
from input_cases import AFTER, BEFORE, CASES, WHOLE
from llamacli.testing.peer import Peer
from oracle.goldens import DIRECTORY, N_CTX, sha256

PATH = DIRECTORY / "inputs.npz"


def main() -> None:
    """Record the logits of the last embedding and of later tokens.

    Then the logits of a text whose tokens attend to each other in both directions.
    """
    arrays = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in CASES.items():
            path = tiny_variants.write(Path(temporary) / f"{name}.gguf", case.variant, dequantized=True)
            with Peer(path, N_CTX) as peer:
                peer.eval(BEFORE)
                peer.set_causal(not case.both_ways)
                last = peer.eval_embeddings(case.embeddings(peer.n_embd), case.positions)[-1:]
                peer.set_causal(True)
                rest = peer.eval(AFTER, case.position_after)
            arrays[name] = np.concatenate([last, rest])
            arrays[f"{name} sha256"] = np.array(sha256(path))
            print(name, float(np.abs(arrays[name]).max()))
        path = tiny_variants.write(Path(temporary) / "whole.gguf", WHOLE, dequantized=True)
        with Peer(path, N_CTX) as peer:
            peer.set_causal(False)
            arrays["whole"] = peer.eval(BEFORE)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
