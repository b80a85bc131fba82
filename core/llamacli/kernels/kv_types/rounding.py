"""Quantization of keys and values in blocks, after Hadamard rotation.

A block is at most 32 numbers with a scale. Kernels produce the same bits, so sums here are taken in the order of vector
registers.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

BLOCK = 32
"""Numbers in a whole block."""

SCALE_FACTORS = (1.08, 1.04, 1.0, 0.96, 0.92, 0.88)
"""Candidate scales of types with a zero point or an offset, relative to the scale that just covers the block."""

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


def rotated(x: Floats) -> Floats:
    """Hadamard rotation of x [..., head_dim].

    It rotates runs of the largest power of two that divides head_dim. The matrix is orthonormal and its own inverse. It
    spreads outliers over dimensions (QuaRot, Ashkboos et al. 2024).
    """
    head_dim = x.shape[-1]
    size, half = head_dim & -head_dim, 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], head_dim // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / np.sqrt(size))


def pairwise_sum(x: Floats) -> Floats:
    """Pairwise sum over the last axis, a power of two long.

    The upper half is added to the lower, repeatedly.
    """
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


@attrs.frozen
class Rounding:
    """Block quantization, linear or by table.

    number = scale * (code - zero) + offset, or scale * table[code].

    - `bits`: bits per code.
    - `has_zero`: each block has its own zero point, in the low bits of its scale. Otherwise it is the middle code, and
      is unused with an offset or a table.
    - `has_offset`: each block has an offset (its minimum, roughly).
    - `extremes`: for types with neither: what the number of largest magnitude may become, in steps of the scale. Each
      gives one candidate scale. Both signs are useful for an asymmetric table.
    - `table`: the values of codes, for nonlinear types such as iq4_nl.
    """

    bits: int
    has_zero: bool = False
    has_offset: bool = False
    extremes: tuple[int, ...] = ()
    table: tuple[int, ...] = ()

    @property
    def last_code(self) -> int:
        """Largest code, which is also the mask of the zero point's bits."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """Zero point of types whose blocks have none of their own."""
        return 0 if self.has_offset or self.table else 2 ** (self.bits - 1)

    @property
    def trials(self) -> tuple[float, ...]:
        """Candidate scales: SCALE_FACTORS or `extremes`."""
        return self.extremes or SCALE_FACTORS

    @property
    def midpoints(self) -> tuple[float, ...]:
        """Decision boundaries between neighbouring table entries."""
        return tuple((low + high) / 2 for low, high in zip(self.table, self.table[1:], strict=False))

    def fit(self, x: Floats) -> tuple[Bytes, list[Words]]:
        """Quantize blocks of up to 32 numbers.

        Blocks [..., n] give codes [..., 32], scales and, if the type has them, offsets, [..., 1]. For each candidate
        scale: round to codes, then fit scale and offset to these codes by least squares; the candidate with the least
        error wins. Codes from the n-th on are undefined.
        """
        n = x.shape[-1]
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        if self.has_zero:
            low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, BLOCK - n)])
        total, none = pairwise_sum(x), np.zeros_like(low)
        # If x is not finite, no candidate wins and the sum, not finite either, stays the scale.
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
            product, square = pairwise_sum(x * numbers), pairwise_sum(numbers * numbers)
            sum_of_numbers = pairwise_sum(numbers)
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
        """Dequantize codes."""
        zero: Floats | np.float32 = np.float32(self.middle)
        if self.has_zero:
            zero = (words[0] & np.uint16(self.last_code)).astype(np.float32)
            words = [words[0] & ~np.uint16(self.last_code)]
        scale, *offsets = (word.view(np.float16).astype(np.float32) for word in words)
        if not (self.has_zero or self.has_offset):
            return self._numbers(codes, zero) * scale
        # In the order of kernels: the products are exact, and an infinite scale gives the same bits.
        return codes.astype(np.float32) * scale + (offsets[0] if offsets else -zero * scale)

    def _nearest(self, steps: Floats, zero: Floats) -> Floats:
        """Round numbers, in steps of the scale, to the nearest codes."""
        if self.table:
            return np.sum(np.array(self.midpoints, np.float32) < steps[..., None], -1, dtype=np.float32)
        nearest = np.rint(steps)
        nearest = np.where(nearest > -zero, nearest, -zero)  # maps NaN to a valid code
        return np.minimum(nearest, np.float32(self.last_code) - zero) + zero

    def _numbers(self, codes: npt.NDArray[np.generic], zero: Floats | np.float32) -> Floats:
        """Convert codes to numbers in steps of the scale."""
        if self.table:
            return np.array(self.table, np.float32)[codes.astype(np.int32)]
        return codes.astype(np.float32) - zero
