"""Loader of ELF object code on Linux, x86-64.

LLVM's linker does the same, but loading LLVM takes 40 MB and 30 ms. Kernels are compiled for the large code model: all
addresses in code are 64 bits wide (R_X86_64_64), so no tables of addresses (GOT, PLT) are needed near it, and all data
are constants. Any other code is refused.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from llamacli.util.memory import anonymous

_HEADER = struct.Struct("<4s2B10x2H20xQ10x3H")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBxHQ8x")
_RELOCATION = struct.Struct("<QIIq")
_ADDRESS = struct.Struct("<Q")

_ELF, _WIDE, _LITTLE_ENDIAN = b"\x7fELF", 2, 1
_RELOCATABLE, _X86_64, _R_X86_64_64 = 1, 62, 1
_PROGBITS, _SYMTAB, _RELA, _REL = 1, 2, 4, 9
_WRITE, _ALLOC, _EXECINSTR, _TLS = 1, 2, 4, 0x400
_UNDEFINED, _FUNC, _SECTION_SYMBOL = 0, 2, 3


class _Section(NamedTuple):
    """Section header, of the ELF specification."""

    name: int
    kind: int
    flags: int
    address: int
    start: int
    size: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


class _Symbol(NamedTuple):
    name: str
    kind: int
    section: int
    value: int


class UnsupportedCodeError(Exception):
    """Object code of another kind, or with an unknown symbol."""


def is_supported() -> bool:
    """True on the system that this loader is for."""
    return sys.platform == "linux" and os.uname().machine == "x86_64" and sys.maxsize > 2**32


def undefined_symbols(code: bytes) -> list[str] | None:
    """Undefined names in ELF object code; None for other systems' code."""
    if code[:5] != _ELF + bytes([_WIDE]):
        return None
    return sorted({one.name for one in _Object(code).symbols() if one.name and one.section == _UNDEFINED})


def load(code: bytes, symbol: str, own: Mapping[str, int]) -> int:
    """Load object code for good; returns the address of its function `symbol`.

    Undefined symbols are those of `own`, addresses by name, and of this process's libraries. Raises MemoryError, and
    UnsupportedCodeError.
    """
    try:
        return _load(_Object(code), symbol, own)
    except (struct.error, LookupError, OverflowError, ValueError) as error:  # numbers that lead out of the file
        raise UnsupportedCodeError(repr(error)) from error


def executable(code: bytes) -> int:
    """Address of a function that is this machine code. Raises as `load`."""
    memory = anonymous(len(code))
    memory[:] = np.frombuffer(code, np.uint8)
    _protect(memory.ctypes.data, len(code), mmap.PROT_READ | mmap.PROT_EXEC)
    _keep(memory)
    return int(memory.ctypes.data)


class _Object:
    """ELF object file of 64 bits."""

    def __init__(self, code: bytes):
        self.code = code
        *self.kind, at, entry_bytes, n_sections, names = _HEADER.unpack_from(code)
        places = range(at, at + n_sections * entry_bytes, entry_bytes)
        self.sections = [_Section(*_SECTION.unpack_from(code, place)) for place in places]
        self._names = names

    def text(self, section: int, at: int) -> str:
        """Text in a section of strings."""
        begin = self.sections[section].start + at
        return self.code[begin : self.code.index(b"\0", begin)].decode()

    def name(self, section: _Section) -> str:
        """Name of a section."""
        return self.text(self._names, section.name)

    def symbols(self) -> Iterator[_Symbol]:
        """All symbols, in the order of their numbers."""
        for section in self.sections:
            if section.kind == _SYMTAB:
                for name, info, place, value in self.entries(section, _SYMBOL):
                    yield _Symbol(self.text(section.link, name), info & 15, place, value)

    def entries(self, section: _Section, layout: struct.Struct) -> Iterator[tuple[Any, ...]]:
        """Entries of a section that is a table."""
        return layout.iter_unpack(self.contents(section))

    def contents(self, section: _Section) -> bytes:
        """Bytes of a section."""
        found = self.code[section.start : section.start + section.size]
        _expect(len(found) == section.size, "section behind the end")
        return found


