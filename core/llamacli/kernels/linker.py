"""Linker of object code in this process.

Code unknown to `elf` is linked by LLVM's RuntimeDyld, as Numba does it. Numba's helper functions are registered only
for code with references to them, since that takes the import of Numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable
from typing import Any

from llamacli.kernels import elf
from llamacli.kernels.deferred import import_numba
from llamacli.util.memory import LLVM_BYTES, expect_free

FAILED = "llamacli_report_failure"
"""Symbol of the function that wrappers call after an exception, with the name of the code."""


def calls_numba(needs: Iterable[str] | None) -> bool:
    """True if code with these `elf.undefined_symbols` may call Numba or Python."""
    return needs is None or any(name.startswith(("NRT_", "numba_", "Py", "_Py")) for name in needs)


def link(code: bytes, symbol: str, needs: Iterable[str] | None) -> int | None:
    """Address of a symbol of object code, once it is linked.

    `needs` are the `elf.undefined_symbols`. None if this process has not all of them. Raises MemoryError.
    """
    if not calls_numba(needs):
        with contextlib.suppress(elf.UnsupportedCodeError):
            return elf.load(code, symbol, own_symbols)
    return _link_by_llvm(code, symbol, needs)


def _link_by_llvm(code: bytes, symbol: str, needs: Iterable[str] | None) -> int | None:
    """Link, but check first: LLVM would end the process on an error."""
    from llvmlite import binding

    engine = _engine()  # before symbols are looked up: it makes those of the process known
    if not _register(needs):
        return None
    expect_free(4 * len(code) + LLVM_BYTES, f"to link {len(code)} bytes of a kernel")
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(symbol) or None


def _register(needs: Iterable[str] | None) -> bool:
    """Make symbols known to LLVM; false if one is undefined."""
    from llvmlite import binding

    def is_known(name: str) -> bool:
        return binding.address_of_symbol(name) is not None

    for name, address in own_symbols.items():
        binding.add_symbol(name, address)
    # Numba has the object of an exception under its name, where Python has a pointer to it.
    if needs is not None and not any(name.startswith("PyExc_") or not is_known(name) for name in needs):
        return True
    import_numba()
    from numba.core.registry import cpu_target

    cpu_target.target_context.refresh()  # it registers Numba's functions
    return needs is None or all(map(is_known, needs))


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _report_failure(name: bytes) -> None:
    """Raise an error, which ctypes prints: nothing can propagate through machine code."""
    raise RuntimeError(f"the compiled function {name.decode()} raised an exception; NUMBA_BOUNDSCHECK=1 names it")


own_symbols = {FAILED: ctypes.cast(_report_failure, ctypes.c_void_p).value or 0}
"""Symbols that code can refer to besides those of libraries: addresses by name."""


@functools.cache
def _engine() -> Any:
    from llvmlite import binding

    expect_free(LLVM_BYTES, "to link kernels")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
