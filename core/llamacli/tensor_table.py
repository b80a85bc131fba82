"""Tensors that an architecture declares, and its parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from llamacli.errors import ModelFormatError, PluginError
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.loaders import ModelFile
from llamacli.util.numbers import is_integer

_INPUT_SCALE = ".input_scale"
"""Suffix of activation scales beside NVFP4 matrices, for units that multiply in 4 bits; no CPU code reads them."""


_CLASSIFIER = ("cls", "cls.norm", "cls.output")
"""Parameters of classifier heads: dense layer, norm, output layer."""


_SHOWN = 8
"""Largest number of mismatches that an error lists; a wrong number of layers gives hundreds."""


@attrs.frozen
class TensorSpec:
    """Expected tensor: shape, rows first, and `optional`.

    A file may lack an optional one, and have one of the `other` shape in its place. An `unused` tensor may be in files,
    but nothing reads it.
    """

    shape: tuple[int, ...]
    optional: bool = False
    unused: bool = False
    other: tuple[int, ...] | None = None

    def shape_of(self, found: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape with which a tensor of a file is read, else None."""
        shapes = (self.shape,) if self.other is None else (self.shape, self.other)
        return next((shape for shape in shapes if _without_ones(shape) == _without_ones(found)), None)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without its leading ones, which GGUF files may leave out."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return shape[first:]


