"""How keys and values become codes of a few bits: turned, then by blocks of 32 numbers at most, each with its scale.

What compiled code does is the same to the bit, so sums are taken here in the order in which vectors take them.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

BLOCK = 32
"""Numbers of a whole block."""

PEAKS = (1.08, 1.04, 1.0, 0.96, 0.92, 0.88)
"""The scales that are tried where a zero or an offset is chosen, relative to the one that just covers the block."""

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


def rotated(x: Floats) -> Floats:
    """x [..., head_dim] times the orthonormal Hadamard matrix of the largest power of two numbers that divides it.

    The matrix is its own inverse. It spreads outliers over all dimensions (QuaRot, Ashkboos et al. 2024).
    """
    head_dim = x.shape[-1]
    size, half = head_dim & -head_dim, 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], head_dim // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / np.sqrt(size))


def folded(x: Floats) -> Floats:
    """Sums over the last axis, of a power of two of numbers: the upper half is added to the lower, and so on."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


@attrs.frozen
class Rounding:
    """Codes of some bits: number = scale * (code - zero) + offset, or scale * table[code].

    - `has_zero`: the code of 0 is chosen for each block, and takes the place of the scale's last bits, which so few
      codes can do without. Otherwise it is the middle code; it means nothing where there is an offset or a table.
    - `extremes`: where neither is chosen, what the number of largest magnitude may become, in steps of the scale: each
      makes a scale that is tried. Those of both signs suit a table that is no mirror image of itself.
    """

    bits: int
    has_zero: bool = False
    has_offset: bool = False
    extremes: tuple[int, ...] = ()
    table: tuple[int, ...] = ()

    @property
    def last_code(self) -> int:
        """The largest code, and the mask of the bits of a zero."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The code of 0 where none is chosen."""
        return 0 if self.has_offset or self.table else 2 ** (self.bits - 1)

    @property
    def trials(self) -> tuple[float, ...]:
        """One of PEAKS, or of `extremes`, for each scale that is tried."""
        return self.extremes or PEAKS

    @property
    def midpoints(self) -> tuple[float, ...]:
        """Where the nearest entry of the table changes."""
        return tuple((low + high) / 2 for low, high in zip(self.table, self.table[1:], strict=False))

    def fit(self, x: Floats) -> tuple[Bytes, list[Words]]:
        """Codes [..., 32] of blocks [..., n], and their scales and, if there are any, offsets, [..., 1].

        Of each scale that is tried the codes are taken, then the scale and the offset that suit these best in the sense
        of least squares. Codes behind the n-th mean nothing.
        """
        n = x.shape[-1]
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        if self.has_zero:
            low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, BLOCK - n)])
        total, none = folded(x), np.zeros_like(low)
        # The total stays the scale if x is not finite: nothing explains it then.
        best, scale, offset, inverse, origin, zero = none - 1, total, none, none, none, none + self.middle
        for trial in map(np.float32, self.trials):
            if self.extremes:
                step, start = np.where(-low >= high, low, high) / trial, none
            else:
                step = (high - low) / np.float32(self.last_code) * trial
                start = low + (high - low) * ((1 - trial) / 2)
            per_step = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
            code_of_zero = none + self.middle
            if self.has_zero:
                code_of_zero, start = self._nearest(-start * per_step, none), none
            numbers = self._numbers(self._nearest((x - start) * per_step, code_of_zero), code_of_zero)
            numbers[..., n:] = 0
            product, square = folded(x * numbers), folded(numbers * numbers)
            sum_of_numbers = folded(numbers)
            if self.has_offset:
                product = product - total * sum_of_numbers / np.float32(n)
                square = square - sum_of_numbers * sum_of_numbers / np.float32(n)
            fit = np.divide(product, square, out=np.zeros_like(square), where=square > 0)
            better = fit * product > best
            if self.has_offset:
                offset = np.where(better, (total - fit * sum_of_numbers) / np.float32(n), offset)
            best, scale = np.where(better, fit * product, best), np.where(better, fit, scale)
            inverse, origin = np.where(better, per_step, inverse), np.where(better, start, origin)
            zero = np.where(better, code_of_zero, zero)
        words = [field.astype(np.float16).view(np.uint16) for field in (scale, offset)]
        if self.has_zero:
            mask = self.last_code
            rounded = (words[0].astype(np.int32) + (mask + 1) // 2) & ~mask
            words[0] = (rounded | zero.astype(np.int32)).astype(np.uint16)
        return self._nearest((x - origin) * inverse, zero).astype(np.uint8), words[: 1 + self.has_offset]

    def values(self, codes: Bytes, words: list[Words]) -> Floats:
        """The numbers of codes."""
        zero: Floats | np.float32 = np.float32(self.middle)
        if self.has_zero:
            zero = (words[0] & np.uint16(self.last_code)).astype(np.float32)
            words = [words[0] & ~np.uint16(self.last_code)]
        scale, *offsets = (word.view(np.float16).astype(np.float32) for word in words)
        if self.table:
            return self._numbers(codes, zero) * scale
        # As registers do it: the products are exact, and of an infinite scale comes the same.
        return codes.astype(np.float32) * scale + (offsets[0] if offsets else -zero * scale)

    def _nearest(self, steps: Floats, zero: Floats) -> Floats:
        """The codes nearest to numbers in steps of the scale."""
        if self.table:
            return np.sum(np.array(self.midpoints, np.float32) < steps[..., None], -1, dtype=np.float32)
        nearest = np.rint(steps)
        nearest = np.where(nearest > -zero, nearest, -zero)  # which is no NaN
        return np.minimum(nearest, np.float32(self.last_code) - zero) + zero

    def _numbers(self, codes: npt.NDArray[np.generic], zero: Floats | np.float32) -> Floats:
        """What codes mean, in steps of the scale."""
        if self.table:
            return np.array(self.table, np.float32)[codes.astype(np.int32)]
        return codes.astype(np.float32) - zero
