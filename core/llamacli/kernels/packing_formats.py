"""Packed weight formats: memory layout for the matrix kernels.

A matrix (n_out, n_in) is packed in tiles of 16 rows; a tile is a sequence of blocks along the columns. Within a
block, 16 rows lie side by side, one a vector lane, so that neither a matrix-vector nor a matrix-matrix product ever
sums across lanes. Rows and columns that do not fill a tile or a block are zero.

Activations are rounded as llama.cpp rounds them for each format, so that results agree to the last digits that float32
has: float16 and bfloat16 weights take activations of their own precision, formats of small integers take int8. Codes of
integers are unsigned, since the dot product of x86 multiplies unsigned by signed bytes; a bias is taken out by way of
the sum of the activations. (See `ir.dot_bias` for ARM.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels import ir
from llamacli.kernels.layout import CODE_BIAS
from llamacli.quantization import TensorType

ROWS = 16

Bytes = npt.NDArray[np.uint8]


class Packing(Protocol):
    """Packed weight format."""

    @property
    def name(self) -> str:
        """Name, unique in this process and in the kernel cache."""

    @property
    def block(self) -> int:
        """Number of columns of 16 rows that are packed together."""

    @property
    def n_bytes(self) -> int:
        """Bytes of a block."""

    @property
    def activation(self) -> str:
        """Form of activations that it multiplies."""

    def load(self, b: ir.Builder, address: ir.Value, following: ir.Value | None = None) -> Any:
        """Emit the loads of a block.

        Returns a Block of integers, or an iterator of adjacent columns of floats. Meanwhile the block
        that `following` points to is prefetched to the second-level cache.
        """


# --- floats ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class FloatPacking:
    """Packed format of a float type.

    - `load_columns`: loads `adjacent` columns, which lie side by side in each row's lane. None where tiles of AMX load
      whole blocks.
    - `block`: a few columns, so that all widths fit; with AMX, those of a tile.
    """

    kind: TensorType
    item: type[np.generic]
    load_columns: Callable[[ir.Builder, ir.Value], Sequence[ir.Value]] | None
    activation: str = "f32"
    adjacent: int = 1
    block: int = 4

    @property
    def is_tiled(self) -> bool:
        """True for tiles of AMX."""
        return self.load_columns is None

    @property
    def name(self) -> str:
        """See Packing."""
        return self.kind.name + ("_tiles" if self.is_tiled else "")

    @property
    def n_bytes(self) -> int:
        """Bytes of a block of 16 rows."""
        return self.block * ROWS * np.dtype(self.item).itemsize

    def load(self, b: ir.Builder, address: ir.Value, following: ir.Value | None = None) -> Iterator[Sequence[ir.Value]]:
        """See Packing."""
        assert self.load_columns
        if following is not None:
            ir.prefetch(b, following, self.n_bytes, level=2)
        for column in range(0, self.block, self.adjacent):
            yield self.load_columns(b, ir.offset(b, address, column * self.n_bytes // self.block))


# --- integers --------------------------------------------------------------------------------------------------------


Term = tuple[ir.Value | None, ir.Value | None]


@attrs.frozen
class Group:
    """Group of 32 columns of 16 rows in registers.

    `codes` are 8 vectors of [16 rows][4 columns] unsigned bytes. `terms` are (scale, shift) of the columns, or of each
    half of them; None stands for a scale of 1, a shift of 0, or of 1 where the block has a shift_factor.
    """

    codes: list[ir.Value]
    terms: list[Term]


@attrs.frozen
class Block:
    """A block in registers: weight = factor * scale * (code - 2^bias_bits) + shift_factor * shift.

    Without bias_bits there is no bias; a factor of None is 1. Shifts without shift_factor are multiplied by factor.
    Codes are below 2^code_bits. Each group is loaded when it is asked for, so that few registers are in use at a time.
    chain: groups whose products are one sum of integers, which is below 2^22. is_direct: columns of one scale of
    activations have just one such sum, which is multiplied by a factor of at most 16 significant bits.
    pair_at: loads groups 2i and 2i + 1 for an i in a register, for code that loops over them; None if it cannot.
    terms: loads the terms of a group alone.
    """

    factor: ir.Value | None
    shift_factor: ir.Value | None
    bias_bits: int | None
    code_bits: int
    chain: int
    is_direct: bool
    groups: Iterator[Group]
    pair_at: Callable[[ir.Value], Iterator[Group]] | None
    terms: Callable[[int], list[Term]]


@attrs.frozen
class FieldKind:
    """Field type, such as a scale: storage and conversion.

    Stored in 1, 2 or 4 bytes (`item`); `load` gives its float32 value in registers, or several in a tuple.
    `exponent`: the bits that are all set in NaN and infinity; 0 if the type has neither.
    """

    item: type[np.generic] = attrs.field()
    load: Callable[[ir.Builder, ir.Value], Any]
    exponent: int = 0

    @item.validator
    def _check_item(self, _attribute: Any, item: type[np.generic]) -> None:
        if self.size not in (1, 2, 4):
            raise ValueError(f"a field is stored in 1, 2 or 4 bytes, not in the {self.size} of {item.__name__}")

    @property
    def size(self) -> int:
        """Size of a field in bytes."""
        return np.dtype(self.item).itemsize


class _Loads:
    def __init__(self, b: ir.Builder, kind: FieldKind, address: ir.Value):
        self._b, self._kind, self._address = b, kind, address
        self._loaded: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self._loaded:
            size = ROWS * self._kind.size
            self._loaded[i] = self._kind.load(self._b, ir.offset(self._b, self._address, i * size))
        return self._loaded[i]

    @property
    def narrow(self) -> Iterable[Any]:
        """Loaded values, if they have at most 16 significant bits."""
        return self._loaded.values() if self._kind.size <= 2 else ()


@attrs.frozen
class _Number:
    """Number of a field that a formula uses, or parts of it."""

    name: str
    number: int
    parts: tuple[Any, ...] = ()

    def __getitem__(self, part: Any) -> _Number:
        return _Number(self.name, self.number, (*self.parts, part))

    def __iter__(self) -> Iterator[_Number]:
        return iter((self[0], self[1]))


@attrs.frozen
class _Numbers:
    name: str
    first: int

    def __getitem__(self, i: int) -> _Number:
        return _Number(self.name, i - self.first)


Decode = Callable[..., None]
Factors = Callable[[dict[str, Any]], tuple[Any, Any]]
Terms = Callable[[dict[str, Any], int], list[tuple[Any, Any]]]
Marks = Callable[[dict[str, Any], int], Sequence[Any]]


@attrs.frozen(eq=False)
class IntegerPacking:
    """Packed format of integer codes with scales.

    - `groups`: groups of 32 columns in a block, 1 to 8.
    - `planes`: codes are stored in planes of 1, 2, 4 or 8 bits, lowest first.
    - `fields`: the scales of a block by name: their kind and how many there are.
    - `decode`: from one block of `file_bytes` bytes of a row, its codes, uint8 [32 * groups], and its fields one after
      another, as the bits that are stored, uint32. Compiled by Numba.
    - `decode_table`: makes the array that `decode` takes as its fourth argument, if it takes one.
    - `factors` and `terms`: from the fields' values, factor and shift_factor of a Block; from them and a group's
      number, the terms of the Group.
    - `table`: values of the codes, if not the codes themselves: 16 unsigned bytes.
    - `code_shift`: codes are multiplied by 2^code_shift, at no cost.
    - `marks`: from the fields' values and a group's number, a bit for each 8 columns; the first of `mark_offsets` is
      added to their codes where it is 0, the second where it is 1.
    - `name`: see Packing; given where the format is registered.

    Raises ValueError for descriptions that kernels cannot implement.
    """

    file_bytes: int
    groups: int
    planes: tuple[int, ...]
    fields: dict[str, tuple[FieldKind, int]]
    decode: Decode
    factors: Factors
    terms: Terms
    bias_bits: int | None = None
    table: tuple[int, ...] | None = None
    code_shift: int = 0
    marks: Marks | None = None
    mark_offsets: tuple[int, int] = (0, 0)
    decode_table: Callable[[], Bytes] | None = None
    name: str = ""

    def __attrs_post_init__(self) -> None:
        bits = sum(self.planes)
        if not 1 <= self.groups <= 8:
            raise ValueError(f"a block has 1 to 8 groups of 32 numbers, not {self.groups}")
        if not 1 <= bits <= 8 or any(plane not in (1, 2, 4, 8) for plane in self.planes):
            raise ValueError(f"planes of 1, 2, 4 or 8 bits make up codes of 1 to 8, not {self.planes}")
        if not self.fields:
            raise ValueError("a block has at least one field")
        if self.bias_bits is not None and not 0 <= self.bias_bits <= 7:
            raise ValueError(f"a bias is 2^0 to 2^7, not 2^{self.bias_bits}")
        if self.table is not None and (bits > 4 or len(self.table) != 16 or not set(self.table) <= set(range(256))):
            raise ValueError("a table has 16 unsigned bytes, for codes of 4 bits at the most")
        if self.table is not None and (self.code_shift or self.marks):
            raise ValueError("codes with a table are neither shifted nor marked")
        if not 0 <= self.code_shift < 8 or not all(0 <= n <= 127 for n in self.mark_offsets) or self.largest > 255:
            raise ValueError(
                f"codes of {bits} bits times 2^{self.code_shift} plus {self.mark_offsets} are not unsigned bytes"
            )

    @property
    def largest(self) -> int:
        """Largest code in registers."""
        if self.table is not None:
            return max(self.table)
        return (2 ** sum(self.planes) - 1) * 2**self.code_shift + max(self.mark_offsets)

    @property
    def activation(self) -> str:
        """See Packing.

        One scale for 256 activations where a block of weights has as many columns, else one for 32.
        """
        return "q8_K" if self.groups == 8 else "q8_0"

    @property
    def block(self) -> int:
        """Columns of a block."""
        return 32 * self.groups

    @property
    def n_bytes(self) -> int:
        """Bytes of a block of 16 rows.

        Its fields come first, then the codes of its groups, in the order in which they are read.
        """
        return self.field_bytes + self.groups * self.group_bytes

    @property
    def field_bytes(self) -> int:
        """Bytes of the fields of a block of 16 rows."""
        return ROWS * sum(kind.size * count for kind, count in self.fields.values())

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of a group of 16 rows."""
        return 64 * sum(self.planes)

    def load(self, b: ir.Builder, address: ir.Value, following: ir.Value | None = None) -> Block:
        """See Packing."""
        fields = self._load_fields(b, address)
        factor, shift_factor = self.factors(fields)
        (scale, shift), *more = self.terms(fields, 0)
        narrow = any(factor is field for loads in fields.values() for field in loads.narrow)
        is_plain = scale is None and not more and (shift is None or shift_factor is not None)
        shift_bits = 0 if shift is not None and shift_factor is None else self._bits_to_bias()
        unit = ir.constant(ir.F32X16, 2.0**-shift_bits)
        if shift_bits and scale is None:
            factor = unit if factor is None else b.fmul(factor, unit)

        def load_group(fields: dict[str, Any], group: int, place: ir.Value) -> Group:
            codes, terms = self._load_codes(b, place, shift_bits), self.terms(fields, group)
            if self.marks is not None:
                codes = self._add_marks(b, codes, self.marks(fields, group))
            if shift_bits:
                terms = [(scale if scale is None else b.fmul(scale, unit), shift) for scale, shift in terms]
            return Group(codes, terms)

        def load_groups() -> Iterator[Group]:
            lines = range(0, self.n_bytes, 64)
            for group in range(self.groups):
                if following is not None:  # a group's share: requests in one burst would hold up the loads
                    for line in lines[group * len(lines) // self.groups : (group + 1) * len(lines) // self.groups]:
                        ir.prefetch(b, ir.offset(b, following, line), 64, level=2)
                yield load_group(fields, group, ir.offset(b, address, self.field_bytes + group * self.group_bytes))

        def load_pair(pair: ir.Value) -> Iterator[Group]:
            start = b.mul(pair, ir.I64(2 * self.group_bytes))
            fields, share = self._load_fields(b, address, pair), self.n_bytes // 8
            for group in (0, 1):
                place = ir.offset(b, start, self.field_bytes + group * self.group_bytes)
                if following is not None:
                    ahead = b.add(following, b.mul(pair, ir.I64(2 * share)))
                    ir.prefetch(b, ir.offset(b, ahead, group * share), share, level=2)
                yield load_group(fields, group, b.add(address, place))

        bias_bits = None if self.bias_bits is None else self.bias_bits + shift_bits
        largest, bias = self.largest << shift_bits, 0 if bias_bits is None else 2**bias_bits
        shared = self.groups if self.activation == "q8_K" else 1
        chain = shared if is_plain and max(largest - bias, bias) <= CODE_BIAS else 1
        is_direct = narrow and is_plain and chain == shared
        return Block(
            factor, shift_factor, bias_bits, largest.bit_length(), chain, is_direct, load_groups(),
            load_pair if self._has_pairs else None, lambda group: self.terms(fields, group),
        )  # fmt: skip

    @property
    def _has_pairs(self) -> bool:
        """True if each two groups use the next numbers of each field."""
        if self.groups != 8 or any(count > 1 and count % 4 for _, count in self.fields.values()):
            return False

        def used(group: int, pair: int) -> list[Any]:
            fields = {name: _Numbers(name, pair * count // 4 * (count > 1)) for name, (_, count) in self.fields.items()}
            return [self.terms(fields, group), self.marks and self.marks(fields, group)]

        try:
            return all(used(group, group // 2) == used(group % 2, 0) for group in range(8))
        except TypeError:  # formulas that compute with the numbers
            return False

    def _load_fields(self, b: ir.Builder, address: ir.Value, pair: ir.Value | None = None) -> dict[str, Any]:
        """Fields of a block.

        With a pair of groups, numbers count from the fields of the pair.
        """
        at = 0
        fields: dict[str, Any] = {}
        for name, (kind, count) in self.fields.items():
            place = ir.offset(b, address, at)
            if pair is not None and count > 1:
                place = b.add(place, b.mul(pair, ir.I64(ROWS * kind.size * count // 4)))
            fields[name] = _Loads(b, kind, place)
            at += ROWS * kind.size * count
        return fields

    def _bits_to_bias(self) -> int:
        """Number of bits that shift codes so that their bias is CODE_BIAS."""
        if self.bias_bits is None or self.marks is not None or not ir.multiplies_any_bytes():
            return 0
        bits = CODE_BIAS.bit_length() - 1 - self.bias_bits
        return bits if self.largest << bits < 256 else 0

    def _load_codes(self, b: ir.Builder, address: ir.Value, shift_bits: int) -> list[ir.Value]:
        """Load the codes of a group, times 2^shift_bits."""
        codes: list[ir.Value] = []
        start, lowest = 0, self.code_shift + (0 if self.table else shift_bits)
        for bits in self.planes:
            plane = [ir.load(b, ir.offset(b, address, start + 64 * i), ir.I8X64) for i in range(bits)]
            parts = [ir.shift_left(b, vector, lowest - bits * part) for part in range(8 // bits) for vector in plane]
            if bits < 8:
                parts = [b.and_(part, ir.constant(ir.I8X64, (2**bits - 1) << lowest)) for part in parts]
            codes = [b.or_(low, high) for low, high in zip(codes, parts, strict=True)] if codes else parts
            start, lowest = start + 64 * bits, lowest + bits
        if self.table is None:
            return codes
        table = tuple(entry << shift_bits for entry in self.table)
        return [ir.look_up(b, table, code) for code in codes]

    def _add_marks(self, b: ir.Builder, codes: list[ir.Value], marks: Sequence[ir.Value]) -> list[ir.Value]:
        """Add an offset to the codes of each 8 columns, two vectors."""
        off, on = (ir.constant(ir.I32X16, offset * 0x01010101) for offset in self.mark_offsets)
        offsets = [b.bitcast(b.select(mark, on, off), ir.I8X64) for mark in marks for _ in range(2)]
        return [b.add(code, offset) for code, offset in zip(codes, offsets, strict=True)]


@attrs.frozen
class TiledPacking:
    """Integers that tiles of AMX multiply, packed as for registers."""

    integers: IntegerPacking

    @property
    def name(self) -> str:
        """See Packing."""
        return f"{self.integers.name}_tiles"

    @property
    def block(self) -> int:
        """See Packing."""
        return self.integers.block

    @property
    def n_bytes(self) -> int:
        """See Packing."""
        return self.integers.n_bytes

    @property
    def activation(self) -> str:
        """See Packing."""
        return "bf16_pairs"

    def load(self, b: ir.Builder, address: ir.Value, following: ir.Value | None = None) -> Block:
        """See Packing."""
        return self.integers.load(b, address, following)


INTEGER_PACKINGS: dict[TensorType, IntegerPacking] = {}
"""Packings by tensor type, as `ggml_packings.integer_format` registers them."""
