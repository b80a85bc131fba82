"""Record llama.cpp's samplers on random logits: `python -m oracle.samplers`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

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


def _record() -> None:
    import ctypes

    import llama_cpp

    golden = {}
    for case, steps in CASES.items():
        data = (llama_cpp.llama_token_data * N_VOCAB)(*((i, x, 0.0) for i, x in enumerate(logits(case).tolist())))
        left = llama_cpp.llama_token_data_array(data, N_VOCAB, -1, False)
        for step in steps:
            sampler = _made(*step)
            for token in HISTORY:
                llama_cpp.llama_sampler_accept(sampler, token)
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(left))
            llama_cpp.llama_sampler_free(sampler)
        found = {left.data[i].id: left.data[i].logit for i in range(left.size)}
        ids = sorted(token for token, logit in found.items() if logit > -np.inf)
        e = np.exp(np.array([found[token] for token in ids], np.float64))
        golden[case] = {"ids": ids, "p": [float(f"{p:.6g}") for p in e / e.sum()]}
        print(f"{case}: {len(ids)} left")
    GOLDEN.write_text("{\n" + ",\n".join(f'"{case}": {json.dumps(value)}' for case, value in golden.items()) + "\n}\n")


if __name__ == "__main__":
    _record()
