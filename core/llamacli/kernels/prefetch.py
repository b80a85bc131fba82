"""Prefetch distance of matrix products that memory alone bounds.

Processors differ: on Zen 4, 1 KiB is a third faster than 8 KiB for K-quants, on Zen 5 a third slower. The distance is a
number of a run, so kernels are compiled once for all of them, and the results have the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.errors import LlamaCliError
from llamacli.kernels.cpu import host
from llamacli.kernels.isa import isa
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import AHEAD, LINEAR
from llamacli.kernels.linear import streaming
from llamacli.kernels.team import Team, run_kernel
from llamacli.util.files import make_own_folder, read_json, replacing
from llamacli.util.folders import cache_folder

DISTANCES = (1024, 2048, 4096, AHEAD)
"""Bytes of weights."""

_OF_CPU = {"znver4": 1024, "znver5": 8192}
"""Distance by LLVM's name of the CPU, as benchmarks/kernels.py found it."""

_FILE = "prefetch.json"
_TRIAL_BYTES = 12 << 20
"""Weights of a run in a trial, which takes 24 of them: 12 parts are read before."""
_TURNS = 3
_GAIN = 0.95
"""Share of the default's time from which on another distance is taken; less is noise."""


def prefetch_distance(team: Team, steps: Iterable[tuple[Kernel, np.ndarray[Any, Any]]]) -> int:
    """Bytes of weights to prefetch ahead on this CPU.

    On a CPU that nothing is known of, parts of the largest product that the distance matters to are tried; `steps` are
    kernels with their parameters.
    """
    return known_distance() or _tried_by(team, steps)


def known_distance() -> int | None:
    """Bytes to prefetch ahead, of the table or an earlier trial.

    None for a CPU that nothing is known of.
    """
    return _OF_CPU.get(host()[1]) or _kept(cache_folder()).get(_key())


def tried_distance(measure: Callable[[int], float]) -> int:
    """Bytes of weights to prefetch ahead, by a trial.

    `measure` gives the seconds of a product with a distance. The choice is kept in prefetch.json in the cache folder; a
    wrong one, on a busy machine, costs speed alone.
    """
    chosen, folder = _fastest(measure), cache_folder()
    with contextlib.suppress(LlamaCliError, OSError):
        if folder:
            make_own_folder(folder)
            with replacing(folder / _FILE, overwrite=True) as file:
                file.write(json.dumps(_kept(folder) | {_key(): chosen}).encode())
    return chosen


def _tried_by(team: Team, steps: Iterable[tuple[Kernel, np.ndarray[Any, Any]]]) -> int:
    products = [(kernel, params[0]) for kernel, params in steps if kernel in streaming() and not params["starts"]]
    large = [product for product in products if _n_bytes(product[1]) >= 2 * _TRIAL_BYTES]
    if not large:
        return AHEAD
    kernel, largest = max(large, key=lambda product: _n_bytes(product[1]))
    part: dict[str, Any] = dict(zip(LINEAR.names or (), largest.tolist(), strict=True)) | {"n_groups": 1}
    part["n_tiles"] = max(1, _TRIAL_BYTES // part["tile_bytes"])
    n_bytes, n_parts = _n_bytes(part), _TURNS * len(DISTANCES)
    places = [part["weight"] + at for at in range(0, _n_bytes(largest) - n_bytes + 1, n_bytes)][:n_parts]
    in_turn = itertools.cycle(places)  # caches shall not have them

    def measure(ahead: int) -> float:
        weight, started = next(in_turn), time.perf_counter()
        run_kernel(team, kernel, LINEAR, n_rows=1, ahead=ahead, **part | {"weight": weight})
        return time.perf_counter() - started

    with team.lock:
        for _ in places:
            measure(AHEAD)  # pages of a mapped copy come into memory
        return tried_distance(measure)


def _n_bytes(product: Any) -> int:
    return int(product["n_tiles"] * product["tile_bytes"])


def _key() -> str:
    return f"{host()[1]} {isa()}"


def _kept(folder: Path | None) -> dict[str, int]:
    """Distances by CPU and instruction set; none in a damaged file."""
    try:
        found = read_json(folder / _FILE) if folder else {}
    except (LlamaCliError, OSError):
        return {}
    return {key: distance for key, distance in found.items() if isinstance(distance, int) and distance in DISTANCES}


def _fastest(measure: Callable[[int], float]) -> int:
    seconds = dict.fromkeys(DISTANCES, math.inf)
    for _ in range(_TURNS):
        for distance in DISTANCES:
            seconds[distance] = min(seconds[distance], measure(distance))
    best = min(DISTANCES, key=seconds.__getitem__)
    return best if seconds[best] < _GAIN * seconds[AHEAD] else AHEAD
