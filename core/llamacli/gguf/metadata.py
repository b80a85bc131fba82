"""Key-value metadata of a model file, with getters that check types."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, ModelFormatError

_Default = TypeVar("_Default")


_REQUIRED: Any = object()
"""Default that marks a required key."""


def shown(value: object) -> str:
    """Return the value's repr, truncated for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(cast(float, value))


class StringArray(Sequence[str]):
    """Array of strings that are decoded on access.

    Most strings of a vocabulary are never read. `data` holds each string after its 8-byte length, `ends` the end
    position of each one in it, int64 [n]. Bytes that are not UTF-8 become U+FFFD, so that a damaged string can still be
    shown.
    """

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: npt.NDArray[np.int64]):
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self._ends))[index]
        start = self._ends[i - 1] if i else 0
        return self._data[start + 8 : self._ends[i]].decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        data, start = self._data, 8
        for end in self._ends.tolist():
            yield data[start:end].decode(errors="replace")
            start = end + 8

    def spans(self) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the data, and the starts and stops of strings, int64 [n]."""
        starts = np.full_like(self._ends, 8)
        starts[1:] += self._ends[:-1]
        return self._data, starts, self._ends.copy()

    def last_places(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the last place of each text that is there."""
        wanted = {text: text.encode() for text in texts if text}
        data, starts, stops = self.spans()
        signs = (stops - starts) << 8 | np.frombuffer(data, np.uint8)[stops - 1]  # length and last byte
        places = np.flatnonzero(np.isin(signs, [len(text) << 8 | text[-1] for text in wanted.values()])).tolist()
        return {text: place for place in places if (text := self[place]) in wanted}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)} strings>"


class Metadata(Mapping[str, Any]):
    """Key-value pairs of a model file.

    Values are Python scalars, read-only numpy arrays, or sequences of str. The getters raise ModelFormatError, naming
    `source` (the file) and the key, when the key is missing and no default was given, when its value is of another
    type (a bool is not accepted as an int), or when it is out of range. A default is returned unchecked.

    `consumed` are the keys whose values have been read, so that a caller can list the keys that were ignored.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "metadata"):
        self._values, self.source = dict(values), source
        self.consumed: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.consumed.add(key)
        return self._values[key]

    def peek(self, key: str) -> Any:
        """Return the value under `key`, which does not become `consumed`."""
        return self._values[key]

    def override(self, values: Mapping[str, Any]) -> list[str]:
        """Replace or add keys; their full names.

        `{arch}` in a key stands for `general.architecture`. Raises InvalidRequestError for a value that is no int,
        float, bool or str, or of another type than that of the file.
        """
        full = {key.replace("{arch}", str(self._values.get("general.architecture"))): key for key in values}
        for name, key in full.items():
            value, present = values[key], self._values.get(name)
            if not isinstance(value, str | bool | int | float):
                raise InvalidRequestError(f"override of {name}: {shown(value)} is no int, float, bool or str")
            as_float = isinstance(present, float) and _is_int(value)
            if present is not None and type(present) is not type(value) and not as_float:
                raise InvalidRequestError(
                    f"override of {name}: {shown(value)} is of the type {type(value).__name__}, "
                    f"and the file has {shown(present)}"
                )
        self._values |= {name: values[key] for name, key in full.items()}
        return list(full)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Metadata of {self.source}: {len(self)} keys>"

    def get_int(
        self, key: str, default: _Default = _REQUIRED, minimum: int | None = None, maximum: int | None = None
    ) -> int | _Default:
        """Return the integer under `key`, between `minimum` and `maximum` inclusive."""
        value = self._get(key, default, _is_int, "an integer")
        return self._in_range(key, value, minimum, maximum) if key in self else default

    def get_float(
        self, key: str, default: _Default = _REQUIRED, minimum: float | None = None, maximum: float | None = None
    ) -> float | _Default:
        """Return the finite number under `key` as a float; integers are accepted."""
        value = self._get(key, default, _is_number, "a finite number")
        return self._in_range(key, float(value), minimum, maximum) if key in self else default

    def get_bool(self, key: str, default: _Default = _REQUIRED) -> bool | _Default:
        """Return the boolean under `key`."""
        return self._get(key, default, lambda value: isinstance(value, bool), "a boolean")

    def get_str(self, key: str, default: _Default = _REQUIRED) -> str | _Default:
        """Return the string under `key`."""
        return self._get(key, default, lambda value: isinstance(value, str), "a string")

    def get_ints(
        self,
        key: str,
        length: int,
        default: _Default = _REQUIRED,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> tuple[int, ...] | _Default:
        """Return the `length` integers under `key`; a single integer is repeated."""
        if key not in self and default is not _REQUIRED:
            return default
        items = self._items(key, length, _is_int, "integers", repeats=True)
        return tuple(self._in_range(key, item, minimum, maximum) for item in items)

    def get_floats(
        self, key: str, length: int, *, minimum: float | None = None, maximum: float | None = None
    ) -> tuple[float, ...]:
        """Return the `length` finite numbers under `key`; a single one is repeated."""
        items = self._items(key, length, _is_number, "finite numbers", repeats=True)
        return tuple(self._in_range(key, float(item), minimum, maximum) for item in items)

    def get_bools(self, key: str, length: int) -> tuple[bool, ...]:
        """Return the `length` booleans under `key`; integers 0 and 1 count too."""
        items = self._items(key, length, lambda item: isinstance(item, bool | int) and item in (0, 1), "booleans")
        return tuple(map(bool, items))

    def _get(self, key: str, default: Any, fits: Callable[[object], bool], expected: str) -> Any:
        if key not in self and default is not _REQUIRED:
            return default
        if not fits(value := self._required(key)):
            raise self._wrong(key, value, expected)
        return value

    def _items(
        self, key: str, length: int, fits: Callable[[object], bool], expected: str, *, repeats: bool = False
    ) -> list[Any]:
        value = self._required(key)
        if repeats and fits(value):
            return [value] * length
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(items, list | tuple) or not all(map(fits, items)):
            raise self._wrong(key, value, expected)
        if len(items) != length:
            raise ModelFormatError(f"{self.source}: metadata key {key!r} has {len(items)} values, not {length}")
        return list(items)

    def _required(self, key: str) -> Any:
        if key not in self:
            raise ModelFormatError(f"{self.source}: metadata key {key!r} is missing")
        return self[key]

    def _wrong(self, key: str, value: object, expected: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self.source}: metadata key {key!r} must be {expected}, not {type(value).__name__} {shown(value)}"
        )

    def _in_range(self, key: str, value: Any, minimum: Any, maximum: Any) -> Any:
        if minimum is not None and value < minimum:
            raise ModelFormatError(f"{self.source}: metadata key {key!r} is {value}; at least {minimum} is needed")
        if maximum is not None and value > maximum:
            raise ModelFormatError(f"{self.source}: metadata key {key!r} is {value}; at most {maximum} is supported")
        return value
