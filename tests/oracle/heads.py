"""Record llama.cpp's hidden states and drafts of draft heads: `python -m oracle.heads [NAME ...]`.

The functions that llama.cpp's own speculative decoding uses for this are not in its headers for programs.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tiny_variants
from oracle.goldens import DIRECTORY, TOKENS
from oracle.peer import Peer
from tiny_dflash import HEADS as BLOCK_HEADS
from tiny_dflash import LAYERS
from tiny_eagle import HEADS, MODELS
from tiny_gemma import CACHE_HEADS
from tiny_gemma import MODELS as CACHE_MODELS

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
        n_layer = self._api.llama_model_n_layer(self.model.model)
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

    def inject(self, features: Rows) -> None:
        """Cache keys and values of the states of a text."""
        self.process(features, None, 0, injects=True)

    def block(self, ids: list[int], start: int, *, causal: bool) -> Rows:
        """Logits of a block of tokens without states."""
        self._api.llama_set_causal_attn(self.head._context, causal)
        return self.process(np.empty((len(ids), 0), np.float32), ids, start)[0]

    def lattice(self, ids: list[int], start: int, *, causal: bool) -> tuple[Rows, Rows]:
        """Logits of a block, and a selector's scores, [n, n_embd]."""
        self._call["set_state"](self.head._context, True, False)
        logits = self.block(ids, start, causal=causal)
        shape = len(ids), self.head.n_embd
        return logits, np.ctypeslib.as_array(self._call["state"](self.head._context), shape=shape).copy()

    def process(self, rows: Rows, ids: list[int] | None, start: int, *, injects: bool = False) -> tuple[Rows, Rows]:
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
            if ids is not None and rows.size:
                api.llama_batch_ext_set_embd_token(batch, at, given)
            api.llama_batch_ext_set_output_logits(batch, at, not injects)
        if status := api.llama_process(self.head._context, int(injects or ids is not None), batch):
            raise OSError(f"llama.cpp's head failed with status {status}")
        api.llama_batch_ext_free(batch)
        if injects:
            return rows[:0], rows[:0]
        if not rows.size:
            logits: Any = ctypes.cast(api.llama_get_logits(self.head._context), ctypes.POINTER(ctypes.c_float))
            return np.ctypeslib.as_array(logits, shape=(len(rows), self.head.n_vocab)).copy(), rows
        shape = len(rows), rows.shape[1] if ids else self.head.n_embd
        states = np.ctypeslib.as_array(self._call["state"](self.head._context), shape=shape)
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


def record_block(model: Path, head: Path, options: dict[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
    """Features and states of a text, and a block that follows."""
    pair, tokens = Pair(model, head, LAYERS), TOKENS[:N_TOKENS].tolist()
    features = pair.features(tokens[:-1])
    _, states = pair.process(features, None, 0)
    pair.inject(features)
    keys, mask = options["keys"], options["metadata"]["tokenizer.ggml.mask_token_id"]
    ids = [tokens[-1], *[mask] * (keys["block_size"] - 1)]
    causal = keys.get("attention.causal", False)
    if n := keys.get("selector_top_k"):
        logits, lattice = pair.lattice(ids, N_TOKENS - 1, causal=causal)
        draft, at = list[int](), 0
        for row in lattice[1:]:
            at = int(row[n : n + n * n].reshape(n, n)[at].argmax())
            draft.append(int(row[at]))
        found = {"lattice": lattice[:, : n + n * n], "draft": np.array(draft)}
        return {"features": features, "states": states, "logits": logits} | found
    logits = pair.block(ids, N_TOKENS - 1, causal=causal)
    is_markov = "markov_w1.weight" in options.get("tensors", {})
    first = 0 if is_markov and keys.get("sample_from_anchor", True) else 1
    return {"features": features, "states": states, "logits": logits, "draft": logits[first:].argmax(1)}


def record_cached(model: Path, head: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Hidden states of a text, and a draft from its cache."""
    pair, tokens = Pair(model, head, (1 << 30,)), TOKENS[:N_TOKENS].tolist()
    states = pair.features(tokens[:-1])
    state, draft, rows, passed = states[-1:], tokens[-1:], [], []
    while len(draft) <= N_DRAFT:
        logits, state = pair.process(state, draft[-1:], N_TOKENS - 1)
        rows.append(logits[0])
        passed.append(state[0])
        draft.append(int(rows[-1].argmax()))
    return {"states": states, "logits": np.array(rows), "passed": np.array(passed), "draft": np.array(draft[1:])}


if __name__ == "__main__":
    with np.load(GOLDEN) as golden:
        arrays = dict(golden)
    with tempfile.TemporaryDirectory() as folder:
        for name, (write, head_options, _) in (HEADS | BLOCK_HEADS | CACHE_HEADS).items():
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            variant, options = MODELS.get(
                name, (CACHE_MODELS[name], {}) if name in CACHE_HEADS else ("gqa", {"n_layer": 3})
            )
            model = tiny_variants.write(Path(folder) / f"{name}-model.gguf", variant, dequantized=True, **options)
            head = write(Path(folder) / f"{name}.gguf", **head_options)
            if name in HEADS:
                found = record(model, head, head_options.get("layers", (0, 1, 2)))
            elif name in CACHE_HEADS:
                found = record_cached(model, head)
            else:
                found = record_block(model, head, head_options)
            arrays |= {f"{name} {field}": array for field, array in found.items()}
    np.savez_compressed(GOLDEN, **arrays)
