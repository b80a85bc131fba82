"""Record llama.cpp's embeddings of pictures, and logits around them: `python -m oracle.media [CASE ...]`.

See `media_cases`. Each case is recorded with float32 weights: the ids and rows of a text with a picture in it, as
mtmd divides and encodes them, and the logits of its tokens behind the picture.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path

import numpy as np

from llamacli.testing.peer import Peer
from llamacli.testing.peer_media import PeerEncoder
from llamacli.testing.tiny_media import drawn
from media_cases import CASES, THINNED, write_mmproj, write_text
from oracle.goldens import DIRECTORY, sha256

PATH = DIRECTORY / "media.npz"
N_CTX = 1024
BEFORE, AFTER = "Look: ", " What is it?"


def thinned(picture: str, rows: np.ndarray) -> np.ndarray:
    """Rows of a picture that its golden has."""
    return rows[::THINNED] if picture.startswith("large") else rows


def record(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Arrays of a case: ids (-1 for rows), rows, logits."""
    text, mmproj = write_text(folder / "text.gguf", name), write_mmproj(folder / "mmproj.gguf", name)
    arrays = {f"{name} sha256": np.array(sha256(mmproj)), f"{name} text sha256": np.array(sha256(text))}
    with Peer(text, N_CTX) as peer, PeerEncoder(peer, mmproj) as encoder:
        mtmd = encoder.api
        for picture, size in CASES[name].pictures.items():
            peer.clear()
            owner, parts = encoder.chunks(drawn(*size), BEFORE, AFTER)
            ids, rows, logits, after = [], [], [], 0
            for part in parts:
                n = mtmd.mtmd_input_chunk_get_n_tokens(part)
                position, after = after, after + mtmd.mtmd_input_chunk_get_n_pos(part)
                if encoder.is_text(part):
                    count = ctypes.c_size_t()
                    tokens = mtmd.mtmd_input_chunk_get_tokens_text(part, ctypes.byref(count))[:n]
                    ids += tokens
                    logits = [peer.eval(tokens, position)]
                    continue
                values = encoder.rows(part)
                ids += [-1] * n
                rows.append(values)
                peer.set_causal(not mtmd.mtmd_decode_use_non_causal(encoder.context, part))
                positions = None
                if mtmd.mtmd_decode_use_mrope(encoder.context):
                    tokens = mtmd.mtmd_input_chunk_get_tokens_image(part)
                    columns = mtmd.mtmd_image_tokens_get_nx(tokens)
                    places = np.indices((n // columns, columns)).reshape(2, -1)
                    positions = np.stack([0 * places[0], *places, 0 * places[0]], -1) + np.array([position] * 3 + [0])
                peer.eval_embeddings(values, positions)
                peer.set_causal(True)
            mtmd.mtmd_input_chunks_free(owner)
            arrays[f"{name} {picture} ids"] = np.array(ids, np.int32)
            arrays[f"{name} {picture} rows"] = thinned(picture, np.concatenate(rows))
            arrays[f"{name} {picture} logits"] = np.concatenate(logits)
            print(name, picture, len(ids), len(arrays[f"{name} {picture} rows"]))
    return arrays


def main() -> None:
    """Record all cases, or those of the arguments."""
    arrays = dict(np.load(PATH)) if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or CASES:
            arrays |= record(Path(folder), name)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
