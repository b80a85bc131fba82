"""LoRA adapters (Hu et al. 2021), as GGUF files.

They are low-rank changes of a model's matrices: as in llama.cpp, a matrix W becomes W + scale * alpha / rank * B @ A.
The matrices themselves stay as they are. The graph gets the changes, and is compiled again over the same weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from llamacli.engine.base import Program
from llamacli.errors import InvalidRequestError, ModelFormatError, expect_path, expect_type
from llamacli.gguf import GGUFFile, Metadata, TensorInfo, open_gguf
from llamacli.graph import Graph, Tensor
from llamacli.ops.base import verb_of
from llamacli.ops.embed import Embed
from llamacli.ops.values import LowRank, LowRanks
from llamacli.util.numbers import is_real

_log = logging.getLogger(__name__)

Shape = tuple[int, ...]

_SUFFIXES = (".lora_a", ".lora_b")
_EMBEDDINGS = "token_embd.weight"
_INVOCATION = "adapter.alora.invocation_tokens"
_SHOWN = 8


@attrs.frozen(eq=False)
class Adapter:
    """LoRA adapter that a model has loaded.

    - `path`: its file; `metadata`: every key of it.
    - `alpha`: `adapter.lora.alpha`, by which changes are scaled; 0: they are not.
    - `digest`: hash of its tensors and alpha, by which saved states know it.
    - `n_bytes`: size of its tensors in the file.
    """

    path: Path
    metadata: Metadata = attrs.field(repr=False)
    alpha: float
    digest: str
    n_bytes: int
    _pairs: Mapping[str, tuple[Tensor, Tensor]] = attrs.field(repr=False)
    _matrices: Mapping[Tensor, Any] = attrs.field(repr=False, factory=dict)

    def changes(self, tensor: Tensor, number: int, *, by_token: bool) -> LowRanks:
        """Low-rank changes of a tensor of the model: one, or none.

        `number` is the adapter's among those of the program. `by_token` is true for a table of embeddings, whose `a`
        has a row a token.
        """
        if tensor.name not in self._pairs or by_token != _is_table(tensor.name):
            return ()
        a, b = self._pairs[tensor.name]
        *stack, n_out, n_in = _matrix_shape(tensor.shape)
        rank = b.shape[-1]
        ratio = self.alpha / rank if self.alpha else 1.0
        if by_token:
            return (LowRank(a, b, ratio, number),)
        if n_in != a.shape[-1]:  # the forward pass uses the tensor in another shape
            return ()
        a = attrs.evolve(a, shape=(*stack, *a.shape[-2:]), group=tensor.group)
        whole = tensor.whole and (*tensor.whole[:-1], rank)
        b = attrs.evolve(b, shape=(*stack, n_out, rank), first_row=tensor.first_row, group=tensor.group, whole=whole)
        return (LowRank(a, b, ratio, number),)


Adapters = tuple[tuple[Adapter, float], ...]
"""Adapters with their scales; one of scale 0 changes nothing."""

AdaptersLike = Iterable[Adapter | tuple[Adapter, float]]
"""Adapters, with or without a scale."""


def checked_adapters(adapters: AdaptersLike) -> Adapters:
    """Check adapters and their scales.

    A scale is 1 unless it is given. Those with scale 0 change nothing and are left out; the others are sorted, so that
    results do not depend on the order. Raises InvalidRequestError for a scale that is not a finite number, and for an
    adapter that is there twice.
    """
    expect_type(adapters, Iterable, "adapters", "a list of adapters of load_adapter")
    found: dict[str, tuple[Adapter, float]] = {}
    for one in adapters:
        adapter, scale = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        if not isinstance(adapter, Adapter):
            raise InvalidRequestError(f"adapters are those of load_adapter, or pairs with a scale, not {one!r}")
        scale = checked_scale(scale, f"the scale of the adapter {adapter.path}")
        if adapter.digest in found:
            raise InvalidRequestError(f"the adapter {adapter.path} is there twice: give the sum of the scales")
        found[adapter.digest] = adapter, scale
    return tuple(found[digest] for digest in sorted(found) if found[digest][1])


def checked_scale(scale: object, name: str) -> float:
    """Check the scale of an adapter; returns it.

    Raises InvalidRequestError that begins with the name unless it is a finite number.
    """
    if not is_real(scale) or not math.isfinite(scale):
        raise InvalidRequestError(f"{name} must be a finite number, not {scale!r}")
    return float(scale)


def key_of(adapters: Adapters) -> str:
    """Text that is equal for adapters that compute the same, "" for none."""
    return ",".join(f"{adapter.digest}:{scale!r}" for adapter, scale in adapters if scale)


def without_scales(adapters: Adapters) -> tuple[Adapter, ...]:
    """The adapters alone, on which the compiled program depends."""
    return tuple(adapter for adapter, _ in adapters)


def adapted_program(program: Program, adapters: Sequence[Adapter]) -> Program:
    """Program with the changes of adapters.

    Their scales are given with each batch (`Span.adapter_scales`).
    """
    matrices = {tensor: matrix for adapter in adapters for tensor, matrix in adapter._matrices.items()}
    return program.recompiled(_adapted(program.graph, adapters), matrices)


def load_adapter(
    path: str | os.PathLike[str], program: Program, architecture: str, shapes: Mapping[str, Shape]
) -> Adapter:
    """Load a LoRA adapter for a model.

    The model is given by its program, its architecture and the shapes of its file's tensors. Raises ModelFormatError,
    naming the key or tensor, for a file that is no LoRA adapter, is of another architecture, or has tensors that do not
    fit the model.
    """
    expect_path(path, "the path of an adapter")
    if os.path.isdir(path):
        raise ModelFormatError(f"{path}: a folder: `llamacli convert FOLDER OUT` makes a file of a PEFT adapter")
    with open_gguf(path) as file:
        alpha = _checked_alpha(file.metadata, architecture)
        pairs = _pairs(file, shapes)
        digest = _digest(file, alpha)
        mark = f"@{digest[:16]}"
        marked = {
            name: (Tensor(a.name + mark, _matrix_shape(a.shape)), Tensor(b.name + mark, _matrix_shape(b.shape)))
            for name, (a, b) in pairs.items()
        }
        n_bytes = sum(info.n_bytes for pair in pairs.values() for info in pair)
        adapter = Adapter(file.path, file.metadata, alpha, digest, n_bytes, marked)
        matrices = program.load(_used_tensors(file, program.graph, adapter), _Marked(file, mark))
        return attrs.evolve(adapter, matrices=matrices)


class _Marked:
    """Model file with a mark behind the names of its tensors.

    So the names of several files differ.
    """

    def __init__(self, file: GGUFFile, mark: str):
        self._file, self._mark = file, mark
        self.path, self.metadata = file.path, file.metadata
        self.tensors = {
            name + mark: attrs.evolve(info, shape=_matrix_shape(info.shape)) for name, info in file.tensors.items()
        }

    def data(self, name: str) -> Any:
        """See ModelFile."""
        return self._file.data(name.removesuffix(self._mark))

    def release(self, name: str) -> None:
        """See ModelFile."""
        self._file.release(name.removesuffix(self._mark))

    def close(self) -> None:
        """See ModelFile."""
        self._file.close()


def _adapted(graph: Graph, adapters: Sequence[Adapter]) -> Graph:
    def of_matrix(tensor: Tensor) -> LowRanks:
        return tuple(change for i, one in enumerate(adapters) for change in one.changes(tensor, i, by_token=False))

    def of_table(tensor: Tensor) -> LowRanks:
        return tuple(change for i, one in enumerate(adapters) for change in one.changes(tensor, i, by_token=True))

    return graph.with_ops([op.adapted(of_table if isinstance(op, Embed) else of_matrix) for op in graph.ops])


def _used_tensors(file: GGUFFile, graph: Graph, adapter: Adapter) -> set[Tensor]:
    """Tensors of an adapter that ops of the adapted graph read.

    Changes of tensors that nothing reads, such as keys of layers that use those of others, are left out. Raises
    ModelFormatError if an op cannot have the changes, or if there are no others. An output layer that is the table of
    embeddings stays as it is: the changes are those of the embeddings.
    """
    used, problems = set[Tensor](), list[str]()
    for op, adapted in zip(graph.ops, _adapted(graph, [adapter]).ops, strict=True):
        read = {tensor.name for tensor in adapted.tensors()}
        used |= {*adapted.tensors()} - {*op.tensors()}
        for name in {tensor.name for tensor in op.tensors()} & adapter._pairs.keys():
            if adapter._pairs[name][0].name not in read and (isinstance(op, Embed) or not _is_table(name)):
                problems.append(f"tensor {name}.lora_a changes {name}, which {verb_of(op)} reads: it cannot be adapted")
    missing = {tensor.name for pair in adapter._pairs.values() for tensor in pair} - {tensor.name for tensor in used}
    names = sorted(name.partition("@")[0] for name in missing)
    if not problems and not used:
        problems = [f"tensor {name} changes what the forward pass does not read" for name in names]
    if problems:
        raise _misfit(file, problems)
    for name in names:
        _log.warning("%s: tensor %s is left out: it changes what the forward pass does not read", file.path, name)
    return used


def _checked_alpha(metadata: Metadata, architecture: str) -> float:
    """Check the metadata of an adapter; its alpha, 0 for none."""
    for key, expected in (
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", architecture),
    ):
        found = metadata.get_str(key)
        if found != expected:
            raise ModelFormatError(
                f"{metadata.source}: {key} is {found!r}, and that of a LoRA adapter of this model is {expected!r}"
            )
    if _INVOCATION in metadata:
        raise ModelFormatError(
            f"{metadata.source}: {_INVOCATION}: adapters that tokens activate (aLoRA) are not supported"
        )
    return metadata.get_float("adapter.lora.alpha", default=0.0)


def _is_table(name: str) -> bool:
    return name.endswith(_EMBEDDINGS)


def _matrix_shape(shape: Shape) -> Shape:
    """Shape with at least two dimensions."""
    return (1,) * (2 - len(shape)) + tuple(shape)


def _pairs(file: GGUFFile, shapes: Mapping[str, Shape]) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Pairs of tensors, A and B, by the tensor that they change.

    Raises ModelFormatError for tensors that do not fit the model. Norms are left out, as llama.cpp does.
    """
    problems, found = list[str](), dict[str, dict[str, TensorInfo]]()
    for name, info in file.tensors.items():
        stem, suffix = name[:-7], name[-7:]
        if suffix in _SUFFIXES:
            found.setdefault(stem, {})[suffix] = info
        elif name.endswith("_norm.weight"):
            _log.warning("%s: tensor %s is left out: adapters change matrices only", file.path, name)
        else:
            problems.append(f"tensor {name} ends in neither {' nor '.join(_SUFFIXES)}")
    for stem, parts in found.items():
        if missing := [stem + suffix for suffix in _SUFFIXES if suffix not in parts]:
            problems.append(f"tensor {missing[0]} is missing beside {next(iter(parts.values())).name}")
        elif stem not in shapes:
            problems.append(f"tensor {stem}.lora_a changes {stem}, which the model does not have")
        elif problem := _shape_problem(stem, parts[".lora_a"], parts[".lora_b"], shapes[stem]):
            problems.append(problem)
    if problems:
        raise _misfit(file, problems)
    if not found:
        raise ModelFormatError(f"{file.path}: the adapter has no tensors")
    return {stem: (parts[".lora_a"], parts[".lora_b"]) for stem, parts in found.items()}


