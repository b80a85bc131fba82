"""Values of every op, and their comparison with a dump of llama.cpp's.

Ops run one by one in NumPy; the weights of one op at a time are in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.architecture import trace
from llamacli.engine import QuantMode
from llamacli.engine.floats import load_floats
from llamacli.errors import InvalidRequestError, plugin_errors
from llamacli.graph import Graph, Value
from llamacli.inputs import Inputs
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.loaders import ModelFile, open_model_file
from llamacli.media.encoder import MediaEncoder, Medium, RecordedEncoder, content_of, projector_of
from llamacli.ops.base import Op, verb_of
from llamacli.ops.run import Run, Span
from llamacli.plugins import Plugins, installed_plugins
from llamacli.tokenizer import tokenizer_from_metadata

Rows = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class OpRecord:
    """Op of a forward pass.

    `layer` is the block whose tensors were read last, None before the first; `tensors` are those that it reads, and
    `inputs` the numbers of the ops whose results it reads.
    """

    number: int
    verb: str
    layer: int | None
    tensors: tuple[str, ...]
    inputs: tuple[int, ...]
    width: int


@attrs.frozen(eq=False)
class OpValues:
    """Result of an op, float32 [n_tokens, width].

    `others` are these numbers in other orders: of patches, from left to right and from top to bottom, and transposed.
    """

    op: OpRecord
    rows: Rows
    others: tuple[Rows, ...] = ()

    @property
    def norm(self) -> float:
        """Root of the sum of squares."""
        return float(np.sqrt(np.sum(np.square(self.rows, dtype=np.float64))))


@attrs.frozen(eq=False)
class Recorded:
    """Recorded forward pass of a file; of a mmproj file with `encoder`."""

    file: ModelFile
    config: Any
    graph: Graph
    ops: tuple[OpRecord, ...]
    encoder: MediaEncoder | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], plugins: Plugins | None = None) -> Recorded:
        """Record the forward pass of a file; raises what `load_model` raises."""
        plugins = plugins or installed_plugins()
        file = open_model_file(path, plugins.loaders())
        if file.metadata.get("general.architecture") == "clip":
            encoder = plugins.media_encoder(projector_of(file.metadata))
            found = RecordedEncoder.of(encoder, file)
            return cls(found.file, found.config, found.graph, tuple(_records(found.graph.ops)), encoder)
        architecture = plugins.resolve(file.metadata)
        with plugin_errors(f"architecture {architecture.name!r}"):
            config = architecture.configure(file.metadata)
            graph = trace(architecture, config, architecture.tensors(config).bind(file))
        return cls(file, config, graph, tuple(_records(graph.ops)))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return tokenizer_from_metadata(self.file.metadata).encode(text)

    def values(self, tokens: Sequence[int]) -> list[OpValues]:
        """Run the ops on a prompt of a language model.

        Ops without a result, such as `store`, are left out. Raises InvalidRequestError for a token that is not in the
        vocabulary, without tokens, or for a model with an encoder.
        """
        if self.encoder is not None:
            raise InvalidRequestError(f"{self.file.path}: it is a media encoder: it has no tokens")
        if self.graph.n_encoder:
            raise InvalidRequestError("an encoder and a decoder have a text each: values of one prompt cannot be shown")
        if not tokens or not all(0 <= token < self.config.n_vocab for token in tokens):
            raise InvalidRequestError(f"tokens must be ids from 0 to {self.config.n_vocab - 1}, not {list(tokens)}")
        return self._run(Inputs.of(np.array(tokens, np.int32)), None)

    def values_of_medium(self, medium: Medium) -> list[OpValues]:
        """Run the ops on the last tile of a picture or sound.

        Raises InvalidRequestError for a language model, MediaError for a medium that the encoder does not read.
        """
        if self.encoder is None:
            raise InvalidRequestError(f"{self.file.path}: it is a language model, which reads no media by itself")
        content = content_of(self.encoder, str(self.file.path), medium)
        tile = [part for part in self.encoder.layout(content, self.config) if not isinstance(part, str)][-1]
        return self._run(*self.encoder.inputs(tile, self.config))

    def _run(self, inputs: Inputs, order: npt.NDArray[np.int64] | None) -> list[OpValues]:
        ids = inputs.ids
        sequence = KVSequence(KVPool(KVLayout.of(self.graph.states, "f32", self.graph.recurrent)), len(ids))
        sequence.reserve(0, len(ids))
        values: dict[Value, Rows] = {}

        def weights(tensor: object) -> npt.NDArray[np.float64]:
            return load_floats(tensor, self.file, QuantMode.FP32)  # type: ignore[arg-type]  # Run gives tensors alone

        span = Span(sequence, 0, len(ids), inputs=inputs if order is not None else None)
        run = Run(ids, span, self.graph.states, values, weights)
        found, merged = [], dict[Value, int]()
        for op, record in zip(self.graph.ops, self.ops, strict=True):
            with plugin_errors(f"verb {record.verb}"):
                values[op.out] = np.asarray(op.compute(run), np.float32)
            if op.out.width:
                merged.update({op.out: op.n_merged} if op.n_merged > 1 else {})
                size = max((merged.get(value, 1) for value in (op.out, *op.inputs())), default=1)
                merged[op.out] = size
                rows = values[op.out][size - 1 :: size]
                others = () if order is None else self._in_other_orders(rows, inputs, order)
                found.append(OpValues(record, rows, others))
        return found

    def _in_other_orders(self, rows: Rows, inputs: Inputs, order: npt.NDArray[np.int64]) -> tuple[Rows, ...]:
        """Rows of patches, or of tokens, as llama.cpp may have them.

        Those of a class token's group are behind all others, of which llama.cpp has one or none.
        """
        assert inputs.positions is not None
        n = len(inputs.ids) - self.config.n_behind
        numbers = inputs.positions[:n, 0] if len(rows) == len(inputs.ids) else order
        ordered = np.concatenate([rows[np.argsort(numbers, kind="stable")], rows[len(numbers) :]])
        found = [
            part[:stop] for part in (rows, ordered) for stop in sorted({len(numbers), len(numbers) + 1, len(rows)})
        ]
        return *found, *(part.T for part in found)


def _records(ops: Sequence[Op]) -> Iterable[OpRecord]:
    numbers, layer = {op.out: i for i, op in enumerate(ops)}, None
    for i, op in enumerate(ops):
        tensors = tuple(tensor.name for tensor in op.tensors())
        blocks = [int(found[1]) for name in tensors if (found := re.match(r"(?:v\.)?blk\.(\d+)\.", name))]
        layer = blocks[-1] if blocks else layer
        inputs = tuple(numbers[value] for value in op.inputs())
        yield OpRecord(i, verb_of(op), layer, tensors, inputs, op.out.width)


# --- dumps of llama.cpp ----------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class DumpedTensor:
    """Tensor as llama.cpp's `llama-eval-callback` prints it.

    `shape` is in ggml's order, fastest first. `numbers` are those that are printed, with their places in the whole
    tensor; `sources` are the names of the operands.
    """

    name: str
    op: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    places: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.float64]


_HEADER = re.compile(r"^\w+:\s+(.+?) = \((\w+)\)\s+(\S.*?)\((.*)\) = \{([\d, ]+)\}\s*$")
_SOURCE = re.compile(r"([^,{}]+?)\{[\d, ]*\}")


def read_dump(path: str | os.PathLike[str]) -> list[DumpedTensor]:
    """Read the output of `llama-eval-callback`.

    Lines of other programs are skipped. Raises InvalidRequestError if it holds no tensor, or another number of values
    than a tensor has.
    """
    text = Path(path).read_text("utf-8", "replace")
    found: list[DumpedTensor] = []
    header: re.Match[str] | None = None
    body: list[str] = []
    for line in [*text.splitlines(), "sum = 0"]:
        if match := _HEADER.match(line):
            header, body = match, []
        elif line.strip().startswith("sum =") and header:
            found.append(_dumped(header, body, path))
            header = None
        elif header:
            body.append(line)
    if not found:
        raise InvalidRequestError(f"{path}: no tensor as llama-eval-callback prints them was found")
    return found


def _dumped(header: re.Match[str], body: list[str], path: object) -> DumpedTensor:
    name, _, op, sources, sizes = header.groups()
    shape = tuple(int(size) for size in sizes.split(","))
    lines = [line for line in body if re.search(r"\[.*\d.*\]|\bnan\b|\binf\b", line)]
    numbers = [float(x) for line in lines for x in re.findall(r"-?(?:\d+\.\d+|nan|inf)", line)]
    per_row = len(re.findall(r"-?(?:\d+\.\d+|nan|inf)", lines[0])) if lines else 0
    shown = [_shown(shape[0], min(per_row, 6) if shape[0] > 6 else shape[0])] + [
        _shown(size, 6 if axis < 2 else size) for axis, size in enumerate(shape[1:])
    ]
    strides = np.cumprod([1, *shape[:-1]])
    grids = np.meshgrid(*[np.array(axis) * stride for axis, stride in zip(shown, strides, strict=True)], indexing="ij")
    places = np.sum(grids, axis=0).transpose().reshape(-1) if grids else np.empty(0, np.int64)
    if len(places) != len(numbers):
        raise InvalidRequestError(
            f"{path}: tensor {name} of shape {shape} has {len(numbers)} numbers, not {len(places)}"
        )
    operands = tuple(source.strip() for source in _SOURCE.findall(sources))
    return DumpedTensor(name, op, operands, shape, places, np.array(numbers))


def _shown(size: int, n_shown: int) -> list[int]:
    half = n_shown // 2
    return list(range(size)) if size <= n_shown else [*range(half), *range(size - half, size)]


# --- comparison ------------------------------------------------------------------------------------------------------

EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"


@attrs.frozen(eq=False)
class Match:
    """Op beside a tensor of a dump.

    It is the tensor that equals it, or the nearest. `status` is EQUAL, DIFFERENT if the dump has the product with the
    same weight and other numbers, or UNKNOWN if no tensor of the layer is like it.
    """

    values: OpValues
    tensor: DumpedTensor | None
    status: str


TOLERANCE = 1e-3
"""Difference that counts as equal, as a share of the root mean square; printed numbers are rounded besides."""

_OF_PICTURES = 4 * TOLERANCE
"""That of media encoders: llama.cpp rounds the pixels of patches to float16."""

_ROUNDED = 5.1e-5


def compare(values: Sequence[OpValues], dump: Sequence[DumpedTensor]) -> list[Match]:
    """Match ops with the tensors of a dump.

    Ops that read weights are compared with the tensors computed from the same; all others with those of their layer.
    """
    return [_match(value, dump) for value in values]


def _match(value: OpValues, dump: Sequence[DumpedTensor]) -> Match:
    sized = [tensor for tensor in dump if _fits(tensor, value)]
    weighed = [tensor for tensor in sized if set(tensor.sources) & set(value.op.tensors)]
    suffix = f"-{value.op.layer}"
    near = weighed or [
        tensor for tensor in sized if tensor.name.endswith(suffix) or not re.search(r"-\d+$", tensor.name)
    ]
    near += [tensor for tensor in sized if set(tensor.sources) & {other.name for other in weighed}]  # with its bias
    if not near:
        return Match(value, None, UNKNOWN)
    nearest = min(near, key=lambda tensor: _difference(value, tensor))
    if _difference(value, nearest) <= 1:
        return Match(value, nearest, EQUAL)
    in_table = bool(value.others) and value.op.verb.endswith("positions")  # llama.cpp adds them at once
    return Match(value, nearest, DIFFERENT if weighed and not in_table else UNKNOWN)


def _fits(tensor: DumpedTensor, value: OpValues) -> bool:
    """True if a tensor's size is that of some of the rows."""
    n_rows, rest = divmod(int(np.prod(tensor.shape)), value.op.width)
    return not rest and 0 < n_rows <= len(value.rows)


