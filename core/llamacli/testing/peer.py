"""llama.cpp through llama-cpp-python, as the reference of results.

llama-cpp-python is not a dependency: whoever compares with it installs it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_GGML_TYPE_F32 = 0
_GGML_LOG_LEVEL_ERROR = 4
_BATCH = 512

Logits = npt.NDArray[np.float32]


class Peer:
    """llama.cpp with one model and one context.

    The keys and values are kept in float32 and flash attention is off, so that a float32 file gives its most exact
    numbers; with `default_precision` they have llama.cpp's default types. With `embeddings`, rows are hidden states
    instead of logits. `on_tensor(address)` is called with the address of each `ggml_tensor` that has been computed.
    The file of a draft head needs its model, as `other`.
    Raises ImportError without llama-cpp-python, OSError for a file that llama.cpp refuses.
    """

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        *,
        default_precision: bool = False,
        embeddings: bool = False,
        on_tensor: Callable[[int], None] | None = None,
        other: Peer | None = None,
    ):
        import llama_cpp

        self._api: Any = llama_cpp
        errors = errors_of_log()
        errors.clear()
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False  # repacking for AMX ends in SIGILL where a hypervisor forbids AMX
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise OSError(f"llama.cpp refuses {path}{reason_of(errors)}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, min(n_ctx, _BATCH), min(n_ctx, _BATCH)
        params.n_threads = params.n_threads_batch = 2
        if not default_precision:
            params.type_k = params.type_v = _GGML_TYPE_F32
            # Blocks of cells are chosen with flash attention only; else all are read.
            flash = self._has_key("attention.indexer.block_size")
            kinds = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            params.flash_attn_type = kinds[flash]
        self._embeddings = embeddings
        if embeddings:
            params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_NONE
        if on_tensor is not None:
            self._callback = eval_callback(on_tensor)  # kept alive as long as the context
            params.cb_eval = self._callback
        if other is not None:
            params.ctx_other = other._context
        self._context: Any = llama_cpp.llama_init_from_model(self.model, params)
        if not self._context:
            raise OSError(f"llama.cpp has no context for {path}{reason_of(errors)}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.bos = llama_cpp.llama_vocab_bos(self._vocabulary)
        self.add_bos = llama_cpp.llama_vocab_get_add_bos(self._vocabulary)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self.n_embd = llama_cpp.llama_model_n_embd(self.model)
        self._has_encoder = llama_cpp.llama_model_has_encoder(self.model)
        mrope = llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE
        self._n_components = 4 if llama_cpp.llama_model_rope_type(self.model) in mrope else 1
        self._n_past = 0

    def _has_key(self, name: str) -> bool:
        """True if the file has this key of its architecture."""
        api, buffer = self._api, ctypes.create_string_buffer(256)
        api.llama_model_meta_val_str(self.model, b"general.architecture", buffer, len(buffer))
        key = buffer.value + b"." + name.encode()
        return bool(api.llama_model_meta_val_str(self.model, key, buffer, len(buffer)) >= 0)

    def set_adapters(self, adapters: Sequence[tuple[Path, float]]) -> None:
        """Set LoRA adapters with their scales; OSError for a refused file."""
        api, n = self._api, len(adapters)
        loaded = [api.llama_adapter_lora_init(self.model, str(path).encode()) for path, _ in adapters]
        if not all(loaded):
            raise OSError(f"llama.cpp refuses an adapter of {', '.join(str(path) for path, _ in adapters)}")
        pointers = (api.llama_adapter_lora_p_ctypes * n)(*loaded)
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        if api.llama_set_adapters_lora(self._context, pointers, n, scales):
            raise OSError("llama.cpp cannot set the adapters")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS if the model expects it."""
        data = text.encode()
        ids = (self._api.llama_token * (len(data) + 2))()
        n = self._api.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), True, False)
        return list(ids[:n])

    def clear(self) -> None:
        """Clear the context."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._n_past = 0

    def eval(self, tokens: Sequence[int], position: int | None = None) -> Logits:
        """Evaluate further tokens.

        Their positions begin with `position`, by default with the one behind the tokens before. Returns float32
        [len(tokens), n_vocab] logits, or hidden states [len(tokens), n_embd].
        """
        self._n_past = self._n_past if position is None else position
        return np.concatenate([self._decode(tokens[i : i + _BATCH]) for i in range(0, len(tokens), _BATCH)])

    def begin(self, text: Sequence[int]) -> None:
        """Evaluate the encoder's text and the decoder's first token, if any."""
        if self._has_encoder and not self._embeddings:
            self._run(self._batch(text), len(text), encodes=True)
            self._n_past = 0
            self.eval([self._api.llama_model_decoder_start_token(self.model)])

    def set_causal(self, causal: bool) -> None:
        """Set causal attention, or attention in both directions."""
        self._api.llama_set_causal_attn(self._context, causal)

    def eval_embeddings(self, rows: Logits, positions: npt.NDArray[np.int32] | None) -> Logits:
        """Evaluate rows of embeddings, float32 [n, n_embd]; float32 [n, n_vocab] logits.

        `positions`, int32 [n, 4], are their positions for M-RoPE; by default they are consecutive.
        """
        n, n_components = len(rows), self._n_components
        if positions is None:
            text = np.arange(self._n_past, self._n_past + n)[:, None]
            positions = (text * ([1] if n_components == 1 else [1, 1, 1, 0])).astype(np.int32)
        batch = self._api.llama_batch_init(n * n_components, rows.shape[1], 1)
        values, numbers = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(positions.T, np.int32)
        ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
        ctypes.memmove(batch.pos, numbers.ctypes.data, numbers.nbytes)
        return self._run(batch, n)

    def greedy(self, tokens: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """Evaluate tokens, then decode n greedily.

        Returns their ids, and by how much the logit of each was larger than the next best.
        """
        ids, gaps, row = [], [], self.eval(tokens)[-1]
        for _ in range(n):
            second, first = np.sort(row)[-2:]
            ids.append(int(row.argmax()))
            gaps.append(float(first - second))
            row = self.eval(ids[-1:])[-1]
        return ids, gaps

    def _decode(self, tokens: Sequence[int]) -> Logits:
        return self._run(self._batch(tokens), len(tokens), encodes=self._has_encoder and self._embeddings)

    def _batch(self, tokens: Sequence[int]) -> Any:
        batch = self._api.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), self._n_past + i
        return batch

    def _run(self, batch: Any, n: int, *, encodes: bool = False) -> Logits:
        api, batch.n_tokens = self._api, n
        for i in range(n):
            batch.logits[i], batch.n_seq_id[i], batch.seq_id[i][0] = 1, 1, 0
        status = (api.llama_encode if encodes else api.llama_decode)(self._context, batch)
        api.llama_batch_free(batch)
        if status:
            raise OSError(f"decoding of llama.cpp failed with status {status}")
        self._n_past += n
        if self._embeddings:
            width = api.llama_model_n_embd(self.model)
            return np.array([api.llama_get_embeddings_ith(self._context, i)[:width] for i in range(n)], np.float32)
        logits: Any = ctypes.cast(api.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, shape=(n, self.n_vocab)).copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self.model)


def reason_of(errors: list[str]) -> str:
    """End of an error's text: what llama.cpp's log says."""
    return f": {'; '.join(errors)}" if errors else ""


@functools.cache
def errors_of_log() -> list[str]:
    """Errors in llama.cpp's log, a list that grows; the rest is dropped."""
    import llama_cpp
    from llama_cpp import mtmd_cpp

    errors: list[str] = []

    def on_line(level: int, text: bytes, _data: object) -> None:
        if level == _GGML_LOG_LEVEL_ERROR:
            errors.append(text.decode(errors="replace").strip())

    _callbacks.append(llama_cpp.llama_log_callback(on_line))
    llama_cpp.llama_log_set(_callbacks[-1], None)
    mtmd_cpp.mtmd_log_set(_callbacks[-1], None)
    mtmd_cpp.mtmd_helper_log_set(_callbacks[-1], None)
    return errors


