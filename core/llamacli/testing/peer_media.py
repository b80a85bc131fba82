"""llama.cpp's mtmd through llama-cpp-python, as the reference of media encoders."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from llamacli.testing.models import write_model
from llamacli.testing.peer import Peer, errors_of_log, eval_callback, in_process, reason_of, write_arrays
from llamacli.testing.tiny_media import made
from llamacli.testing.vocabularies import vocabulary_size

Rows = npt.NDArray[np.float32]

_N_TRIALS = 20


class PeerEncoder:
    """mtmd with a mmproj file, for the model of a `Peer`.

    `on_tensor(address)` is called with the address of each `ggml_tensor` that has been computed. Raises OSError for a
    file that mtmd refuses.
    """

    def __init__(self, peer: Peer, mmproj: Path, *, threads: int = 2, on_tensor: Callable[[int], None] | None = None):
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.api: Any = mtmd_cpp
        errors = errors_of_log()
        errors.clear()
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup = False, threads, False
        params.flash_attn_type = 0
        if on_tensor is not None:
            self._callback = eval_callback(on_tensor)  # kept alive as long as the context
            params.cb_eval = self._callback
        self.context = mtmd_cpp.mtmd_init_from_file(str(mmproj).encode(), peer.model, params)
        if not self.context:
            raise OSError(f"mtmd refuses {mmproj}{reason_of(errors)}")
        self._width = llama_cpp.llama_model_n_embd_inp(peer.model)

    def chunks(self, medium: npt.NDArray[Any], before: str = "", after: str = "") -> tuple[Any, list[Any]]:
        """Chunks of the text around a picture or sound, and their owner.

        A picture is uint8 [height, width, 3], sound float32 [n].
        """
        if medium.ndim == 1:
            samples = (ctypes.c_float * len(medium)).from_buffer_copy(medium.tobytes())
            bitmap = self.api.mtmd_bitmap_init_from_audio(len(medium), samples)
        else:
            height, width = medium.shape[:2]
            data = (ctypes.c_uint8 * medium.size).from_buffer_copy(medium.tobytes())
            bitmap = self.api.mtmd_bitmap_init(width, height, data)
        text = f"{before}{self.api.mtmd_default_marker().decode()}{after}".encode()
        given = self.api.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
        owner = self.api.mtmd_input_chunks_init()
        bitmaps = (self.api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        status = self.api.mtmd_tokenize(self.context, owner, ctypes.byref(given), bitmaps, 1)
        self.api.mtmd_bitmap_free(bitmap)
        if status:
            raise OSError(f"mtmd does not divide a medium {list(medium.shape)}: status {status}")
        n = self.api.mtmd_input_chunks_size(owner)
        return owner, [self.api.mtmd_input_chunks_get(owner, i) for i in range(n)]

    def is_text(self, chunk: Any) -> bool:
        """True for a chunk of text."""
        return bool(self.api.mtmd_input_chunk_get_type(chunk) == 0)

    def rows(self, chunk: Any) -> Rows:
        """Embeddings of a chunk of a picture or sound, float32 [n, width].

        Pixtral's breaks begin as uninitialized memory times 0, which may not be finite: then it is encoded again.
        """
        shape = (self.api.mtmd_input_chunk_get_n_tokens(chunk), self._width)
        for _ in range(_N_TRIALS):
            if status := self.api.mtmd_encode_chunk(self.context, chunk):
                raise OSError(f"mtmd does not encode a medium: status {status}")
            output = ctypes.cast(self.api.mtmd_get_output_embd(self.context), ctypes.POINTER(ctypes.c_float))
            values: Rows = np.ctypeslib.as_array(output, shape).copy()
            if np.isfinite(values).all():
                return values
        raise OSError("mtmd's embeddings are not finite")

    def encode(self, medium: npt.NDArray[Any]) -> Rows:
        """Embeddings of all tiles of a picture or sound, float32 [n, width]."""
        owner, parts = self.chunks(medium)
        rows = [self.rows(part) for part in parts if not self.is_text(part)]
        self.api.mtmd_input_chunks_free(owner)
        return np.concatenate(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.api.mtmd_free(self.context)


def write_reader(path: Path, n_embd: int) -> Path:
    """Write a language model whose embeddings have `n_embd` numbers.

    llama.cpp encodes no picture without one.
    """
    n_ff, n_vocab = 32, vocabulary_size("spm")
    keys = {
        "embedding_length": n_embd, "context_length": 256, "block_count": 1, "feed_forward_length": n_ff,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": n_embd,
    }  # fmt: skip
    shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    shapes |= {f"blk.0.{name}.weight": (n_embd, n_embd) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{name}_norm.weight": (n_embd,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.ffn_{name}.weight": (n_ff, n_embd) for name in ("gate", "up")}
    shapes |= {"blk.0.ffn_down.weight": (n_embd, n_ff)}
    prefixed = {f"llama.{key}": value for key, value in keys.items()}
    return write_model(path, "llama", prefixed, shapes, tokenizer="spm", seed="reader")


def run_peer_encoder(model: Path, mmproj: Path, sizes: Mapping[str, tuple[int, int] | float]) -> dict[str, Rows]:
    """Embeddings of media by mtmd, in a process of its own.

    They are those that `made` makes of sizes, by name.
    `model` is a language model with embeddings as wide as the encoder's. Raises ImportError without llama-cpp-python,
    OSError with the reason for a file that mtmd refuses.
    """
    return in_process("llamacli.testing.peer_media", [str(model), str(mmproj), dict(sizes)])


def _run(model: str, mmproj: str, sizes: dict[str, list[int] | float]) -> dict[str, Rows]:
    with Peer(Path(model), 256) as peer, PeerEncoder(peer, Path(mmproj)) as encoder:
        return {name: encoder.encode(made(size)) for name, size in sizes.items()}


if __name__ == "__main__":
    _out, _given = json.load(sys.stdin)
    write_arrays(_out, _run(*_given))
