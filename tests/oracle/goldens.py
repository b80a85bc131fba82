"""Recorded results of llama.cpp, and the distance from them."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiny_variants import VARIANTS

DIRECTORY = Path(__file__).resolve().parents[1] / "goldens"

TOKENS = np.random.RandomState(1234).randint(0, 128, 48).astype(np.int32)
"""The sequence that every tiny model is run on."""

ENCODED = TOKENS[:-12:-1].tolist()
"""The encoder's text in models that have one, which the decoder's first token and then the sequence follow."""

POSITIONS = np.array([0, 1, 7, 15, 16, 31, 32, 47], np.int32)
"""Where in it logits are kept: around the borders of pages and blocks, and at the end."""

N_PROMPT, N_GREEDY = 16, 64
"""So many tokens of the sequence are the prompt of so many greedy ones."""

N_CTX = 256
"""The length of the context that they are run in."""


@dataclasses.dataclass(frozen=True)
class Golden:
    """The peer's run of one file.

    - `sha256`: of the file.
    - `logits`: float32 [len(POSITIONS), n_vocab], teacher-forced with TOKENS.
    - `top1`: int32 [len(TOKENS)], the most probable token after each one.
    - `greedy`, `gaps`: int32 and float32 [N_GREEDY], tokens picked after the first N_PROMPT ones, and by how much the
      logit of each was larger than the next best.
    - `exact`: like `logits`, of the same weights stored as float32.
    """

    sha256: str
    logits: npt.NDArray[np.float32]
    top1: npt.NDArray[np.int32]
    greedy: npt.NDArray[np.int32]
    gaps: npt.NDArray[np.float32]
    exact: npt.NDArray[np.float32]

    @classmethod
    def load(cls, name: str) -> Golden:
        """Read the golden of a variant of `tiny_variants`.

        Raises KeyError if there is none.
        """
        with np.load(_path(name)) as arrays:
            found = {field.name: arrays[f"{name} {field.name}"] for field in dataclasses.fields(cls)}
        return cls(**found | {"sha256": str(found["sha256"])})

    def save(self, name: str) -> str:
        """Write the golden into the file of its plugin.

        Returns "new", "changed" or "unchanged". Goldens of variants that no longer exist are left out.
        """
        path = _path(name)
        arrays: dict[str, Any] = {}
        if path.exists():
            with np.load(path) as recorded:
                arrays = {key: recorded[key] for key in recorded if key.split()[0] in VARIANTS}
        fields = {f"{name} {field}": np.asarray(value) for field, value in dataclasses.asdict(self).items()}
        if not fields.keys() <= arrays.keys():
            change = "new"
        else:
            same = all(np.array_equal(arrays[key], value) for key, value in fields.items())
            change = "unchanged" if same else "changed"
        np.savez_compressed(path, **dict(sorted((arrays | fields).items())))
        return change


def _path(name: str) -> Path:
    return DIRECTORY / f"{VARIANTS[name].family}.npz"


def sha256(path: Path) -> str:
    """The file's digest in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def nmse(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32]) -> float:
    """Normalised mean squared error: mean((e - a)^2) / mean(e^2).

    That of the finite numbers; infinite where the others are not equal.
    """
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite]):
        return np.inf
    expected, actual = expected[finite].astype(np.float64), actual[finite]
    return float(np.square(expected - actual).sum() / np.square(expected).sum())


def sure(gaps: npt.NDArray[np.float32], gap: float) -> int:
    """Number of greedy tokens before the first top-2 gap below `gap`.

    From there on runs may differ.
    """
    narrow = np.flatnonzero(gaps < gap)
    return int(narrow[0]) if len(narrow) else len(gaps)