def _load(file: _Object, symbol: str, own: Mapping[str, int]) -> int:
    _expect(file.kind == [_ELF, _WIDE, _LITTLE_ENDIAN, _RELOCATABLE, _X86_64], "kind of file")
    _expect(is_supported(), "system")
    places, n_code, n_bytes = _layout(file)
    memory = anonymous(n_bytes)
    base = memory.ctypes.data
    for i, place in places.items():
        contents = file.contents(file.sections[i])
        memory[place : place + len(contents)] = np.frombuffer(contents, np.uint8)

    def address(one: _Symbol) -> int:
        if one.section == _UNDEFINED:
            return own[one.name] if one.name in own else _address_in_process(one.name)
        is_known = one.kind <= _SECTION_SYMBOL and one.value <= file.sections[one.section].size
        _expect(is_known, f"symbol {one.name}")
        return base + places[one.section] + one.value

    symbols = [*file.symbols()]
    for table in file.sections:
        _expect(table.kind != _REL, "relocations without addends")
        if table.kind == _RELA and table.info in places:
            for at, kind, number, addend in file.entries(table, _RELOCATION):
                _expect(kind == _R_X86_64_64, f"relocation of type {kind}")
                _expect(at + _ADDRESS.size <= file.sections[table.info].size, "relocation behind the end")
                value = (address(symbols[number]) + addend) % 2**64
                _ADDRESS.pack_into(memory.data, places[table.info] + at, value)
    (found,) = [one for one in symbols if one.name == symbol and one.kind == _FUNC]
    _expect(places[found.section] < n_code, "function among data")
    start = address(found)
    _protect(base, n_code, mmap.PROT_READ | mmap.PROT_EXEC)
    _protect(base + n_code, n_bytes - n_code, mmap.PROT_READ)
    _keep(memory)
    return start


def _keep(memory: np.ndarray[Any, Any]) -> None:
    """Keep the memory of code until the process ends.

    Threads may still run it when the interpreter deletes the variables of modules.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def _layout(file: _Object) -> tuple[dict[int, int], int, int]:
    """Places of sections by number, bytes of code and of all.

    Code comes first, both end with a page. Tables for unwinding are left out: no exception passes through kernels.
    """
    places, end, ends = {}, 0, list[int]()
    for code in (_EXECINSTR, 0):
        for i, section in enumerate(file.sections):
            if section.flags & _ALLOC and section.flags & _EXECINSTR == code and file.name(section) != ".eh_frame":
                known = section.kind == _PROGBITS and not section.flags & (_WRITE | _TLS)
                _expect(known and section.alignment <= mmap.PAGESIZE, f"section {file.name(section)}")
                places[i] = _aligned(end, section.alignment)
                end = places[i] + len(file.contents(section))
        end = _aligned(end, mmap.PAGESIZE)
        ends.append(end)
    return places, ends[0], ends[1]


def _aligned(place: int, alignment: int) -> int:
    return -(-place // max(1, alignment)) * max(1, alignment)


def _expect(is_known: bool, what: str) -> None:
    if not is_known:
        raise UnsupportedCodeError(what)


@functools.cache
def _process() -> Any:
    library = ctypes.CDLL(None)
    library.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return library


def _address_in_process(name: str) -> int:
    try:
        return ctypes.cast(_process()[name], ctypes.c_void_p).value or 0
    except AttributeError:
        raise UnsupportedCodeError(f"undefined symbol {name}") from None


def _protect(address: int, n_bytes: int, protection: int) -> None:
    _expect(not n_bytes or _process().mprotect(address, n_bytes, protection) == 0, "memory that cannot be protected")
