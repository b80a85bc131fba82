"""Content hashes of plugins' code, for kernel cache keys.

The name of the cache folder hashes the core's own sources. It cannot hash a plugin's: which plugins there are, and of
which modules they consist, is unknown when a kernel is looked up. So the hash covers the code itself, as loaded in this
process: the instructions that a packing emits, and the functions that a kernel is compiled from, with the values that
they refer to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir as llvm

from llamacli.kernels import ir
from llamacli.kernels.deferred import import_numba, resolve_closure
from llamacli.kernels.packing_formats import IntegerPacking

_COVERED = {"llamacli", "numba", "llvmlite", "numpy", "builtins"}
"""Packages whose versions or sources the name of the cache folder hashes."""


def function_digest(*functions: Callable[..., Any]) -> str:
    """Hexadecimal hash of the code of a plugin's kernel.

    `functions` are those that it is made of; the hash is empty if all are the core's. The module's name counts as
    well, since compiled code imports it.
    """
    found = [function for function in functions if isinstance(function, FunctionType) and not _is_covered(function)]
    if not found:
        return ""
    import_numba()
    parts: list[str] = []
    for function in found:
        resolve_closure(function)
        parts += (str(function.__globals__.get("__name__")), *_hash_parts(function, {}))
    return _combined(parts)


def packing_digest(packing: IntegerPacking) -> str:
    """Hexadecimal hash of everything that a packing's kernels are compiled from."""
    stored = [(name, np.dtype(kind.item).str, kind.exponent, count) for name, (kind, count) in packing.fields.items()]
    import_numba()
    resolve_closure(packing.decode)
    layout = repr((packing.file_bytes, packing.groups, packing.planes, packing.bias_bits, stored))
    return _combined((layout, *_emitted(packing), *_hash_parts((packing.decode, packing.decode_table), {})))


def _combined(parts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part.encode()).digest())
    return found.hexdigest()[:16]


def _emitted(packing: IntegerPacking) -> Iterator[str]:
    """LLVM instructions that load a block."""
    function = llvm.Function(llvm.Module(), llvm.FunctionType(llvm.VoidType(), [llvm.IntType(64)]), "load")
    builder = ir.Builder(function.append_basic_block())
    block = packing.load(builder, function.args[0], 0)
    yield str((block.factor, block.shift_factor))
    for group in block.groups:
        yield str((group.codes, group.terms))
    builder.ret_void()
    yield str(function)


_Seen = dict[tuple[int, frozenset[str]], int]
"""Functions, modules and classes seen so far, with the names looked for in them: their numbers."""


def _hash_parts(value: Any, seen: _Seen, names: frozenset[str] = frozenset()) -> Iterator[str]:
    """Text of everything in a value that compiled code refers to.

    Of a module or a class, only its members called `names`.
    """
    yield type(value).__qualname__
    if isinstance(value, (FunctionType, ModuleType, type)):
        key = id(value), frozenset() if isinstance(value, FunctionType) else names
        if _is_covered(value):
            yield f"{getattr(value, '__module__', '')}.{value.__name__}"
            # A function that the core made of a plugin's, as `ir.expose` does, holds it in its closure.
            cells = value.__closure__ if isinstance(value, FunctionType) else None
            for cell in cells or ():
                if isinstance(cell.cell_contents, FunctionType) and not _is_covered(cell.cell_contents):
                    yield from _hash_parts(cell.cell_contents, seen)
        elif key in seen:
            yield str(seen[key])
        elif isinstance(value, FunctionType):
            seen[key] = len(seen)
            yield from _function_parts(value, seen)
        else:
            seen[key] = len(seen)
            for name in sorted(name for name in names if hasattr(value, name)):
                yield name
                yield from _hash_parts(getattr(value, name), seen, names)
    elif hasattr(value, "__wrapped__"):  # Numba dispatchers
        yield repr(sorted(getattr(value, "targetoptions", {}).items()))
        yield from _hash_parts(value.__wrapped__, seen)
    elif isinstance(value, partial):
        yield from _hash_parts((value.func, value.args, tuple(value.keywords.items())), seen)
    elif isinstance(value, np.ndarray):
        yield repr((value.dtype.str, value.shape, value.tobytes()))
    elif isinstance(value, (tuple, list)):
        yield str(len(value))
        for item in value:
            yield from _hash_parts(item, seen)
    elif isinstance(value, frozenset):
        yield repr(sorted(map(repr, value)))
    else:
        yield repr(value)


def _function_parts(function: FunctionType, seen: _Seen) -> Iterator[str]:
    codes = list(_codes(function.__code__))
    names = frozenset(name for code in codes for name in code.co_names)
    for code in codes:
        yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount))
        yield from _hash_parts(tuple(const for const in code.co_consts if not isinstance(const, CodeType)), seen)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    yield from _hash_parts((function.__defaults__, *(function.__kwdefaults__ or {}).items(), *cells), seen)
    for name in sorted(names & function.__globals__.keys()):
        yield name
        yield from _hash_parts(function.__globals__[name], seen, names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _is_covered(value: FunctionType | ModuleType | type) -> bool:
    if isinstance(value, FunctionType):  # its __module__ may be another's, as with functools.wraps
        module = str(value.__globals__.get("__name__"))
    else:
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return module.partition(".")[0] in _COVERED
