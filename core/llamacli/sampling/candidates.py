"""Candidate tokens and their logits, the data that samplers work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, PluginError
from llamacli.kernels import sampling as kernels

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

LARGEST = kernels.LARGEST
"""The largest finite logit."""

_MAX_HEAP = 256
MAX_STEPS = 32
"""Compiled samplers that are applied in one call."""


class Steps:
    """Samplers that a kernel applies in one call, at most MAX_STEPS.

    `pairs` have the kind of each, of `llamacli.kernels.sampling`, and its value.
    """

    def __init__(self, *pairs: tuple[int, float]):
        self.draws = any(kind == kernels.DRAW for kind, _ in pairs)
        self.numbers = np.array([len(pairs), *(number for pair in pairs for number in pair)], np.float64)


def as_logits(values: Any) -> Logits:
    """Convert to contiguous, writable float32 [n_vocab] logits; InvalidRequestError for other arrays."""
    try:
        with np.errstate(over="ignore"):
            logits = np.require(values, np.float32, ["C", "W"])
    except (TypeError, ValueError):
        raise InvalidRequestError(f"logits must be an array of numbers, not {type(values).__name__}") from None
    if logits.ndim != 1:
        raise InvalidRequestError(f"logits must have the shape [n_vocab], not {list(logits.shape)}")
    return logits


class Candidates:
    """Tokens that can still be drawn, with their logits.

    - `ids`: int32 [n], ascending, so that a draw depends on which candidates remain and not on how they were filtered.
    - `logits`: float32 [n], in the order of `ids`. At the start this is the model's own array with all logits: samplers
      that change it in place then, as penalties and temperature do, change that array.
    - `history`: the tokens accepted so far, oldest first.
    - `random`: the random generator of all samplers.
    - `chosen`: the id of the drawn token, None until one is drawn.

    A sampler changes logits in place, removes candidates with a `keep` method, or draws with `choose`. The largest
    logit is finite; a sampler that may change that calls `check_drawable`. Buffers are reused from token to token.
    """

    ids: Ids
    logits: Logits

    def __init__(self, random: np.random.Generator, history: Sequence[int] = ()):
        self.random, self.history = random, history
        self.chosen: int | None = None
        self._all_ids = np.empty(0, np.int32)
        self._source: Logits | None = None
        self._apply: Callable[[], object] | None = None
        self._numbers = np.zeros(kernels.STEPS + 2 * MAX_STEPS)

    def start(self, logits: Logits) -> None:
        """Make every token a candidate again, with these logits.

        Raises InvalidRequestError if a logit is NaN or plus infinity, or all are minus infinity.
        """
        if logits.dtype != np.float32 or logits.ndim != 1 or not logits.flags.carray or not len(logits):
            raise InvalidRequestError("logits must be a contiguous, writable float32 array of one dimension, not empty")
        if len(self._all_ids) != len(logits):
            self._allocate(len(logits))
            self._all_ids = np.arange(
                len(logits), dtype=np.int32
            )  # last, so that an interrupt leaves nothing half done
        if logits is not self._source:
            self._source, self._apply = logits, None
        self.ids, self.logits, self.chosen = self._all_ids, logits, None
        index = int(logits.argmax())
        if not math.isfinite(logits[index]):
            raise InvalidRequestError(
                f"cannot sample: the largest logit is {logits[index]}, of token {index}: "
                "weights or keys of the model's file are out of range"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_vocab(self) -> int:
        """Number of candidates at the start, the size of the vocabulary."""
        return len(self._all_ids)

    def check_drawable(self) -> None:
        """Keep only +inf logits, with equal probability, if there are any.

        Raises InvalidRequestError if a logit is NaN, if all are minus infinity, or if no candidate is left.
        """
        if not len(self):
            raise InvalidRequestError("cannot sample: no token is left")
        index = int(np.argmax(self.logits))  # argmax returns a NaN's index if there is one
        if np.isnan(self.logits[index]) or np.isneginf(self.logits[index]):
            raise InvalidRequestError(
                f"cannot sample: the largest logit is {self.logits[index]}, of token {self.ids[index]}"
            )
        if np.isposinf(self.logits[index]):
            self.logits[:] = np.where(np.isposinf(self.logits), 0, -np.inf)  # in place: they can be drawn from again
            self.keep_from(0)

    def best(self) -> int:
        """Index of the largest logit, the first of equal ones."""
        return int(self.logits.argmax())

    @property
    def largest(self) -> float:
        """The largest logit."""
        return float(self.logits[self.best()])

    def find(self, ids: Ids) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Indices of tokens into candidates, and into `ids`; others are left out."""
        if self.ids is self._all_ids:
            there = np.flatnonzero(ids < len(self.ids))
            return ids[there].astype(np.intp), there
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        there = np.flatnonzero(self.ids[places] == ids)
        return places[there], there

    def kth_largest(self, k: int) -> np.float32:
        """The k-th largest logit; InvalidRequestError unless there are k candidates."""
        if not 1 <= k <= len(self):
            raise InvalidRequestError(f"k = {k} must be from 1 to {len(self)}")
        if k <= _MAX_HEAP:
            return np.float32(kernels.kth_largest(self.logits, np.empty(k, np.float32)))
        return np.float32(np.partition(self.logits, -k)[-k])

    def falling_order(self, keys: Logits | None = None) -> Ids:
        """Indices that sort the logits (or keys) in descending order; stable."""
        keys = self.logits if keys is None else self._checked(keys, np.dtype(np.float32))
        order: Ids = kernels.falling_order(keys)
        return order

    def log_total(self) -> float:
        """Log-sum-exp of the logits, less the largest logit.

        The log-probability of a candidate is its logit minus `largest` minus this.
        """
        return float(kernels.log_sum_exp(self.logits, self.largest))

    def probabilities(self) -> npt.NDArray[np.float64]:
        """Softmax, float64 [n], in a buffer that this and `draw` overwrite."""
        probabilities: npt.NDArray[np.float64] = self._scratch[-1][: len(self)]
        kernels.softmax(self.logits, self.largest, self.log_total(), probabilities)
        return probabilities

    def draw(self) -> int:
        """Draw an index by probability with one random number; never probability 0."""
        index = self._run(_DRAW)
        assert index is not None
        return index

    def apply(self, steps: Steps) -> None:
        """Apply compiled samplers, up to one that draws.

        Raises InvalidRequestError if no token is left, or the logit of the one drawn is not finite.
        """
        index = self._run(steps)
        if index is not None:
            if not math.isfinite(self.logits[index]):
                raise _not_finite(self, index)
            self.chosen = int(self.ids[index])
        elif not len(self.ids):
            raise InvalidRequestError("cannot sample: no token is left")

    def _run(self, steps: Steps) -> int | None:
        numbers, n, logits = self._numbers, len(self.ids), self.logits
        is_kept = logits is not self._source or self.ids is not self._all_ids
        if is_kept:  # a sampler has replaced them, or they are there already
            self._kept_logits[:n], self._kept_ids[:n] = logits, self.ids
        if self._apply is None:
            assert self._source is not None
            self._apply = kernels.apply_steps.bound(
                numbers, self._source, self._all_ids, self._kept_logits, self._kept_ids, *self._scratch
            )  # fmt: skip
        numbers[:2] = n, is_kept
        if steps.draws:
            numbers[kernels.UNIFORM] = self.random.random()
        numbers[kernels.N_STEPS : kernels.N_STEPS + len(steps.numbers)] = steps.numbers
        self._apply()
        n_left, index = int(numbers[kernels.N]), int(numbers[kernels.UNIFORM])
        if numbers[kernels.KEPT]:
            self.ids, self.logits = self._kept_ids[:n_left], self._kept_logits[:n_left]
        return index if index >= 0 else None

    def surprisal(self, index: int) -> float:
        """Negative log-probability of the candidate at this index, in nats."""
        return self.log_total() + self.largest - float(self.logits[index])

    def entropy(self) -> float:
        """Shannon entropy of the distribution, in nats."""
        return float(kernels.entropy(self.logits, self.largest, self.log_total()))

    def deviation(self) -> float:
        """The standard deviation of the finite logits."""
        return float(kernels.deviation(self.logits))

    def keep_from(self, threshold: float) -> None:
        """Keep candidates from a threshold on, which is rounded up to float32."""
        self._run(Steps((kernels.KEEP_FROM, threshold)))

    def keep_where(self, mask: npt.NDArray[np.bool_]) -> None:
        """Keep the candidates that a mask selects, bool [n]."""
        mask = self._checked(mask, np.dtype(np.bool_))
        n = kernels.keep_where(self.logits, self.ids, mask, self._kept_logits, self._kept_ids)
        self.ids, self.logits = self._kept_ids[:n], self._kept_logits[:n]

    def keep(self, indices: Any) -> None:
        """Keep the candidates at these indices."""
        mask = np.zeros(len(self), np.bool_)
        mask[indices] = True
        self.keep_where(mask)

    def restore(self, token: int | None) -> bool:
        """Make a token the only candidate, even if it was removed.

        False, and nothing changes, for None and for tokens whose logit is minus infinity.
        """
        if token is None or self._source is None or self._source[token] == -np.inf:
            return False
        self.ids, self.logits = self._all_ids[token : token + 1], self._source[token : token + 1]
        return True

    def choose(self, index: int) -> None:
        """Draw this candidate; InvalidRequestError if its logit is not finite."""
        if not math.isfinite(self.logits[index]):
            raise _not_finite(self, index)
        self.chosen = int(self.ids[index])

    def check(self, sampler: str) -> None:
        """Validate the candidates after a sampler, since kernels check nothing.

        Raises InvalidRequestError if none is left, PluginError if ids and logits do not match.
        """
        if not len(self):
            raise InvalidRequestError(f"cannot sample: sampler {sampler} leaves no token")
        logits = self.logits
        if logits.shape != self.ids.shape or logits.dtype != np.float32 or not logits.flags.carray:
            left = f"{logits.dtype} {list(logits.shape)}"
            raise PluginError(f"sampler {sampler} left logits that are {left}, not float32 [{len(self)}]")

    def _checked(self, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        array = np.asarray(array)
        if array.shape != (len(self),) or array.dtype != dtype:
            raise InvalidRequestError(
                f"{array.dtype} {list(array.shape)} is not {dtype} [{len(self)}], a value for each candidate"
            )
        return np.ascontiguousarray(array)

    def _allocate(self, n: int) -> None:
        """Allocate what samplers of n tokens use; untouched memory costs nothing."""
        self._kept_ids, self._kept_logits, self._apply = np.empty(n, np.int32), np.empty(n, np.float32), None
        self._scratch = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n)


_DRAW = Steps((kernels.DRAW, 0))


def _not_finite(candidates: Candidates, index: int) -> InvalidRequestError:
    token, logit = candidates.ids[index], candidates.logits[index]
    return InvalidRequestError(f"cannot sample: the logit of token {token} is {logit}")
