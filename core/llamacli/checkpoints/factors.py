"""Frequency factors of RoPE that are computed from config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from llamacli.checkpoints.keys import rope_of
from llamacli.checkpoints.layout import Settings

Factors = Mapping[str, npt.NDArray[np.float32]]


def n_blocks(settings: Settings) -> int:
    """Number of blocks, with those for multi-token prediction."""
    return int(settings["num_hidden_layers"] + (settings.get("num_nextn_predict_layers") or 0))


def head_dim(settings: Settings) -> int:
    """Width of a head, by default a share of the hidden size."""
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def wavelength_factors(kind: str, factor: float = 8.0) -> Callable[[Settings], Factors]:
    """Factors of RoPE scaling by wavelength, float32 [head_dim / 2].

    The function is an `extra` of a Checkpoint,
    for a `rope_type` of this kind; `factor` is that of slow frequencies where
    config.json has none.
    """

    def factors(settings: Settings) -> Factors:
        rope = rope_of(settings)
        if str(rope.get("rope_type", "")).lower() != kind:
            return {}
        dim, base = head_dim(settings), rope.get("rope_theta", 10000.0)
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        frequencies = np.float32(1) / np.power(np.float32(base), exponents, dtype=np.float32)
        slowest, n_old = rope.get("factor", factor), rope.get("original_max_position_embeddings", 8192)
        low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)

        def scale(frequency: float) -> float:
            wavelength = np.float32(2 * math.pi) / np.float32(frequency)
            if wavelength < n_old / high:
                return 1.0
            if wavelength > n_old / low:
                return float(slowest)
            smooth = (np.float32(n_old) / wavelength - np.float32(low)) / np.float32(high - low)
            return float(1 / ((1 - smooth) / np.float32(slowest) + smooth))

        return {"rope_freqs.weight": np.array([scale(x) for x in frequencies], np.float32)}

    return factors