def _shape_problem(stem: str, a: TensorInfo, b: TensorInfo, shape: Shape) -> str:
    """Message about wrong shapes of a pair, "" for right ones."""
    *stack, n_out, n_in = _matrix_shape(shape)
    (*stack_a, rows_a, columns_a), (*stack_b, rows_b, rank_b) = _matrix_shape(a.shape), _matrix_shape(b.shape)
    if _is_table(stem):  # a row of A for each token, and B from the rank to a row's width
        rank_a, fits = columns_a, (rows_a, rows_b) == (n_out, n_in)
        expected = f"({n_out}, rank) and ({n_in}, rank)"
    else:
        rank_a, fits = rows_a, (columns_a, rows_b) == (n_in, n_out)
        first = "".join(f"{n}, " for n in stack)
        expected = f"({first}rank, {n_in}) and ({first}{n_out}, rank)"
    if stack_a != stack or stack_b != stack or not fits:
        return (
            f"tensors {a.name} {a.shape} and {b.name} {b.shape} do not fit {stem} {tuple(shape)}, expected {expected}"
        )
    if rank_a != rank_b:
        return f"tensor {a.name} has rank {rank_a}, and {b.name} has rank {rank_b}"
    return ""


def _misfit(file: GGUFFile, problems: Sequence[str]) -> ModelFormatError:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return ModelFormatError(f"{file.path}: " + "; ".join([*problems[:_SHOWN], *more]))


def _digest(file: GGUFFile, alpha: float) -> str:
    """Hexadecimal hash of what an adapter computes."""
    digest = hashlib.sha256(repr(alpha).encode())
    for name in sorted(file.tensors):
        info = file.tensors[name]
        digest.update(repr((name, tuple(info.shape), int(info.type))).encode())
        digest.update(file.data(name).data)
    return digest.hexdigest()
