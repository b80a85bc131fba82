"""Record llama.cpp's hidden states and drafts of EAGLE-3 heads: `python -m oracle.heads`.

The functions that llama.cpp's own speculative decoding uses for this are not in its headers for programs.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tiny_variants
from oracle.goldens import DIRECTORY, TOKENS
from oracle.peer import Peer
from tiny_eagle import HEADS, MODELS

GOLDEN = DIRECTORY / "heads.npz"
N_TOKENS, N_CTX, N_DRAFT = 24, 128, 6
Rows = npt.NDArray[np.float32]

_SYMBOLS: dict[str, tuple[str, Any, list[Any]]] = {
    "set_layer": ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, [ctypes.c_uint32, ctypes.c_bool]),
    "layer": ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.POINTER(ctypes.c_float), [ctypes.c_uint32]),
    "set_state": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [ctypes.c_bool, ctypes.c_bool]),
    "state": ("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.POINTER(ctypes.c_float), []),
}


class Pair:
    """llama.cpp with a model and a draft head."""

    def __init__(self, model: Path, head: Path, layers: tuple[int, ...]):
        self.model, self.layers = Peer(model, N_CTX), layers
        self.head = Peer(head, N_CTX, other=self.model)
        self._api: Any = self.model._api
        library = self._api.llama_cpp._lib
        self._call = {}
        for name, (symbol, result, arguments) in _SYMBOLS.items():
            self._call[name] = function = getattr(library, symbol)
            function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
        n_layer = self._api.llama_model_n_layer(self.model._model)
        self._last = n_layer
        for layer in layers:
            if layer < n_layer:
                self._call["set_layer"](self.model._context, layer, True)
            else:
                self._call["set_state"](self.model._context, True, False)
        self._call["set_state"](self.head._context, True, True)

    def features(self, tokens: list[int]) -> Rows:
        """Inputs of the layers at tokens, side by side."""
        self.model.eval(tokens)
        context, shape = self.model._context, (len(tokens), self.model.n_embd)
        found = [
            self._call["layer"](context, i) if i < self._last else self._call["state"](context) for i in self.layers
        ]
        return np.concatenate([np.ctypeslib.as_array(rows, shape=shape) for rows in found], 1)

    def process(self, rows: Rows, ids: list[int] | None, start: int) -> tuple[Rows, Rows]:
        """Fuse rows without ids, or decode ids with states."""
        api, batch = self._api, self._api.llama_batch_ext_init(self.head._context)
        rows = np.ascontiguousarray(rows, np.float32)
        for i, row in enumerate(rows):
            given = api.llama_embd(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, len(row))
            if ids is None:
                at = api.llama_batch_ext_add_embd(batch, 0, given)
            else:
                at = api.llama_batch_ext_add_token(batch, 0, ids[i])
            api.llama_batch_ext_set_pos(batch, at, (ctypes.c_int32 * 1)(start + i))
            if ids is not None:
                api.llama_batch_ext_set_embd_token(batch, at, given)
            api.llama_batch_ext_set_output_logits(batch, at, True)
        if status := api.llama_process(self.head._context, int(ids is not None), batch):
            raise OSError(f"llama.cpp's head failed with status {status}")
        api.llama_batch_ext_free(batch)
        states = np.ctypeslib.as_array(self._call["state"](self.head._context), shape=(len(rows), self.head.n_embd))
        if ids is None:
            return states[:0].copy(), states.copy()
        logits: Any = ctypes.cast(api.llama_get_logits(self.head._context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, shape=(len(rows), self.head.n_vocab)).copy(), states.copy()


def record(model: Path, head: Path, layers: tuple[int, ...]) -> dict[str, npt.NDArray[np.generic]]:
    """Features and states of a text, the head's logits, and a draft."""
    pair, tokens = Pair(model, head, layers), TOKENS[:N_TOKENS].tolist()
    features = pair.features(tokens[:-1])
    _, states = pair.process(features, None, 0)
    logits, passed = pair.process(states, tokens[1:], 0)
    row, state, draft = logits[-1], passed[-1:], list[int]()
    while len(draft) < N_DRAFT:
        draft.append(int(row.argmax()))
        (row,), state = pair.process(state, draft[-1:], N_TOKENS - 2 + len(draft))
    return {"features": features, "states": states, "logits": logits, "passed": passed, "draft": np.array(draft)}


if __name__ == "__main__":
    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (variant, options) in MODELS.items():
            model = tiny_variants.write(Path(folder) / f"{name}-model.gguf", variant, dequantized=True, **options)
            write, head_options, _ = HEADS[name]
            head = write(Path(folder) / f"{name}.gguf", **head_options)
            found = record(model, head, head_options.get("layers", (0, 1, 2)))
            arrays |= {f"{name} {field}": array for field, array in found.items()}
    np.savez_compressed(GOLDEN, **arrays)
