"""What samplers work on: the tokens that can still be drawn, with their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, PluginError
from llamacli.kernels import sampling as kernels

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

_MOST_IN_HEAP = 256


def as_logits(values: Any) -> Logits:
    """What a caller hands over as logits, the way kernels take it: contiguous, writable float32 [n_vocab].

    Raises InvalidRequestError for what is no row of numbers.
    """
    try:
        with np.errstate(over="ignore"):
            logits = np.require(values, np.float32, ["C", "W"])
    except (TypeError, ValueError):
        raise InvalidRequestError(f"this {type(values).__name__} is no array of logits") from None
    if logits.ndim != 1:
        raise InvalidRequestError(f"logits of shape {logits.shape} are not [n_vocab]")
    return logits


class Candidates:
    """The tokens that can still be drawn.

    - `ids`: int32 [n], always rising, so that what is drawn depends on which candidates there are and not on how they
      came to be left over.
    - `logits`: float32 [n], theirs. To begin with these are all logits of a model, and the array itself that it handed
      over: what changes them in place then, as penalties and temperature do, changes that array.
    - `history`: the tokens written so far, oldest first.
    - `random`: where every sampler takes its random numbers from.
    - `chosen`: the id of the token that is drawn, None as long as none is.

    A sampler changes logits in place, or takes candidates out with a `keep` method, or ends the matter with `choose`.
    The largest logit is finite; a sampler that may change that calls `settle`. Memory is kept from token to token.
    """

    ids: Ids
    logits: Logits

    def __init__(self, random: np.random.Generator, history: Sequence[int] = ()):
        self.random, self.history = random, history
        self.chosen: int | None = None
        self._all_ids = np.empty(0, np.int32)
        self._kept_ids, self._kept_logits = np.empty(0, np.int32), np.empty(0, np.float32)
        self._sums = np.empty(0)

    def start(self, logits: Logits) -> None:
        """Let every token be a candidate again.

        Raises InvalidRequestError if a logit is NaN or all are minus infinity.
        """
        if logits.dtype != np.float32 or logits.ndim != 1 or not logits.flags.carray or not len(logits):
            raise InvalidRequestError("logits must be a contiguous, writable float32 array of one dimension, not empty")
        if len(self._all_ids) != len(logits):
            self._all_ids = np.arange(len(logits), dtype=np.int32)
        self.ids, self.logits, self.chosen = self._all_ids, logits, None
        self.settle()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_vocab(self) -> int:
        """How many candidates there were to begin with."""
        return len(self._all_ids)

    def settle(self) -> None:
        """Where logits are infinite, keep these alone and let them share everything evenly.

        Raises InvalidRequestError if a logit is NaN, or if there is no candidate that can be drawn.
        """
        if not len(self):
            raise InvalidRequestError("cannot sample: no token is left")
        index = int(np.argmax(self.logits))  # of a NaN, if there is one
        if np.isnan(self.logits[index]) or np.isneginf(self.logits[index]):
            raise InvalidRequestError(
                f"cannot sample: the largest logit is {self.logits[index]}, of token {self.ids[index]}"
            )
        if np.isposinf(self.logits[index]):
            self.keep_from(math.inf)
            self.logits[:] = 0

    def best(self) -> int:
        """The index of the first of the largest logits."""
        return int(np.argmax(self.logits))

    @property
    def largest(self) -> float:
        """The largest logit."""
        return float(self.logits[self.best()])

    def find(self, ids: Ids) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Where tokens stand: indices into the candidates, and into `ids`, of those that are candidates."""
        if self.ids is self._all_ids:
            there = np.flatnonzero(ids < len(self.ids))
            return ids[there].astype(np.intp), there
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        there = np.flatnonzero(self.ids[places] == ids)
        return places[there], there

    def kth_largest(self, k: int) -> np.float32:
        """The k-th largest logit. Raises InvalidRequestError if k is not from 1 to how many there are."""
        if not 1 <= k <= len(self):
            raise InvalidRequestError(f"there is no logit number {k} of {len(self)}")
        if k <= _MOST_IN_HEAP:
            return np.float32(kernels.kth_largest(self.logits, np.empty(k, np.float32)))
        return np.float32(np.partition(self.logits, -k)[-k])

    def falling_order(self, keys: Logits | None = None) -> Ids:
        """The indices of the candidates from the largest logit (or key) on; of equals, the first comes first."""
        keys = self.logits if keys is None else self._checked(keys, np.dtype(np.float32))
        order = np.empty(len(self), np.int32)
        kernels.falling_order(keys, order)
        return order

    def log_total(self) -> float:
        """The logarithm of the sum of exp(logits - largest): what a token's log-probability lacks beside that."""
        return float(kernels.log_sum_exp(self.logits, self.largest))

    def probabilities(self) -> npt.NDArray[np.float64]:
        """float64 [n]: the softmax of the logits, valid until it is asked for again or a token is drawn."""
        probabilities = self._scratch()
        kernels.softmax(self.logits, self.largest, self.log_total(), probabilities)
        return probabilities

    def draw(self) -> int:
        """The index of a candidate, drawn by its probability, with one random number; never one of probability 0."""
        sums = self._scratch()
        kernels.running_sums(self.logits, self.largest, sums)
        index = np.searchsorted(sums, self.random.random() * sums[-1], side="right")
        return int(min(index, np.searchsorted(sums, sums[-1])))

    def surprisal(self, index: int) -> float:
        """Minus the logarithm of the probability of the candidate at this index, in nats."""
        return self.log_total() + self.largest - float(self.logits[index])

    def entropy(self) -> float:
        """The expected surprisal, in nats."""
        return float(kernels.entropy(self.logits, self.largest, self.log_total()))

    def deviation(self) -> float:
        """The standard deviation of the finite logits."""
        return float(kernels.deviation(self.logits))

    def keep_from(self, threshold: float) -> None:
        """Keep the candidates whose logits reach a threshold, as float32 or rounded up to it."""
        with np.errstate(over="ignore"):
            least = np.float32(threshold)
        if float(least) < threshold:
            least = np.nextafter(least, np.float32(np.inf))
        if np.isneginf(least):
            return
        self._prepare()
        self._shrink(kernels.keep_from(self.logits, self.ids, least, self._kept_logits, self._kept_ids))

    def keep_where(self, mask: npt.NDArray[np.bool_]) -> None:
        """Keep the candidates that a mask names, bool [n]."""
        mask = self._checked(mask, np.dtype(np.bool_))
        self._prepare()
        self._shrink(kernels.keep_where(self.logits, self.ids, mask, self._kept_logits, self._kept_ids))

    def keep(self, indices: Any) -> None:
        """Keep the candidates at these indices."""
        mask = np.zeros(len(self), np.bool_)
        mask[indices] = True
        self.keep_where(mask)

    def choose(self, index: int) -> None:
        """Take the candidate at this index. Raises InvalidRequestError if its logit is not finite."""
        if not np.isfinite(self.logits[index]):
            raise InvalidRequestError(f"cannot sample: the logit of token {self.ids[index]} is {self.logits[index]}")
        self.chosen = int(self.ids[index])

    def check(self, sampler: str) -> None:
        """Look at what a sampler has left, which kernels trust.

        Raises InvalidRequestError if that is nothing, PluginError if ids and logits do not go together.
        """
        if not len(self):
            raise InvalidRequestError(f"cannot sample: sampler {sampler} leaves no token")
        logits = self.logits
        if logits.shape != self.ids.shape or logits.dtype != np.float32 or not logits.flags.carray:
            left = f"{logits.dtype} {list(logits.shape)}"
            raise PluginError(f"sampler {sampler} left logits that are {left}, not float32 [{len(self)}]")

    def _checked(self, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The array as kernels take it; they check nothing."""
        if array.shape != (len(self),) or array.dtype != dtype:
            raise InvalidRequestError(
                f"{array.dtype} {list(array.shape)} is not {dtype} [{len(self)}], a value for each candidate"
            )
        return np.ascontiguousarray(array)

    def _scratch(self) -> npt.NDArray[np.float64]:
        if len(self._sums) < len(self):
            self._sums = np.empty(len(self))
        return self._sums[: len(self)]

    def _prepare(self) -> None:
        if len(self._kept_ids) < len(self):
            self._kept_ids, self._kept_logits = np.empty(len(self), np.int32), np.empty(len(self), np.float32)

    def _shrink(self, n: int) -> None:
        self.ids, self.logits = self._kept_ids[:n], self._kept_logits[:n]
