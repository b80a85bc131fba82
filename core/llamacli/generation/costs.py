"""Cost model of steps: seconds by rows, fitted online."""

from __future__ import annotations

import attrs

from llamacli.kv import N_BATCH

MIN_CHUNK = 20
"""Minimum number of tokens of a prompt in a step."""
TILE = 12
"""Rows that kernels compute together: other numbers cost nearly as much as the next multiple."""

ALONE_S = 2.0
"""Seconds of a step of prompts that no text waits for: cancelling takes as long."""
FIRST_CHUNK = 64
"""Tokens of a step of prompts before anything is known of its time."""

_NEWEST = 0.2
"""Weight of the newest step in the mean of its bucket."""
_FORGOTTEN = 200
"""Steps after which the usual time of steps of another size is learned anew."""


@attrs.define
class _Bucket:
    """Mean rows and seconds of steps of similar size.

    `usual` is the mean without long pauses of the machine, `seen` the number of the last step of this size.
    """

    rows: float
    seconds: float
    usual: float
    seen: int


class StepCost:
    """Model of a step's time: `base` + `per_row` * rows, in seconds.

    Steps are divided into buckets by the power of two of their rows. Each has a moving mean, and a line of least
    squares of the relative error goes through the means. So long runs of equal steps do not make the fit forget others.
    Until there are two buckets, all time counts as that of rows, which makes the next chunk small.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self.base = self.per_row = 0.0
        self._n = 0
        self._latest: _Bucket | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Add a step that took some seconds."""
        self._n += 1
        key = rows.bit_length()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(rows, seconds, seconds, 0)
        elif self._n - bucket.seen > _FORGOTTEN:
            bucket.usual = seconds
        bucket.rows += _NEWEST * (rows - bucket.rows)
        bucket.seconds += _NEWEST * (seconds - bucket.seconds)
        bucket.usual += _NEWEST * (min(seconds, 2 * bucket.usual) - bucket.usual)
        bucket.seen, self._latest = self._n, bucket
        self._fit()

    def seconds(self, rows: float) -> float:
        """Expected seconds of a step; 0 before the first."""
        return self.base + self.per_row * rows

    def likely_seconds(self, rows: int) -> float:
        """Expected seconds by what steps of a similar size usually took.

        If there were none of late, as the last step usually took, and as the line goes from there. 0 before there are
        two buckets.
        """
        if self._latest is None or len(self._buckets) < 2:
            return 0.0
        bucket = self._buckets.get(rows.bit_length())
        if bucket is None or self._n - bucket.seen > _FORGOTTEN:
            bucket = self._latest
        return bucket.usual * self.seconds(rows) / self.seconds(bucket.rows)

    def rows_within(self, seconds: float) -> int:
        """Largest number of rows that a step can compute in this time.

        N_BATCH before the first step.
        """
        if self.per_row <= 0:
            return N_BATCH
        return max(0, min(N_BATCH, int((seconds - self.base) / self.per_row)))

    def _fit(self) -> None:
        points = [(one.rows, one.seconds, 1 / max(one.seconds, 1e-9) ** 2) for one in self._buckets.values()]
        total = sum(weight for *_, weight in points)
        x = sum(rows * weight for rows, _, weight in points) / total
        y = sum(seconds * weight for _, seconds, weight in points) / total
        spread = sum(weight * (rows - x) ** 2 for rows, _, weight in points)
        slope = sum(weight * (rows - x) * (seconds - y) for rows, seconds, weight in points)
        if len(points) < 2 or slope <= 0:
            self.base, self.per_row = 0.0, y / x
            return
        self.per_row = min(slope / spread, y / x)  # a base below 0 would allow steps that are too long
        self.base = max(0.0, y - self.per_row * x)  # rounding may leave a little less than 0


def chunk_rows(cost: StepCost, n_decode: int, step_s: float, *, passes: int = 1) -> int:
    """Tokens of prompts that fit into a step beside `n_decode` rows.

    From 0 to N_BATCH: so many that the step takes `step_s` seconds, or ALONE_S without decoding rows; at least
    MIN_CHUNK; and so that all rows are whole tiles. A `step_s` of 0 is no limit. `passes` is 2 where prompts and
    decoding rows cannot be computed in one pass over the weights.
    """
    room = max(0, N_BATCH - n_decode)
    if not step_s:
        return room
    if not n_decode:
        if cost.per_row <= 0:
            return FIRST_CHUNK
        step_s = max(step_s, ALONE_S)
    n_rows = cost.rows_within(step_s - (passes - 1) * cost.base)
    if n_rows < N_BATCH:
        n_rows -= n_rows % TILE
    return min(room, max(MIN_CHUNK, n_rows - n_decode))