_callbacks: list[Any] = []
"""Callbacks that llama.cpp keeps by address, so that they must live on."""


def eval_callback(on_tensor: Callable[[int], None]) -> Any:
    """C callback that calls `on_tensor` with the address of each computed tensor."""
    import llama_cpp

    def call(tensor: int, ask: bool, _data: object) -> bool:
        if not ask:
            on_tensor(tensor)
        return True

    return llama_cpp.ggml_backend_sched_eval_callback(call)


def run_peer(
    path: Path,
    tokens: Sequence[int],
    n_prompt: int,
    n_greedy: int,
    *,
    embeddings: bool = False,
    encoded: Sequence[int] = (),
) -> tuple[Logits, list[int], list[float]]:
    """Run llama.cpp in a process of its own.

    An assertion of llama.cpp ends that process alone. Returns the rows of `tokens`, then what `Peer.greedy` returns for
    the first `n_prompt` of them. In a model with an encoder they follow the text `encoded`. Raises ImportError
    without llama-cpp-python, OSError with llama.cpp's reason for a file that it refuses, or where it ends.
    """
    given = [str(path), list(tokens), n_prompt, n_greedy, embeddings, list(encoded)]
    found = in_process("llamacli.testing.peer", given)
    return found["rows"], found["ids"].tolist(), found["gaps"].tolist()


def in_process(module: str, given: object) -> dict[str, npt.NDArray[Any]]:
    """Arrays that `python -m module` writes, of a file's name and JSON on stdin.

    Raises ImportError without llama-cpp-python, OSError with llama.cpp's reason if the process fails.
    """
    if find_spec("llama_cpp") is None:
        raise ImportError("No module named 'llama_cpp': pip install llama-cpp-python")
    with tempfile.TemporaryDirectory(prefix="llamacli-peer-") as folder:
        out = Path(folder) / "rows.npz"
        environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps([str(out), given]), env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
            reason = (asserted or lines[-1:] or ["without a message"])[0].removeprefix("OSError: ")
            ended = "" if done.returncode > 0 else f"llama.cpp ended by signal {-done.returncode}: "
            raise OSError(f"{ended}{reason}")
        with np.load(out) as found:
            return dict(found)


def write_arrays(path: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays that `in_process` returns."""
    np.savez(path, **dict[str, Any](arrays))


def _run(
    path: str, tokens: list[int], n_prompt: int, n_greedy: int, embeddings: bool, encoded: list[int]
) -> dict[str, npt.NDArray[Any]]:
    with Peer(Path(path), 256, embeddings=embeddings) as peer:
        peer.begin(encoded)
        rows, ids, gaps = peer.eval(tokens), list[int](), list[float]()
        if n_greedy:
            peer.clear()
            peer.begin(encoded)
            ids, gaps = peer.greedy(tokens[:n_prompt], n_greedy)
    return {"rows": rows, "ids": np.array(ids, np.int64), "gaps": np.array(gaps)}


if __name__ == "__main__":
    _out, _given = json.load(sys.stdin)
    write_arrays(_out, _run(*_given))
