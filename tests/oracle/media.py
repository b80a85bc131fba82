"""Record llama.cpp's embeddings of media, and logits around them: `python -m oracle.media [CASE ...]`.

See `media_cases` and `sound_cases`. Each case is recorded with float32 weights: the ids and rows of a text with a
picture or sound in it, as mtmd divides and encodes them, and the logits of its tokens behind it.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llamacli.testing.peer import Peer
from llamacli.testing.peer_media import PeerEncoder
from llamacli.testing.tiny_media import drawn
from media_cases import CASES, THINNED, write_mmproj, write_text
from oracle.goldens import DIRECTORY, sha256
from sound_cases import PEER_CASES, PEER_SOUNDS, write_hearing

PATH = DIRECTORY / "media.npz"
N_CTX = 1024
BEFORE, AFTER = "Look: ", " What is it?"


def thinned(medium: str, rows: np.ndarray) -> np.ndarray:
    """Rows of a picture or sound that its golden has."""
    return rows[::THINNED] if medium.startswith(("large", "long")) else rows


def record(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Arrays of a case: ids (-1 for rows), rows, logits."""
    media: Mapping[str, np.ndarray]
    if name in PEER_CASES:
        text, mmproj, media = write_hearing(folder, name), folder / "mmproj-text.gguf", PEER_SOUNDS
    else:
        text, mmproj = write_text(folder / "text.gguf", name), write_mmproj(folder / "mmproj.gguf", name)
        media = {picture: drawn(*size) for picture, size in CASES[name].pictures.items()}
    arrays = {f"{name} sha256": np.array(sha256(mmproj)), f"{name} text sha256": np.array(sha256(text))}
    with Peer(text, N_CTX) as peer, PeerEncoder(peer, mmproj) as encoder:
        for medium, content in media.items():
            ids, rows, logits = evaluated(peer, encoder, content)
            arrays[f"{name} {medium} ids"] = np.array(ids, np.int32)
            arrays[f"{name} {medium} rows"] = thinned(medium, rows)
            arrays[f"{name} {medium} logits"] = logits
            print(name, medium, len(ids), len(arrays[f"{name} {medium} rows"]))
    return arrays


def evaluated(peer: Peer, encoder: PeerEncoder, medium: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Ids (-1 for rows), rows, and logits behind a medium."""
    mtmd, after = encoder.api, 0
    peer.clear()
    owner, parts = encoder.chunks(medium, BEFORE, AFTER)
    ids, rows, logits = list[int](), [], np.empty(0)
    for part in parts:
        n = mtmd.mtmd_input_chunk_get_n_tokens(part)
        position, after = after, after + mtmd.mtmd_input_chunk_get_n_pos(part)
        if encoder.is_text(part):
            count = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(part, ctypes.byref(count))[:n]
            ids += tokens
            logits = peer.eval(tokens, position)
            continue
        values = encoder.rows(part)
        ids += [-1] * n
        rows.append(values)
        peer.set_causal(not mtmd.mtmd_decode_use_non_causal(encoder.context, part))
        positions = None
        tokens = mtmd.mtmd_input_chunk_get_tokens_image(part)
        if tokens and mtmd.mtmd_decode_use_mrope(encoder.context):
            columns = mtmd.mtmd_image_tokens_get_nx(tokens)
            places = np.indices((n // columns, columns)).reshape(2, -1)
            positions = np.stack([0 * places[0], *places, 0 * places[0]], -1) + np.array([position] * 3 + [0])
        peer.eval_embeddings(values, positions)
        peer.set_causal(True)
    mtmd.mtmd_input_chunks_free(owner)
    return ids, np.concatenate(rows), logits


def main() -> None:
    """Record all cases, or those of the arguments."""
    arrays = dict(np.load(PATH)) if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or [*CASES, *PEER_CASES]:
            arrays |= record(Path(folder), name)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
