"""Record llama.cpp's samplers on random logits: `python -m oracle.samplers`."""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tiny_variants
from llamacli.testing.vocabularies import HEAD, vocabulary, vocabulary_size
from oracle.goldens import DIRECTORY

GOLDEN = DIRECTORY / "samplers.json"
N_VOCAB = 80
HISTORY = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 3, 1, 4, 1, 5, 7, 70, 3, 1, 4, 1]
"""Tokens written before."""

Step = tuple[Any, ...]
CASES: dict[str, list[Step]] = {
    "temperature": [("temp", 0.7)],
    "dynamic temperature": [("temp_ext", 0.8, 0.5, 1.3)],
    "dynamic temperature from 0": [("temp_ext", 0.4, 0.6, 1.0)],
    "top-k": [("top_k", 17)],
    "top-p": [("top_p", 0.77)],
    "min-p": [("min_p", 0.13)],
    "typical-p": [("typical", 0.6)],
    "typical-p, steep": [("temp", 0.3), ("typical", 0.4)],
    "top-n-sigma": [("top_n_sigma", 1.3)],
    "xtc": [("xtc", 1.0, 0.04)],
    "xtc after top-k": [("top_k", 9), ("xtc", 1.0, 0.1)],
    "repetition": [("penalties", 12, 1.4, 0.0, 0.0)],
    "less than 1": [("penalties", 64, 0.8, 0.0, 0.0)],
    "all penalties": [("penalties", 64, 1.1, 0.3, -0.2)],
    "penalties after top-k": [("top_k", 25), ("penalties", 64, 1.3, 0.2, 0.1)],
    "dry": [("dry", 0.8, 1.75, 2, 64)],
    "dry of few": [("dry", 1.5, 1.2, 1, 9)],
    "dry after min-p": [("min_p", 0.02), ("dry", 2.0, 1.5, 1, 20)],
    "defaults": [("top_k", 40), ("typical", 1.0), ("top_p", 0.95), ("min_p", 0.05), ("temp_ext", 0.8, 0.0, 1.0)],
    "everything": [
        ("penalties", 64, 1.2, 0.1, 0.1),
        ("dry", 0.5, 1.75, 2, 64),
        ("top_n_sigma", 2.0),
        ("top_k", 30),
        ("typical", 0.95),
        ("top_p", 0.9),
        ("min_p", 0.02),
        ("temp_ext", 1.2, 0.3, 1.0),
    ],
    "mirostat": [("temp", 0.9), ("mirostat", 2.0, 0.1)],
    "mirostat, all": [("mirostat", 9.0, 0.1)],
    "mirostat 2": [("temp", 0.9), ("mirostat_v2", 2.0, 0.1)],
    "mirostat 2, one": [("mirostat_v2", 0.5, 0.1)],
    "adaptive-p": [("min_p", 0.02), ("adaptive_p", 0.3, 0.9)],
    "adaptive-p, rare": [("adaptive_p", 0.02, 0.5)],
}
"""Samplers in order, under llama.cpp's names, with its arguments but for seeds and what is always the same."""


INFILL = [
    (6.0, 0.0), (2.0, 0.0), (3.0, 0.0), (1.0, 0.0), (3.0, 12.0), (6.0, 20.0), (0.1, 8.0, 12.0), (0.3, 6.0, 12.0),
]  # fmt: skip
"""Of a vocabulary with words, standard deviations of logits, and what is added to those of the end and of `ALIKE`."""
ALIKE = ["▁o", "▁th", "▁the", "▁on"]
"""Words of which some begin with others."""


def infill_logits(number: int) -> np.ndarray:
    """float32 [n_vocab] for a case of `INFILL`."""
    deviation, end, *alike = INFILL[number]
    found = np.random.RandomState(100 + number).normal(0, deviation, vocabulary_size("spm"))
    found[len(HEAD) :] += 2 * deviation
    found[list(HEAD).index("</s>")] += end
    if alike:
        pieces = vocabulary("spm")["tokenizer.ggml.tokens"]
        found[[pieces.index(piece) for piece in ALIKE]] += alike[0]
    return found.astype(np.float32)


def logits(case: str) -> np.ndarray:
    """float32 [N_VOCAB], another row for each case."""
    return np.random.RandomState(list(CASES).index(case)).normal(0, 2, N_VOCAB).astype(np.float32)


def _made(kind: str, *args: Any) -> Any:
    import llama_cpp

    init = getattr(llama_cpp, f"llama_sampler_init_{kind}")
    match kind:
        case "top_p" | "min_p" | "typical":
            return init(*args, 0)
        case "xtc":
            return init(*args, 0, 1)
        case "penalties":
            return init(N_VOCAB, *args)
        case "dry":
            return init(None, *args, None, 0)
        case "mirostat":
            return init(N_VOCAB, 1, *args, 100)
        case "mirostat_v2":
            return init(1, *args)
        case "adaptive_p":
            return init(*args, 1)
    return init(*args)


def _left(given: np.ndarray, samplers: list[Any]) -> dict[str, list[Any]]:
    """Ids that samplers leave, and their probabilities."""
    import llama_cpp

    n = len(given)
    data = (llama_cpp.llama_token_data * n)(*((i, x, 0.0) for i, x in enumerate(given.tolist())))
    left = llama_cpp.llama_token_data_array(data, n, -1, False)
    for sampler in samplers:
        for token in HISTORY:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(left))
        llama_cpp.llama_sampler_free(sampler)
    found = {left.data[i].id: left.data[i].logit for i in range(left.size)}
    ids = sorted(token for token, logit in found.items() if logit > -np.inf)
    e = np.exp(np.array([found[token] for token in ids], np.float64))
    print(f"{len(ids)} left")
    return {"ids": ids, "p": [float(f"{p:.6g}") for p in e / e.sum()]}


def _record() -> None:
    import llama_cpp

    golden = {case: _left(logits(case), [_made(*step) for step in steps]) for case, steps in CASES.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_variants.write(Path(folder) / "model.gguf", "gqa", tokenizer="spm")
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(bytes(path), params)
        vocab = llama_cpp.llama_model_get_vocab(model)
        for number in range(len(INFILL)):
            samplers = [_made("top_k", 40), llama_cpp.llama_sampler_init_infill(vocab)]
            golden[f"infill {number}"] = _left(infill_logits(number), samplers)
        llama_cpp.llama_model_free(model)
    GOLDEN.write_text("{\n" + ",\n".join(f'"{case}": {json.dumps(value)}' for case, value in golden.items()) + "\n}\n")


if __name__ == "__main__":
    _record()