class Params:
    """Parameters of a scope as attributes named as in GGUF.

    `params.attn_q` is a Param, or None where absent.
    """

    def __init__(self, found: dict[str, Param | None]):
        self._found = found

    def share(self, name: str, param: Param) -> None:
        """Set an absent parameter to one of another file."""
        self._found[name] = param

    def __getattr__(self, name: str) -> Any:
        try:
            return self._found[name]
        except KeyError:
            similar = difflib.get_close_matches(name, self._found, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise PluginError(f"{name!r} is not in the architecture's table of tensors{hint}") from None


class Weights(Params):
    """Parameters of a model.

    Parameters outside the blocks are attributes; `blk` are the blocks' in order. Blocks of other prefixes, `others`,
    are attributes too: `enc_blk` of `table.block("enc.blk")`. `nextn` are the blocks of multi-token-prediction
    heads, where these are read.
    """

    def __init__(
        self,
        found: dict[str, Param | None],
        blk: list[Params],
        nextn: Sequence[Params] = (),
        others: Mapping[str, list[Params]] | None = None,
    ):
        super().__init__(found)
        self.blk, self.nextn = blk, list(nextn)
        vars(self).update({prefix.replace(".", "_"): params for prefix, params in (others or {}).items()})


class TensorTable:
    """Tensors that an architecture reads. `table.add("attn_q", n_out, n_in)` adds `attn_q.weight`."""

    def __init__(self, *, unused: bool = False, nextn: bool = False) -> None:
        self._unused, self._nextn = unused or nextn, nextn
        self._specs: dict[str, TensorSpec] = {}
        self._fused: dict[str, tuple[str, ...]] = {}
        self._only_with: dict[str, str] = {}
        self._choices: list[tuple[tuple[str, ...], tuple[str, ...], bool]] = []
        self._full_names: set[str] = set()
        self._blocks: dict[str, TensorTable] = {}  # by prefix and number, such as "blk.0"

    def add(
        self,
        name: str,
        *shape: int,
        optional: bool = False,
        bias: bool = False,
        needs_bias: bool = False,
        scale: tuple[int, ...] | None = None,
        needs_scale: bool = False,
        other: tuple[int, ...] | None = None,
        only_with: str = "",
    ) -> None:
        """Add the parameter of `{name}.weight`; its attribute has `_` for dots.

        With `bias`, the file may also have `{name}.bias`, one float a row of the weight, or as many as a weight of one
        dimension has; it must have it if the parameter `needs_bias`. Any matrix may have `{name}.scale`, one number
        that multiplies its products, or one an expert; `scale` is another shape for it, which the file must have if
        the parameter `needs_scale`. The weight of a file may also have the `other` shape. Nothing depends on the
        parameter in a file without the one that it is `only_with`.
        """
        if only_with:
            self._only_with[name] = only_with
        self._specs[f"{name}.weight"] = TensorSpec(shape, optional, other=other)
        if bias or needs_bias:
            self._specs[f"{name}.bias"] = TensorSpec(
                shape if len(shape) == 1 else shape[:-1], optional=not needs_bias, other=other and other[:-1]
            )
        if scale is None and len(shape) > 1:
            scale = shape[:-2] or (1,)
        if scale is not None:
            self._specs[f"{name}.scale"] = TensorSpec(scale, optional=not needs_scale)

    def add_tensor(self, name: str, *shape: int, optional: bool = False) -> None:
        """Add a tensor by its full name.

        Such as `ssm_a` or `ssm_dt.bias`, which has no weight beside it. It is an attribute with dots replaced,
        `params.ssm_dt_bias`: a Param whose weight it is.
        """
        self._specs[name] = TensorSpec(shape, optional)
        self._full_names.add(name)

    def add_fused(self, name: str, *, bias: bool = False, needs_bias: bool = False, **parts: tuple[int, ...]) -> None:
        """Add parameters that files store separately or fused.

        Their shapes are given by name; fused, they lie one below the other in one tensor called `name`. Either way they
        are accessed by their own names. With `bias`, the file may have biases too, in the same way; it must have them
        if the parameters `needs_bias`.
        """
        for part, shape in parts.items():
            self.add(part, *shape, bias=bias, needs_bias=needs_bias)
        first = next(iter(parts.values()))
        n_rows = sum(shape[-2] for shape in parts.values())
        self.add(name, *first[:-2], n_rows, first[-1], bias=bias, needs_bias=needs_bias)
        self._fused[name] = tuple(parts)

    def choose(self, first: Sequence[str], second: Sequence[str], *, prefer: bool = True) -> None:
        """Add a choice: files have the parameters `first` or `second`.

        These are names that were added before. A file has the first ones if it has the first of them; then nothing
        depends on the second ones, as in llama.cpp. Otherwise it has the second ones, if any of them and none of the
        first. Tiny files have the first if `prefer`.
        """
        self._choices.append((tuple(first), tuple(second), prefer))

    def add_unused(self, name: str, *shape: int, kind: str = "weight") -> None:
        """Add a parameter that files may have but nothing depends on.

        Or its bias, as `kind`.
        """
        self._specs[f"{name}.{kind}"] = TensorSpec(shape, optional=True, unused=True)

    @property
    def unused(self) -> set[str]:
        """Full names of the tensors that nothing depends on."""
        return {name for name, spec in self.items() if spec.unused}

    def block(self, prefix: str = "blk", *, unused: bool = False, nextn: bool = False) -> TensorTable:
        """Add a block; its tensors are named `blk.{i}.{name}`.

        With another prefix, such as "enc.blk", they are `enc.blk.{i}.{name}`, and `weights.enc_blk[i]` has them.

        Files may have the tensors of an `unused` block, but nothing depends on them, and it is not among
        `weights.blk`. A `nextn` block, of a multi-token-prediction head, is unused but for the head.
        """
        number = sum(name.rpartition(".")[0] == prefix for name in self._blocks)
        return self._blocks.setdefault(f"{prefix}.{number}", TensorTable(unused=unused, nextn=nextn))

    @property
    def has_nextn(self) -> bool:
        """True if there are blocks of multi-token-prediction heads."""
        return any(block._nextn for block in self._blocks.values())

    def items(self, *, nextn: bool = False) -> Iterator[tuple[str, TensorSpec]]:
        """Full name and spec of every tensor.

        With `nextn`, tensors of multi-token-prediction heads are not unused.
        """
        unused = self._unused and not (nextn and self._nextn)
        for name, spec in self._specs.items():
            yield name, attrs.evolve(spec, optional=True, unused=True) if unused else spec
        for place, block in self._blocks.items():
            for name, spec in block.items(nextn=nextn):
                yield f"{place}.{name}", spec

    def fused(self) -> dict[str, tuple[str, ...]]:
        """Parts of parameters that files may store fused, by full names."""
        found = dict(self._fused)
        for place, block in self._blocks.items():
            for whole, parts in block.fused().items():
                found[f"{place}.{whole}"] = tuple(f"{place}.{part}" for part in parts)
        return found

    def shapes(self, *, optional: bool = True, fused: bool = False, nextn: bool = False) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a tiny file, by full name.

        With or without `optional` tensors, and those of multi-token-prediction heads, `nextn`; parameters that may be
        `fused` are either so or apart. Scales, classifier heads and unused tensors are left out.
        """
        parts = [part for names in self._fused.values() for part in names] if fused else [*self._fused]
        parts += [name for first, second, prefer in self._choices for name in (second if prefer else first)]
        left_out = {*parts, *_full_names(parts), *_full_names(_CLASSIFIER)}
        unused = self._unused and not (nextn and self._nextn)
        found = {
            name: spec.shape
            for name, spec in self._specs.items()
            if name not in left_out and not (spec.unused or unused)
            if (optional and not name.endswith(".scale")) or not spec.optional
        }
        for place, block in self._blocks.items():
            shapes = block.shapes(optional=optional, fused=fused, nextn=nextn)
            found |= {f"{place}.{name}": shape for name, shape in shapes.items()}
        return found

    def bind(self, file: ModelFile, *, nextn: bool = False, label: str = "") -> Weights:
        """Match the table with the tensors of a file.

        With `nextn`, tensors of multi-token-prediction heads are matched too. Names of parameters begin with `label`,
        as in a `LabelledFile`. Raises ModelFormatError with the first mismatches and their number: tensors that are
        missing, of another shape, or unknown.
        """
        others, ignored = set(self._not_chosen(file, "")), self.ignored(file)
        expected = {name: spec for name, spec in self.items(nextn=nextn) if name not in others | ignored}
        problems = [
            f"tensor {name} is missing, expected {spec.shape}"
            for name, spec in expected.items()
            if name not in file.tensors and not spec.optional
        ]
        for name, info in file.tensors.items():
            if name not in expected and name not in ignored:
                if name.endswith(_INPUT_SCALE) and f"{name.removesuffix(_INPUT_SCALE)}.weight" in expected:
                    continue
                problems.append(f"tensor {name} {info.shape} is not one that the architecture reads")
            elif name in expected and expected[name].shape_of(info.shape) is None:
                problems.append(f"tensor {name} has shape {info.shape}, expected {expected[name].shape}")
        if problems:
            more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise ModelFormatError(f"{file.path}: " + "; ".join(problems[:_SHOWN] + more + _sizes(file.metadata)))
        blocks: dict[str, list[Params]] = {}
        heads = []
        for place, block in self._blocks.items():
            if not block._unused:
                blocks.setdefault(place.rpartition(".")[0], []).append(Params(block._params(file, f"{place}.", label)))
            elif nextn and block._nextn:
                heads.append(Params(block._params(file, f"{place}.", label)))
        return Weights(self._params(file, "", label), blocks.pop("blk", []), heads, blocks)

    def _not_chosen(self, file: ModelFile, prefix: str) -> Iterator[str]:
        """Full names excluded by the file's choice of fused parameters.

        A file has either the parts or the whole; the names of the other are yielded.
        """
        for whole, parts in self._fused.items():
            others = parts if f"{prefix}{whole}.weight" in file.tensors else [whole]
            yield from (f"{prefix}{name}" for name in _full_names(others))
        for first, second, _ in self._choices:
            if not any(name in file.tensors for name in _prefixed(prefix, first)) and any(
                name in file.tensors for name in _prefixed(prefix, second)
            ):
                yield from _prefixed(prefix, first)
        for place, block in self._blocks.items():
            yield from block._not_chosen(file, f"{place}.")

    def ignored(self, file: ModelFile, prefix: str = "") -> set[str]:
        """Full names that nothing depends on, because of the file's other tensors."""
        found = {
            name
            for first, second, _ in self._choices
            if f"{prefix}{first[0]}.weight" in file.tensors
            for name in _prefixed(prefix, second)
        }
        for name, needed in self._only_with.items():
            if f"{prefix}{needed}.weight" not in file.tensors:
                found |= {*_prefixed(prefix, [name])}
        return found.union(*(block.ignored(file, f"{place}.") for place, block in self._blocks.items()))

    def _params(self, file: ModelFile, prefix: str, label: str) -> dict[str, Param | None]:
        def tensor(name: str) -> Tensor | None:
            full = prefix + name
            if full not in file.tensors:
                return None
            spec = self._specs[name]
            return None if spec.unused else Tensor(label + full, spec.shape_of(file.tensors[full].shape) or spec.shape)

        found: dict[str, Param | None] = {}
        for key in self._specs:
            if key in self._full_names:
                single = tensor(key)
                found[key.replace(".", "_")] = Param(single) if single else None
                continue
            name, kind = key.rsplit(".", 1)
            if kind == "weight":
                weight = tensor(key)
                param = Param(weight, tensor(f"{name}.bias"), tensor(f"{name}.scale")) if weight else None
                found[name.replace(".", "_")] = param
        for whole, parts in self._fused.items():
            if fused := found.pop(whole):
                n_rows = [self._specs[f"{part}.weight"].shape[-2] for part in parts]
                found |= zip(parts, fused.split(*n_rows), strict=True)
        return found


def _full_names(names: Sequence[str]) -> Iterator[str]:
    return (f"{name}.{kind}" for name in names for kind in ("weight", "bias", "scale"))


def _prefixed(prefix: str, names: Sequence[str]) -> Iterator[str]:
    return (f"{prefix}{name}" for name in (*names, *_full_names(names)))


def _sizes(metadata: Metadata) -> list[str]:
    """Hyperparameters read so far, on which expected shapes depend, as text."""
    prefix = f"{metadata.get('general.architecture')}."
    keys = sorted(key for key in metadata.consumed if key.startswith(prefix) and is_integer(metadata.get(key)))
    return [f"expected by {', '.join(f'{key} = {metadata[key]}' for key in keys)}"] if keys else []
