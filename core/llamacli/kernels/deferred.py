"""Deferred import of Numba: cached kernels run without it.

Importing Numba takes longer than everything else that a short run does. So modules of kernels import its names from
here: stand-ins, which stand for the names and for what calls of them would return, and do nothing before a kernel has
to be compiled. `import_numba` then replaces them in all modules. Where NUMBA_DISABLE_JIT is set, functions run as
Python code, and decorators return them as Numba's own do then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from llamacli.kernels.switch import jit_disabled


class Deferred:
    """Stand-in of a value that `make` makes; attributes and results are stand-ins."""

    def __init__(self, make: Callable[[], Any]):
        self._make: Callable[[], Any] | None = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Deferred(lambda: getattr(resolved(self), name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Stand-in of a call's result; arguments may be stand-ins."""
        return Deferred(
            lambda: resolved(self)(*map(resolved, args), **{name: resolved(value) for name, value in options.items()})
        )

    def _resolved(self) -> Any:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made


def resolved(value: Any) -> Any:
    """Value that a stand-in stands for; any other value itself."""
    return value._resolved() if isinstance(value, Deferred) else value


_imported: list[bool] = []
_ARRAYS = "llamacli.kernels.arrays"


def import_numba() -> None:
    """Import Numba, and replace the stand-ins in all modules."""
    if not _imported:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            for name, value in list(names.items()):
                if isinstance(value, Deferred):
                    names[name] = resolved(value)
        _imported.append(True)


def resolve_closure(function: Any) -> None:
    """Replace stand-ins in closures of a function and those it refers to."""
    _resolve_cells(function, set())


def _resolve_cells(function: Any, seen: set[int]) -> None:
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        if _is_filled(cell):
            cell.cell_contents = resolved(cell.cell_contents)
            _resolve_cells(cell.cell_contents, seen)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _as_is(function: Any = None, **_: Any) -> Any:
    return function if callable(function) else lambda function: function


def _array(*arguments: Any) -> Any:
    return importlib.import_module("numba").carray(*arguments)


_root = Deferred(lambda: importlib.import_module("numba"))
_extending = Deferred(lambda: importlib.import_module("numba.extending"))

types, intrinsic = _root.core.types, _extending.intrinsic
njit: Any = _as_is if jit_disabled() else _root.njit
"""Decorate a function that kernels call, as `numba.njit` does."""
register_jitable: Any = _as_is if jit_disabled() else _extending.register_jitable
carray: Any = _array if jit_disabled() else Deferred(lambda: importlib.import_module(_ARRAYS).carray)
