"""Run a GGUF file through llama.cpp: `python -m oracle.peer MODEL OUT.npz --tokens 1 5 9 --greedy 20`.

OUT.npz gets the result of `run`. The keys and values are kept in float32 and flash attention is off, so that a float32
file gives llama.cpp's most exact numbers.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np
import numpy.typing as npt

_GGML_TYPE_F32 = 0
_BATCH = 512


class Peer:
    """llama.cpp with one model and one context.

    With `default_precision`, KV cache and attention have llama.cpp's default types.
    """

    def __init__(self, path: Path, n_ctx: int, *, default_precision: bool = False):
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False  # repacking for AMX ends in SIGILL where a hypervisor forbids AMX
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise SystemExit(f"the peer refuses {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, min(n_ctx, _BATCH), min(n_ctx, _BATCH)
        params.n_threads = params.n_threads_batch = 2
        if not default_precision:
            params.type_k = params.type_v = _GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.bos = llama_cpp.llama_vocab_bos(self._vocabulary)
        self.add_bos = llama_cpp.llama_vocab_get_add_bos(self._vocabulary)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self._n_past = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS if the model expects it."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 2))()
        n = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), True, False)
        return list(ids[:n])

    def clear(self) -> None:
        """Clear the context."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._n_past = 0

    def eval(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Evaluate further tokens; float32 [len(tokens), n_vocab] logits."""
        return np.concatenate([self._decode(tokens[i : i + _BATCH]) for i in range(0, len(tokens), _BATCH)])

    def _decode(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        n = len(tokens)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), self._n_past + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise SystemExit(f"the peer's decode failed with status {status}")
        self._n_past += n
        logits: Any = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, shape=(n, self.n_vocab)).copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def run(path: Path, tokens: Sequence[int], n_prompt: int, n_greedy: int, n_ctx: int) -> dict[str, npt.NDArray[Any]]:
    """Run a file on `tokens`, then decode greedily after `n_prompt` of them.

    Some models compute otherwise in a long context than in a short one, whatever the number of tokens. Returns `logits`
    float32 [len(tokens), n_vocab], `greedy` int32 [n_greedy], and `gaps` float32 [n_greedy], by how much the logit of
    each was larger than the next best. Without tokens the prompt is BOS.
    """
    with Peer(path, n_ctx) as peer:
        tokens = tokens if len(tokens) else [peer.bos]
        logits = peer.eval(tokens)
    greedy, gaps = [], []
    with Peer(path, n_ctx) as peer:
        row = peer.eval(tokens[: n_prompt or len(tokens)])[-1]
        for _ in range(n_greedy):
            second, first = np.sort(row)[-2:]
            greedy.append(int(row.argmax()))
            gaps.append(first - second)
            row = peer.eval(greedy[-1:])[-1]
    return {"logits": logits, "greedy": np.array(greedy, np.int32), "gaps": np.array(gaps, np.float32)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[], help="token ids; none is BOS")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of these that greedy decoding follows; 0 is all")
    parser.add_argument("--greedy", type=int, default=0, help="tokens to decode greedily")
    parser.add_argument("--context", type=int, default=256, help="length of the context; default: 256")
    options = parser.parse_args()
    np.savez(options.out, **run(options.model, options.tokens, options.prompt, options.greedy, options.context))
