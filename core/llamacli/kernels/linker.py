"""Linker of object code in this process: LLVM's RuntimeDyld, by llvmlite.

Numba links by the same means. Here its helper functions are registered only if code refers to them, since that takes
the import of Numba.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable
from typing import Any

from llvmlite import binding

from llamacli.kernels.deferred import import_numba
from llamacli.util.memory import LLVM_BYTES, expect_free

_HEADER = struct.Struct("<4sB3x32xQ10xHH")
_SECTION = struct.Struct("<4xI16xQQI12xQ")
_SYMBOL = struct.Struct("<IBxHQQ")

FAILED = "llamacli_report_failure"
"""Symbol of the function that wrappers call after an exception, with the name of the code."""

_ELF, _SYMBOL_TABLE = (b"\x7fELF", 2), 2


def undefined_symbols(code: bytes) -> list[str] | None:
    """Undefined names in ELF object code; None for other systems' code."""
    magic, bits, sections_at, section_bytes, n_sections = _HEADER.unpack_from(code)
    if (magic, bits) != _ELF:
        return None
    sections = [_SECTION.unpack_from(code, sections_at + i * section_bytes) for i in range(n_sections)]
    names = set()
    for kind, start, size, names_section, entry_bytes in sections:
        if kind == _SYMBOL_TABLE:
            names_at = sections[names_section][1]
            for at in range(start, start + size, entry_bytes):
                name, _, section, _, _ = _SYMBOL.unpack_from(code, at)
                if name and not section:
                    begin = names_at + name
                    names.add(code[begin : code.index(b"\0", begin)].decode())
    return sorted(names)


def calls_numba(needs: Iterable[str] | None) -> bool:
    """True if code with these `undefined_symbols` may call Numba or Python."""
    return needs is None or any(name.startswith(("NRT_", "numba_", "Py", "_Py")) for name in needs)


def link(code: bytes, symbol: str, needs: Iterable[str] | None) -> int | None:
    """Address of a symbol of object code, once it is linked.

    `needs` are the `undefined_symbols`. None if this process has not all of them: LLVM would end the process, as it
    does without memory for the code, which is a MemoryError here.
    """
    engine = _engine()  # before symbols are looked up: it makes those of the process known
    if not _register(needs):
        return None
    expect_free(4 * len(code) + LLVM_BYTES, f"to link {len(code)} bytes of a kernel")
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(symbol) or None


def _register(needs: Iterable[str] | None) -> bool:
    """Make symbols known to LLVM; false if one is undefined."""
    binding.add_symbol(FAILED, ctypes.cast(_report_failure, ctypes.c_void_p).value)
    # Numba has the object of an exception under its name, where Python has a pointer to it.
    if needs is not None and not any(name.startswith("PyExc_") or not _is_known(name) for name in needs):
        return True
    import_numba()
    from numba.core.registry import cpu_target

    cpu_target.target_context.refresh()  # it registers Numba's functions
    return needs is None or all(map(_is_known, needs))


def _is_known(name: str) -> bool:
    return binding.address_of_symbol(name) is not None


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _report_failure(name: bytes) -> None:
    """Raise an error, which ctypes prints: nothing can propagate through machine code."""
    raise RuntimeError(f"the compiled function {name.decode()} raised an exception; NUMBA_BOUNDSCHECK=1 names it")


@functools.cache
def _engine() -> Any:
    expect_free(LLVM_BYTES, "to link kernels")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