def _difference(value: OpValues, tensor: DumpedTensor) -> float:
    """Largest difference of printed numbers, in units of what is tolerated.

    Of all orders of rows it is the least.
    """
    share = _OF_PICTURES if value.others else TOLERANCE
    tolerated = _ROUNDED + share * float(np.sqrt(np.mean(np.square(value.rows, dtype=np.float64))))
    size = int(np.prod(tensor.shape))
    orders = [value.rows[-size // value.op.width :], *(rows for rows in value.others if rows.size == size)]
    found = (np.abs(rows.reshape(-1)[tensor.places] - tensor.numbers) for rows in orders)
    return min(float(np.max(differences, initial=0.0)) for differences in found) / tolerated


def first_difference(matches: Sequence[Match]) -> tuple[Match, list[Match]] | None:
    """First op that differs, with possible causes before it.

    None if there is none. Causes are the ops behind the last equal ones that it depends on, which have no counterpart
    in the dump.
    """
    found = next((match for match in matches if match.status == DIFFERENT), None)
    if found is None:
        return None
    by_number = {match.values.op.number: match for match in matches}
    suspects: dict[int, Match] = {}
    pending = list(found.values.op.inputs)
    while pending:
        match = by_number.get(pending.pop())
        if match and match.status != EQUAL and match.values.op.number not in suspects:
            suspects[match.values.op.number] = match
            pending += match.values.op.inputs
    return found, [suspects[number] for number in sorted(suspects)]
