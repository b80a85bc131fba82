"""Matrix products: packed weights times activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum

from llamacli.kernels import simd
from llamacli.kernels.deferred import carray
from llamacli.kernels.isa import ARM, AVX512, isa
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import LINEAR, RUN
from llamacli.kernels.packing_formats import ROWS, FloatPacking, IntegerPacking, Packing, TiledPacking
from llamacli.kernels.panels import panel_product
from llamacli.kernels.prompt_tiles import decoded_product
from llamacli.kernels.register_tiles import is_in_stream, tile_of
from llamacli.kernels.registry import packing_of, packings
from llamacli.kernels.tiles import tiled_product
from llamacli.kernels.work import part_of

MIDDLE, NARROW, PAIR = 8, 4, 2
"""Tokens of the smaller register tiles, for those that are left."""

_CHUNK = 96
"""Tokens whose activations stay in the second-level cache while the weights are read."""


def linear(kind: IntEnum) -> Kernel:
    """Matrix product kernel for weights packed as `kind`."""
    packing = packing_of(kind)
    assert packing, f"{kind.name} has no kernels"
    return product_of(packing)


def tiled_linear(kind: IntEnum) -> Kernel:
    """Matrix product kernel of prompts, by AMX, for integers packed as `kind`."""
    packing = packing_of(kind)
    assert isinstance(packing, IntegerPacking), f"{kind.name} is no format of integers"
    return product_of(TiledPacking(packing))


@functools.cache
def streaming() -> frozenset[Kernel]:
    """Kernels that the prefetch distance of RUN matters to.

    Memory alone bounds their products of one row.
    """
    some = (packing for packing in packings().values() if is_in_stream(packing, 1))
    return frozenset(product_of(one) for one in some if not (isinstance(one, FloatPacking) and one.is_tiled))


def product_of(packing: Packing) -> Kernel:
    """Matrix product kernel for weights of a packing."""
    return _product_of(packing)  # type: ignore[arg-type]  # mypy takes no protocol for hashable


@functools.cache
def _product_of(packing: Packing) -> Kernel:
    if isinstance(packing, TiledPacking):
        function = decoded_product(packing)
    elif not isinstance(packing, FloatPacking) or isa() in ARM:
        function = _product(packing)
    else:
        function = tiled_product(packing) if packing.is_tiled else panel_product(packing, tile_of(packing))
    return Kernel(function, f"_{packing.name}", __name__)


def _wide() -> int:
    """Number of tokens of the largest register tile.

    As many as the registers hold: 32 of 512 bits, 16 of 256, or 32 of 128.
    """
    return 12 if isa() in AVX512 else NARROW if isa() in ARM else 6


def _product(packing: Packing) -> Callable[..., None]:
    tile, wide = tile_of(packing), _wide()

    def linear(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, LINEAR)[0], carray(simd.pointer(run), 1, RUN)[0]
        ahead = r.ahead
        for group in range(a.n_groups):
            row, end, first, last = part_of(a, r, group, thread, n_threads)
            while row < end:
                chunk_end = min(row + _CHUNK, end)
                for t in range(first, last):
                    weight = a.weight + (group * a.n_tiles + t) * a.tile_bytes
                    lanes = 4 * ROWS * t
                    token = row
                    while token < chunk_end:
                        x = a.x + group * a.x_group + token * a.x_stride
                        out = a.out + group * a.out_group + token * a.out_stride + lanes
                        residual = 0
                        if a.residual:
                            residual = a.residual + group * a.out_group + token * a.out_stride + lanes
                        bias = a.bias + group * a.bias_stride + lanes
                        if chunk_end - token >= wide:
                            tile(wide, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual, ahead)
                            token += wide
                        elif chunk_end - token >= MIDDLE and wide > MIDDLE:
                            tile(MIDDLE, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual, ahead)
                            token += MIDDLE
                        elif chunk_end - token >= NARROW:
                            tile(NARROW, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual, ahead)
                            token += NARROW
                        elif chunk_end - token >= PAIR:
                            tile(PAIR, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual, ahead)
                            token += PAIR
                        else:
                            tile(1, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual, ahead)
                            token += 1
                row = chunk_end

    return linear
