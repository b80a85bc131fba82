"""Shortcuts through Numba's compiler that do not change its results.

Numba resolves the types of a call anew each time, analyses lifetimes of variables after each pass although only
lowering uses them, and prepares a terminal for colours in each error message, most of which it never shows. A fourth
of the time of a first run went there.

They take the place of private methods, so that only the versions of Numba that they were read against have them.

To be imported once something has to be compiled: this module imports Numba.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numba
from numba.core import errors, ir, postproc, transforms
from numba.core.targetconfig import ConfigStack
from numba.core.types import BaseFunction

VERSIONS = ("0.68.",)
"""Beginnings of the versions of Numba with shortcuts."""

_ATTRIBUTES = (
    (BaseFunction, "get_call_type"),
    (postproc.PostProcessor, "run"),
    (ir.Inst, "_rec_list_vars"),
    (type(errors.termcolor()), "_markup"),
)
_numbas = {name: getattr(owner, name, None) for owner, name in _ATTRIBUTES}  # None in another version

_signatures: dict[tuple[Any, ...], Any] = {}
"""Signatures by function, types of arguments and number of flags."""

_flags: list[dict[str, Any] | None] = []
"""Sets of compiler flags met so far; Numba cannot hash them by value."""


def _flags_number() -> int:
    current = ConfigStack.top_or_none()
    values = None if current is None else dict(current._values)
    if values not in _flags:
        _flags.append(values)
    return _flags.index(values)


def _get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
    """Signature of a built-in function for types of arguments, remembered."""
    key = self, context, tuple(args), tuple(kws.items()), _flags_number()
    signature = _signatures.get(key)
    if signature is None:
        signature = _numbas["get_call_type"](self, context, args, kws)
        if all(kind.is_precise() for kind in (*args, *kws.values())):
            _signatures[key] = signature
    return signature


def _run(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """Find lifetimes of variables when they are asked for.

    `block_entry_vars` stays as it is: only generators and object mode read it.
    """
    function = self.func_ir
    if function.is_generator:
        _numbas["run"](self, emit_dels, extend_lifetimes)
        return
    function.blocks = transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)
    function.generator_info = None
    if emit_dels:
        self._insert_var_dels(extend_lifetimes=extend_lifetimes)


def _rec_list_vars(self: Any, value: Any) -> list[Any]:
    """Variables in an instruction, with the common types first."""
    kind = type(value)
    if kind is ir.Var:
        return [value]
    if kind is str or kind is ir.Loc or value is None:
        return []
    if isinstance(value, ir.Inst):
        found: list[Any] = value.list_vars()
        return found
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value] if isinstance(value, ir.Var) else []
    return [variable for item in value for variable in _rec_list_vars(self, item)]


def _markup(self: Any, message: str, *style: Any, **options: Any) -> str:
    """Message without colours."""
    return message


_SHORTCUTS = (_get_call_type, _run, _rec_list_vars, _markup)


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Take the shortcuts, in VERSIONS only; Numba's compiler lock must be held."""
    if not numba.__version__.startswith(VERSIONS):
        yield
        return
    for (owner, name), shortcut in zip(_ATTRIBUTES, _SHORTCUTS, strict=True):
        setattr(owner, name, shortcut)
    try:
        yield
    finally:
        for owner, name in _ATTRIBUTES:
            setattr(owner, name, _numbas[name])
