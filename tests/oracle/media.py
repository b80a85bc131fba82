"""Record llama.cpp's embeddings of pictures, and logits around them: `python -m oracle.media [CASE ...]`.

See `media_cases`. Each case is recorded with float32 weights: the ids and rows of a text with a picture in it, as
mtmd divides and encodes them, and the logits of its tokens behind the picture.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.peer import Peer
from media_cases import CASES, THINNED, drawn, write_mmproj, write_text
from oracle.goldens import DIRECTORY, sha256

PATH = DIRECTORY / "media.npz"
N_CTX = 1024
BEFORE, AFTER = "Look: ", " What is it?"


def chunks(mtmd: Any, context: Any, picture: np.ndarray) -> tuple[Any, list[Any]]:
    """Chunks of the text around a picture, and their owner."""
    height, width = picture.shape[:2]
    data = (ctypes.c_uint8 * picture.size).from_buffer_copy(picture.tobytes())
    bitmap = mtmd.mtmd_bitmap_init(width, height, data)
    text = f"{BEFORE}{mtmd.mtmd_default_marker().decode()}{AFTER}".encode()
    given = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
    owner = mtmd.mtmd_input_chunks_init()
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    if mtmd.mtmd_tokenize(context, owner, ctypes.byref(given), bitmaps, 1):
        raise SystemExit("the peer does not divide the text")
    return owner, [mtmd.mtmd_input_chunks_get(owner, i) for i in range(mtmd.mtmd_input_chunks_size(owner))]


def encoded(mtmd: Any, context: Any, part: Any, shape: tuple[int, int]) -> np.ndarray:
    """Rows of a picture.

    Pixtral's breaks begin as uninitialized memory times 0 in the peer, which may not be finite: then it encodes again.
    """
    for _ in range(20):
        if mtmd.mtmd_encode_chunk(context, part):
            raise SystemExit("the peer does not encode the picture")
        output = ctypes.cast(mtmd.mtmd_get_output_embd(context), ctypes.POINTER(ctypes.c_float))
        values = np.ctypeslib.as_array(output, shape).copy()
        if np.isfinite(values).all():
            return values
    raise SystemExit("the peer's rows are not finite")


def thinned(picture: str, rows: np.ndarray) -> np.ndarray:
    """Rows of a picture that its golden has."""
    return rows[::THINNED] if picture.startswith("large") else rows


def record(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Arrays of a case: ids (-1 for rows), rows, logits."""
    import llama_cpp
    from llama_cpp import mtmd_cpp as mtmd

    text, mmproj = write_text(folder / "text.gguf", name), write_mmproj(folder / "mmproj.gguf", name)
    arrays = {f"{name} sha256": np.array(sha256(mmproj)), f"{name} text sha256": np.array(sha256(text))}
    with Peer(text, N_CTX) as peer:
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup = False, 2, False
        params.flash_attn_type = 0
        context = mtmd.mtmd_init_from_file(str(mmproj).encode(), peer._model, params)
        if not context:
            raise SystemExit(f"the peer refuses {mmproj}")
        for picture, size in CASES[name].pictures.items():
            peer.clear()
            owner, parts = chunks(mtmd, context, drawn(*size))
            ids, rows, logits, after = [], [], [], 0
            for part in parts:
                n = mtmd.mtmd_input_chunk_get_n_tokens(part)
                position, after = after, after + mtmd.mtmd_input_chunk_get_n_pos(part)
                if mtmd.mtmd_input_chunk_get_type(part) == 0:
                    count = ctypes.c_size_t()
                    tokens = mtmd.mtmd_input_chunk_get_tokens_text(part, ctypes.byref(count))[:n]
                    ids += tokens
                    logits = [peer.eval(tokens, position)]
                    continue
                values = encoded(mtmd, context, part, (n, llama_cpp.llama_model_n_embd_inp(peer._model)))
                ids += [-1] * n
                rows.append(values)
                peer.set_causal(not mtmd.mtmd_decode_use_non_causal(context, part))
                positions = None
                if mtmd.mtmd_decode_use_mrope(context):
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
        mtmd.mtmd_free(context)
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
