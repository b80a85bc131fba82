"""Argument blocks: arguments of compiled functions in one piece of memory.

A function of arrays is compiled as a function of one address, that of a block of 64-bit slots: of an array its address
and the length of each axis, of a number the number. The result is written to the first slot. So its machine code needs
nothing of Python, nor of Numba.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from llamacli.util.memory import address_of

_ARRAY = re.compile(r"(\w+)\[(?:(:),)? ?::1\]")
_TYPES = {
    name: getattr(np, name) for name in ("bool_", "uint8", "int16", "int32", "uint32", "int64", "float32", "float64")
}
_NUMBERS = {"int64": "q", "boolean": "q", "float32": "d", "float64": "d"}


@attrs.frozen
class _Array:
    dtype: np.dtype[Any]
    ndim: int

    @property
    def format(self) -> str:
        return "q" * (1 + self.ndim)

    def slots(self, value: Any) -> Sequence[Any]:
        if (
            not isinstance(value, np.ndarray) or value.dtype != self.dtype or value.ndim != self.ndim
            or not value.flags.carray
        ):  # fmt: skip
            raise TypeError(f"expected a contiguous, writable array of {self.dtype} with {self.ndim} axes")
        return address_of(value), *value.shape

    def source(self, slot: int) -> str:
        lengths = "".join(f"integers[{slot + 1 + axis}], " for axis in range(self.ndim))
        return f"carray(pointer(integers[{slot}]), ({lengths}), {_scalar(self.dtype.name)})"


@attrs.frozen
class _Number:
    kind: str

    @property
    def format(self) -> str:
        return _NUMBERS[self.kind]

    def slots(self, value: Any) -> Sequence[Any]:
        return (bool(value) if self.kind == "boolean" else value,)

    def source(self, slot: int) -> str:
        if self.kind == "boolean":
            return f"integers[{slot}] != 0"
        return f"integers[{slot}]" if self.kind == "int64" else f"{self.kind}(floats[{slot}])"


@attrs.frozen
class _Tuple:
    items: tuple[_Array, ...]

    @property
    def format(self) -> str:
        return "".join(item.format for item in self.items)

    def slots(self, value: Any) -> Sequence[Any]:
        return [slot for item, one in zip(self.items, value, strict=True) for slot in item.slots(one)]

    def source(self, slot: int) -> str:
        parts = []
        for item in self.items:
            parts.append(item.source(slot))
            slot += len(item.format)
        return f"({', '.join(parts)}, )"


def _scalar(name: str) -> str:
    return "bool_" if name == "bool" else name


def _parameters(text: str) -> Iterator[_Array | _Number | _Tuple]:
    while text := text.lstrip(", "):
        if text.startswith("Tuple(("):
            inner, _, text = text.removeprefix("Tuple((").partition("))")
            yield _Tuple(tuple(one for one in _parameters(inner) if isinstance(one, _Array)))
        elif found := _ARRAY.match(text):
            dtype = np.dtype(np.bool_ if found[1] == "boolean" else found[1])
            yield _Array(dtype, 2 if found[2] else 1)
            text = text[found.end() :]
        else:
            name, _, text = text.partition(",")
            yield _Number(name.strip())


class Block:
    """Layout of the arguments of a signature, such as `int64(float32[::1], int32)`."""

    def __init__(self, signature: str):
        self._result, _, rest = signature.partition("(")
        self._parameters = list(_parameters(rest.removesuffix(")")))
        self._packer = struct.Struct("q" + "".join(parameter.format for parameter in self._parameters))
        self._memory = ctypes.c_char * self._packer.size
        self._unpacker = None if self._result == "void" else struct.Struct(_NUMBERS[self._result])

    def filled(self, arguments: Iterable[Any]) -> ctypes.Array[ctypes.c_char]:
        """Memory of a block with arguments; TypeError for other types."""
        memory, slots = self._memory(), list[Any]()
        for one, value in zip(self._parameters, arguments, strict=True):
            slots += one.slots(value)
        try:
            self._packer.pack_into(memory, 0, 0, *slots)
        except struct.error as error:
            raise TypeError(f"expected {self._result}(..): {error}") from error
        return memory

    def result(self, memory: ctypes.Array[ctypes.c_char]) -> Any:
        """Result that the function has left."""
        return self._unpacker.unpack_from(memory)[0] if self._unpacker else None

    def taking(self, function: Callable[..., Any]) -> Callable[[int], None]:
        """Function of a block's address, for Numba (imported already) to compile."""
        arguments, slot = [], 1
        for parameter in self._parameters:
            arguments.append(parameter.source(slot))
            slot += len(parameter.format)
        call = f"function({', '.join(arguments)})"
        left = {"void": call, "int64": f"integers[0] = {call}"}.get(self._result, f"floats[0] = {call}")
        source = (
            f"def taking_block(block):\n"
            f"    integers = carray(pointer(block), {slot}, int64)\n"
            f"    floats = carray(pointer(block), {slot}, float64)\n"
            f"    {left}\n"
        )
        from llamacli.kernels.deferred import carray, njit
        from llamacli.kernels.simd import pointer

        names = {"carray": carray, "pointer": pointer, "function": njit(function), **_TYPES}
        exec(compile(source, __file__, "exec"), names)
        made: Callable[[int], None] = names["taking_block"]
        return made
