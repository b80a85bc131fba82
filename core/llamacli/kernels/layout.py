"""Memory layouts that kernels share with their callers.

Needs NumPy alone. Parameters of a step are a NumPy record of addresses, counts and floats. Activations are float32 rows
padded with zeros to whole blocks of 32, or blocks of small integers with a scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LANES = 16
"""float32 numbers of a vector register, as kernels see it on every CPU."""


def record(*integers: str, **floats: type[np.floating[Any]]) -> np.dtype[np.void]:
    """Record type of parameters: int64 fields, then floats of named types."""
    return np.dtype([*((name, np.int64) for name in integers), *floats.items()])


RUN = record("n_rows", "first_row", "rows", "ahead")
"""Parameters that all steps of a run share: rows `first_row` to `n_rows` - 1 are computed; `rows` is the address of a
ROW for each. `ahead`: prefetch distance of products bound by memory, see `llamacli.kernels.prefetch`."""

AHEAD = 8192
"""Prefetch distance in bytes of weights, of products bound by arithmetic and where nothing else is known."""

ROW = record(
    "cell", "position", "kv", "seq_len", "end", "n_ahead", "jump", "token", "given", "adapter_scales", "n_encoded"
)
"""Parameters of one token of a run: the cell of its sequence in which it is stored (it attends to this cell and those
before), its position, the address of its sequence's int64 [n_layer, 3] (see `llamacli.kv.KVSequence.addresses`),
the length of the context that this sequence was created for, and the number of its cells after this run (attention in
both directions sees all of them). `n_ahead`: cells behind its own that it attends to in causal attention too, those of
its bidirectional span. `jump`: 0, or 1 more than its number among the rows whose RoPE does not follow from `position`
alone (M-RoPE at several positions, positions beyond the context). `token`: its id. `given`: 0, or the address of the
row of embeddings that it has instead, float32. `adapter_scales`: address of the scales of LoRA adapters, float64; 0:
all are 1. `n_encoded`: cells of the encoder's text before those of the decoder, which cross attention reads; 0 without
an encoder, and for the text itself."""

RECURRENT_ENTRY = 24
"""Bytes of an entry of `KVSequence.addresses`: those of layers, then those of recurrent states."""

STATE_FIELDS = ("entry", "zeros", "n_numbers")
"""Fields of the records of kernels with recurrent states. `entry`: bytes of the state's entry in
KVSequence.addresses; `zeros`: address of a state of zeros; `n_numbers`: float32 numbers of a state."""

CACHE_FIELDS = (
    "layer", "n_head", "n_head_kv", "head_dim", "value_dim", "values_in_keys", "window", "chunk", "cells",
    "cells_stride",
)  # fmt: skip
"""Fields of the records of kernels that read the cache. `n_head`: heads of queries, which share the `n_head_kv` heads
of keys and values in groups; `cells`: memory of `cells_stride` bytes for each thread, see `llamacli.kernels.cached`."""

STATE, SOURCE, TARGET, KEPT = RECURRENT_SLOTS = range(4)
"""Slots of the page table of recurrent states. STATE: after the cached tokens. KEPT: after some of them, to which the
sequence can be truncated. While tokens are evaluated, SOURCE: before the batch, TARGET: after it. An empty slot STATE
or SOURCE is zeros. Between evaluations TARGET is a spare page, and so is KEPT after drafts."""

ACTIVATION_BLOCK = 32
"""Numbers of a block of activations."""

START = 0x4B400000
"""Bits of the float32 1.5 * 2^23. The float32 of bits START + i is START_VALUE + i for integers below 2^22, so a sum of
integers that begins with START needs no conversion."""

START_VALUE = 1.5 * 2**23

CODE_BIAS = 128
"""Bias of unsigned codes that a dot product is started for."""

ACTIVATION = np.dtype(
    [
        ("q", np.int8, ACTIVATION_BLOCK),
        ("scale", np.float32),
        ("sum", np.float32),
        ("start", np.int32),
        ("start_half", np.int32),
    ]
)
"""Block of 32 quantized activations: integers q, so that x = scale * q; their sum as a float; START minus
CODE_BIAS times the sum of all q, and of the first 16, with which a dot product with codes of that bias starts."""

FLOAT_FORMS, INTEGER_FORMS = ("f32", "f16", "bf16"), ("q8_0", "q8_K")
PAIR_FORMS = ("bf16_pairs", "f16_split")
"""Forms of activations. Floats stay stored as float32; integers are blocks of ACTIVATION: q8_0 has a float16 scale for
each 32, q8_K one float32 scale for 256. A block of bf16_pairs is 32 bfloat16, one of f16_split 32 float16, each the sum
of two bfloat16: the larger ones come first, then the smaller ones."""

BLOCK_BYTES = {
    **dict.fromkeys(FLOAT_FORMS, 4 * ACTIVATION_BLOCK),
    **dict.fromkeys(INTEGER_FORMS, ACTIVATION.itemsize),
    "bf16_pairs": 2 * ACTIVATION_BLOCK,
    "f16_split": 4 * ACTIVATION_BLOCK,
}
"""Bytes of a block of activations by form."""

LINEAR = record(
    "weight", "tile_bytes", "n_tiles", "n_blocks", "x", "x_stride", "out", "out_stride", "bias", "bias_stride",
    "residual", "n_groups", "starts", "x_group", "out_group",
)  # fmt: skip
"""`weight` in tiles, times `x`, rows `x_stride` bytes apart, each of n_blocks blocks of the weight's format; `bias` is
float32 [n_tiles * 16]; `residual`, which may be 0, lies like `out` and is added to it.
With `starts`, int64 [n_groups + 1], there are n_groups weights one after another, and group i's is multiplied by rows
starts[i] to starts[i + 1] - 1; their biases are `bias_stride` bytes apart. Without `starts`, group i's is multiplied by
the part of each row that begins `x_group` * i bytes after `x`, and the result is that of `out_group` * i."""
