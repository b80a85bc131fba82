"""Prefetch distance of matrix products that memory alone bounds.

Processors differ: on Zen 4, 1 KiB is a third faster than 8 KiB for K-quants, on Zen 5 a third slower. The distance is a
number of a run, so kernels are compiled once for all of them, and the results have the same bits.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path

from llamacli.errors import LlamaCliError
from llamacli.kernels.isa import host, isa
from llamacli.util.files import make_own_folder, read_json, replacing
from llamacli.util.folders import cache_folder

DISTANCES = (1024, 2048, 4096, 8192)
"""Bytes of weights."""

DEFAULT = 8192

_OF_CPU = {"znver4": 1024, "znver5": 8192}
"""Distance by LLVM's name of the CPU, as benchmarks/kernels.py found it."""

_FILE = "prefetch.json"
_TURNS = 3
_GAIN = 0.95
"""Share of the default's time from which on another distance is taken; less is noise."""


def prefetch_distance(measure: Callable[[int], float] | None) -> int:
    """Bytes of weights to prefetch ahead on this CPU.

    For a CPU that is not in the table, `measure` gives the seconds of a product with a distance, and the choice is kept
    in prefetch.json in the cache folder. A wrong one, on a busy machine, costs speed alone. None: no product is large
    enough to tell.
    """
    cpu = host()[1]
    if cpu in _OF_CPU:
        return _OF_CPU[cpu]
    folder, key = cache_folder(), f"{cpu} {isa()}"
    kept = _kept(folder)
    if key in kept or measure is None:
        return kept.get(key, DEFAULT)
    chosen = _fastest(measure)
    with contextlib.suppress(LlamaCliError, OSError):
        if folder:
            make_own_folder(folder)
            with replacing(folder / _FILE, overwrite=True) as file:
                file.write(json.dumps(kept | {key: chosen}).encode())
    return chosen


def _kept(folder: Path | None) -> dict[str, int]:
    """Distances by CPU and instruction set; none in a damaged file."""
    try:
        found = read_json(folder / _FILE) if folder else {}
    except (LlamaCliError, OSError):
        return {}
    return {key: distance for key, distance in found.items() if isinstance(distance, int) and distance in DISTANCES}


def _fastest(measure: Callable[[int], float]) -> int:
    measure(DEFAULT)  # pages of a mapped copy come into memory
    seconds = dict.fromkeys(DISTANCES, math.inf)
    for _ in range(_TURNS):
        for distance in DISTANCES:
            seconds[distance] = min(seconds[distance], measure(distance))
    best = min(DISTANCES, key=seconds.__getitem__)
    return best if seconds[best] < _GAIN * seconds[DEFAULT] else DEFAULT
