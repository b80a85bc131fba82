"""Content hashes of kernels' code, for kernel cache keys.

A kernel of the core depends on the sources of its module and of all modules that this one imports, directly or not. A
value from elsewhere that a kernel is compiled from has a digest of its own in the kernel's name: a formula that of its
instructions (`kernels/lanewise.py`), a plugin's tensor type that of its packing.

Which plugins there are, and of which modules they consist, is unknown when a kernel is looked up. So the hash of a
plugin's code covers the code itself, as loaded in this process: the instructions that a packing emits, and the
functions that a kernel is compiled from, with the values that they refer to, and all sources of the core. A function
counts by its source; if its file has other code than is loaded, by its bytecode, in which versions of Python differ.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir as llvm

from llamacli.kernels import ir
from llamacli.kernels.deferred import import_numba, resolve_closure
from llamacli.kernels.packing_formats import IntegerPacking

_PACKAGE = Path(__file__).parents[1]
_PATTERNS = ("kernels/**/*.py", "ops/**/*.py", "quantization/**/*.py", "tokenizer/kernels.py")
"""Sources of the core with code of kernels, or of their compilation."""

_COMPILER = f"{__package__}.jit"
"""Module that imports all that compiles kernels."""

_FROM = re.compile(r"from (llamacli[\w.]*) import (\([^)]*\)|.*)")
_WHOLE = (re.compile(r"import (llamacli[\w.]*)"), re.compile(r'"(llamacli[\w.]+)"'))
"""Imports of names and of modules; a string with a module's name is taken as an import."""

_COVERED = {"llamacli", "numba", "llvmlite", "numpy", "builtins"}
"""Packages whose versions or sources are hashed as a whole."""


@functools.cache
def sources() -> dict[str, str]:
    """Sources of modules with code of kernels, or their compilation, by module."""
    paths = sorted(path for pattern in _PATTERNS for path in _PACKAGE.glob(pattern))
    names = (".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path.read_text("utf-8") for name, path in zip(names, paths, strict=True)}


def imported(source: str) -> set[str]:
    """Modules among `sources` that a source imports anywhere, and their packages."""
    names = {name for pattern in _WHOLE for name in pattern.findall(source)}
    for module, parts in _FROM.findall(source):
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", parts))}
    prefixes = {".".join(parts[:n]) for parts in (name.split(".") for name in names) for n in range(1, len(parts) + 1)}
    return prefixes & sources().keys()


@functools.cache
def _imports(module: str) -> set[str]:
    return imported(sources()[module])


@functools.cache
def _hash(module: str) -> str:
    return hashlib.sha256(sources()[module].encode()).hexdigest()


@functools.cache
def source_digest(module: str) -> str:
    """Hexadecimal hash of the sources that a module's kernels depend on."""
    modules, left = set(sources()), [module, _COMPILER]
    if module in modules:
        modules.clear()
        while left:
            name = left.pop()
            if name not in modules:
                modules.add(name)
                left += _imports(name)
    return _combined(part for name in sorted(modules) for part in (name, _hash(name)))


def function_digest(*functions: Callable[..., Any]) -> str:
    """Hexadecimal hash of the code of a plugin's kernel.

    `functions` are those that it is made of; the hash is empty if all are the core's. The module's name counts as
    well, since compiled code imports it.
    """
    found = [function for function in functions if isinstance(function, FunctionType) and not _is_covered(function)]
    if not found:
        return ""
    import_numba()
    parts = [source_digest("")]
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
    return _combined(
        (layout, source_digest(""), *_emitted(packing), *_hash_parts((packing.decode, packing.decode_table), {}))
    )


def _combined(parts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part.encode()).digest())
    return found.hexdigest()[:16]


def _emitted(packing: IntegerPacking) -> Iterator[str]:
    function = llvm.Function(llvm.Module(), llvm.FunctionType(llvm.VoidType(), [llvm.IntType(64)]), "load")
    builder = ir.Builder(function.append_basic_block())
    block = packing.load(builder, function.args[0])
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
    source = _source_of(function.__code__)
    if source:
        yield source
    for code in () if source else codes:
        yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount))
        yield from _hash_parts(tuple(const for const in code.co_consts if not isinstance(const, CodeType)), seen)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    yield from _hash_parts((function.__defaults__, *(function.__kwdefaults__ or {}).items(), *cells), seen)
    for name in sorted(names & function.__globals__.keys()):
        yield name
        yield from _hash_parts(function.__globals__[name], seen, names)


def _source_of(code: CodeType) -> str:
    """Source of a function without comments, "" if its file has another."""
    text, compiled = _file(code.co_filename)
    if code not in compiled:
        return ""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == code.co_name
            and min([node.lineno, *(one.lineno for one in node.decorator_list)]) == code.co_firstlineno
        ):
            return ast.unparse(node)
    return ""


@functools.cache
def _file(path: str) -> tuple[str, frozenset[CodeType]]:
    """Source of a module and its functions' code, empty without a file."""
    try:
        text = Path(path).read_text("utf-8")
        return text, frozenset(_codes(compile(text, path, "exec", dont_inherit=True)))
    except (OSError, SyntaxError, ValueError):
        return "", frozenset()


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
