"""Weights packed for kernels, in parallel, from a model file."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from enum import IntEnum

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.base import QuantMode, expect_finite
from llamacli.engine.floats import REQUANTIZED, load_floats
from llamacli.engine.packed_copies import NewCopy, PackedCopy, Reader
from llamacli.engine.packed_copies.format import paged
from llamacli.engine.placement import place
from llamacli.errors import PluginError, plugin_errors
from llamacli.graph import Graph, Tensor
from llamacli.kernels.embedding import look_up
from llamacli.kernels.matrix import Matrix
from llamacli.kernels.packing import pack, pack_kernel
from llamacli.kernels.packing_formats import ROWS, Packing
from llamacli.kernels.registry import packing_of, packings
from llamacli.kernels.team import Team
from llamacli.loaders import ModelFile
from llamacli.quantization import FORMATS, TensorType, dequantize, quantize
from llamacli.util.memory import anonymous

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22
"""Approximate bytes of a tensor, in float32, that are packed at a time.

In between, interrupts are handled and the file's pages are released: they would double the memory of a large tensor.
"""

_TARGETS = {QuantMode.FP32: TensorType.F32, **REQUANTIZED}

_PLAIN = (TensorType.F64, TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64)
"""Types of plain numbers without kernels, kept as float32."""


class PackedWeights:
    """Weights of a model as kernels read them.

    Each tensor is loaded once: `file` is read in the `modes` of its tensors. `loaded` are matrices that are not in it.
    Matrices in `copy` are not packed again; `copyable` are those loaded so far, by their names in a copy. With
    `new_copy`, matrices are packed into it. `watch` watches over the file that they are mapped from, None for none;
    `reader` reads it ahead.
    """

    def __init__(
        self,
        file: ModelFile,
        modes: Mapping[Tensor, QuantMode],
        team: Team,
        loaded: Mapping[Tensor, Matrix] | None = None,
        copy: PackedCopy | None = None,
        new_copy: NewCopy | None = None,
    ):
        self._file, self._modes, self._team, self._copy, self._new_copy = file, modes, team, copy, new_copy
        self.copyable: dict[str, Matrix] = {}
        self.watch = new_copy.watch if new_copy else copy.watch if copy else None
        self.reader = Reader()
        self._repacked: set[int] = set()
        self._matrices: dict[Tensor, Matrix] = dict(loaded or {})
        self._vectors: dict[Tensor, npt.NDArray[np.float32]] = {}
        self._floats: dict[Tensor, npt.NDArray[np.float64]] = {}

    def matrix(self, tensor: Tensor) -> Matrix:
        """Matrix packed for kernels."""
        if tensor not in self._matrices:
            self._matrices[tensor] = self._load_matrix(tensor)
        return self._matrices[tensor]

    def _load_matrix(self, tensor: Tensor) -> Matrix:
        mode, source = self._modes[tensor], self._file.tensors[tensor.name].type
        layout = layout_of(tensor, self._file, mode)
        if layout.name in self.copyable:
            return self.copyable[layout.name]
        packed = self._copy.get(layout.name, layout.packed_shape) if self._copy else None
        if self._copy and packed is not None:
            stack = self._copy.stacks.get(layout.name)
            matrix = Matrix(layout.kind, packed, layout.shape, layout.packing, stack)
        elif self._new_copy and layout.name:
            memory = self._new_copy.allocate(layout.name, layout.packed_shape)
            matrix = load_matrix(tensor, self._file, mode, self._team, memory)
            stack = self._new_copy.seal(layout.name)
            matrix = attrs.evolve(matrix, packed=stack.data, stack=stack)
        else:
            matrix = load_matrix(tensor, self._file, mode, self._team)
        if layout.name:
            self.copyable[layout.name] = matrix
        if mode is QuantMode.AUTO and matrix.kind != source and source not in self._repacked:
            self._repacked.add(source)
            _log.warning("%s has no kernel of its own: such tensors are kept as %s", source.name, matrix.kind.name)
        return matrix

    def vector(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        """Vector or table in float32, see `load_rows`."""
        if tensor not in self._vectors:
            self._vectors[tensor] = load_rows(tensor, self._file)
        return self._vectors[tensor]

    def floats(self, tensor: Tensor) -> npt.NDArray[np.float64]:
        """Tensor in float64, for ops that run in NumPy."""
        if tensor not in self._floats:
            self._floats[tensor] = load_floats(tensor, self._file, self._modes[tensor])
        return self._floats[tensor]

    def extended(self, matrices: Mapping[Tensor, Matrix]) -> PackedWeights:
        """The weights loaded so far, and further matrices."""
        weights = PackedWeights(self._file, self._modes, self._team, {**self._matrices, **matrices})
        weights._vectors, weights._floats = self._vectors, self._floats
        weights.watch, weights.reader = self.watch, self.reader
        return weights

    def of_file(self, file: ModelFile, modes: Mapping[Tensor, QuantMode]) -> PackedWeights:
        """The weights loaded so far, and others of the model's file.

        The file was opened again.
        """
        weights = PackedWeights(file, modes, self._team, self._matrices)
        weights._vectors, weights._floats = dict(self._vectors), dict(self._floats)
        weights.watch, weights.reader = self.watch, self.reader
        return weights


def load_rows(tensor: Tensor, file: ModelFile) -> npt.NDArray[np.float32]:
    """Load a vector or table in float32, rows padded with zeros.

    For tensors that are added or scale. The last axis is padded to a multiple of 32. Raises ModelFormatError for
    numbers that are not finite.
    """
    info = file.tensors[tensor.name]
    values = tensor.rows_of(dequantize(file.data(tensor.name), info.type).reshape(info.shape))
    expect_finite(bool(np.isfinite(values).all()), tensor.name, file)
    return np.pad(values, (*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % 32)))


@attrs.frozen
class Layout:
    """Type and shapes of a packed tensor.

    `shape` is that of a matrix, (n_out, n_in), and `packed_shape` that of the packed bytes. `name` names the tensor in
    a packed copy; "" where a plugin's function converts it, of which a copy's key knows nothing.
    """

    name: str
    kind: IntEnum
    packing: Packing
    shape: tuple[int, int]
    packed_shape: tuple[int, int, int, int]


def layout_of(tensor: Tensor, file: ModelFile, mode: QuantMode) -> Layout:
    """Type and shapes of a tensor packed in a mode."""
    info = file.tensors[tensor.name]
    kind = target_type(info.type, mode)
    packing = packing_of(kind)
    assert packing
    n_out, n_in = (1, *tensor.shape)[-2:]
    *stack, stored_rows, _ = (1, *(tensor.whole or tensor.shape))
    n_groups = 1 if tensor.group is not None else math.prod(stack)
    packed_shape = n_groups, -(-n_out // ROWS), -(-n_in // packing.block), packing.n_bytes
    place = f"{tensor.name} {tensor.group} {tensor.first_row} {n_out} {n_in} {packing.name}"
    if stored_rows != (1, *info.shape)[-2]:
        place += f" of {stored_rows}"
    name = place if kind == info.type or info.type in tuple(TensorType) else ""
    return Layout(name, kind, packing, (n_out, n_in), packed_shape)


def packed_bytes(graph: Graph, file: ModelFile, modes: Mapping[Tensor, QuantMode]) -> int:
    """Bytes of the packed matrices of a graph, in whole pages each."""
    layouts = {layout_of(tensor, file, modes[tensor]) for op in graph.ops for tensor in op.matrices()}
    return sum(paged(math.prod(layout.packed_shape)) for layout in layouts)


def load_matrix(
    tensor: Tensor, file: ModelFile, mode: QuantMode, team: Team, memory: npt.NDArray[np.uint8] | None = None
) -> Matrix:
    """Load and pack a matrix, or one matrix an expert.

    Tensors of three dimensions have a matrix an expert. One dimension is a matrix of one row. `memory`, zeros in the
    packed shape, takes it; by default it is allocated. Raises ModelFormatError for numbers or scales that are not
    finite, PluginError where a plugin's packing is broken.
    """
    source, layout = file.tensors[tensor.name].type, layout_of(tensor, file, mode)
    kind, (n_out, n_in), n_tiles = layout.kind, layout.shape, layout.packed_shape[1]
    data = file.data(tensor.name)
    stored = file.tensors[tensor.name].shape
    stored_rows = (1, *(tensor.whole or tensor.shape))[-2]
    groups = slice(None) if tensor.group is None else slice(tensor.group, tensor.group + 1)
    raw = data.reshape(-1, stored_rows, data.shape[1])[groups, tensor.first_row : tensor.first_row + n_out]
    if stored[-1] != n_in or raw.shape[:2] != (layout.packed_shape[0], n_out):
        raise PluginError(f"{tensor.name}: {tensor.shape} cannot be read of a stored tensor {stored}")
    packed = memory
    if packed is None:
        packed = anonymous(math.prod(layout.packed_shape)).reshape(layout.packed_shape)
        place(packed, team.nodes)
    tiles_at_once = max(1, _CHUNK_BYTES // (4 * ROWS * n_in))
    if kind not in packings():
        with plugin_errors(f"compiling the packing of tensor type {kind.name}"):
            pack_kernel(kind).compile()
    for matrix, target in zip(raw, packed, strict=True):
        for tile in range(0, n_tiles, tiles_at_once):
            rows = matrix[tile * ROWS : (tile + tiles_at_once) * ROWS]
            if kind != source:
                rows = _converted(rows, source, kind)
            finite = pack(team, kind, rows, target[tile : tile + tiles_at_once], n_in)
            expect_finite(finite, tensor.name, file)
            file.release(tensor.name)
    result = Matrix(kind, packed, layout.shape, layout.packing)
    if kind not in packings():
        _expect_meaning(team, result, raw[0], tensor.name, file)
    return result


def _expect_meaning(team: Team, matrix: Matrix, raw: npt.NDArray[np.uint8], tensor: str, file: ModelFile) -> None:
    """Raise PluginError if a packing differs from the format's `dequantize`.

    Compares some rows of each tensor.
    """
    meant = dequantize(raw[:ROWS], matrix.kind)
    with plugin_errors(f"compiling the packing of tensor type {matrix.kind.name}"):
        found = look_up(team, matrix.kind, matrix.packed[0], np.arange(len(meant), dtype=np.int32))[:, : meant.shape[1]]
    if not np.allclose(found, meant, rtol=1e-5, atol=1e-6 * float(np.abs(meant).max())):
        raise PluginError(
            f"the packing of tensor type {matrix.kind.name} and its dequantize differ "
            f"on tensor {tensor!r} of {file.path}"
        )


def target_type(source: int, mode: QuantMode) -> IntEnum:
    """Tensor type in which a mode keeps tensors of type `source`."""
    if mode in _TARGETS:
        return _TARGETS[mode]
    if packing_of(source) is not None:
        return FORMATS[source].type
    return TensorType.F32 if source in _PLAIN else TensorType.Q8_0


def _converted(rows: npt.NDArray[np.uint8], source: int, kind: IntEnum) -> npt.NDArray[np.uint8]:
    values = dequantize(rows, source)
    if kind == TensorType.F32:
        return values.view(np.uint8)
    return quantize(np.pad(values, ((0, 0), (0, -values.shape[1] % 32))), kind)
