"""Numba target that makes machine code of kernels only.

Numba optimises every function that a kernel calls, makes machine code and a wrapper for Python of it, and then copies
its LLVM IR into the kernel, where LLVM optimises it again. Here a function stays LLVM IR as it was lowered. Once the
IR of a kernel is complete, all of it is optimised, and compiled to object code, at once.

To be imported once something has to be compiled: this module imports Numba.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import binding, ir
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen
from numba.core.cpu import CPUContext
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from llamacli.kernels.numba_shortcuts import shortcuts

_REFERENCE_COUNTS = {"NRT_incref", "NRT_decref"}
"""Functions of Numba's runtime (NRT) that code refers to for each array, even if it allocates none."""


class Library(CPUCodeLibrary):  # type: ignore[misc]
    """Functions as LLVM IR, not optimised."""

    def emit(self, symbol: str) -> bytes:
        """Object code, with one global symbol."""
        self._ensure_finalized()
        module = self._final_module
        names = {function.name for function in module.functions}
        if any(name.startswith("NRT_") for name in names - _REFERENCE_COUNTS):
            module.link_in(rtsys.library._get_module_for_linking(), preserve=True)
        elif names & _REFERENCE_COUNTS:  # all arrays are memory of others, whose references are not counted
            module.link_in(_empty_functions(names & _REFERENCE_COUNTS))
        for value in (*module.functions, *module.global_variables):
            if not value.is_declaration and value.name != symbol:
                value.linkage = binding.Linkage.internal
        passes, builder = self._codegen._module_pass_manager()
        passes.run(module, builder)
        module.verify()
        self._finalize_dynamic_globals()
        assert not self._dynamic_globals, f"{self.name} holds addresses of this process"
        code: bytes = self._codegen._tm.emit_object(module)
        return code

    def _finalize_final_module(self) -> None:
        """Load no machine code: there is none."""
        self._finalized = True

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Optimise nothing before a kernel is complete."""


def _empty_functions(names: Iterable[str]) -> Any:
    """Module of functions of an array that do nothing."""
    module = ir.Module()
    for name in names:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), name)
        function.attributes.add("alwaysinline")
        ir.IRBuilder(function.append_basic_block()).ret_void()
    return binding.parse_assembly(str(module))


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    """Settings of LLVM for this CPU, which are Numba's."""

    _library_class = Library


class _Context(CPUContext):  # type: ignore[misc]
    """Numba's rules to lower types and functions."""

    numbas: CPUContext
    """Those for machine code."""

    def refresh(self) -> None:
        """Load new functions of the registries, which Numba's own target shares."""
        for registry in list(self._registries):
            self.install_registry(registry)

    def post_lowering(self, mod: Any, library: Library) -> None:
        """Link no allocator: `Library.emit` does, if there is use for it."""

    def create_cpython_wrapper(self, library: Any, *arguments: Any, **options: Any) -> None:
        """Note that a function of other authors can be called from Python."""
        library.wrapper = arguments, options

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        """Python function that stands for a compiled one.

        It can be called only if there is a wrapper.
        """
        if not hasattr(library, "wrapper"):
            return object().__format__  # a built-in method, as Numba expects, which refuses Numba's tuple of arguments
        numbas = self.numbas
        compiled = numbas.codegen().create_library(library.name)
        compiled.add_linking_library(library)
        compiled.add_linking_library(rtsys.library)
        arguments, options = library.wrapper
        numbas.create_cpython_wrapper(compiled, *arguments, **options)
        return numbas.get_executable(compiled, fndesc, env)


@functools.cache
def _context() -> _Context:
    numbas = cpu_target.target_context
    context = numbas.subtarget(_internal_codegen=_Codegen("llamacli"))
    context.__class__ = _Context
    context.numbas = numbas
    made: _Context = context
    return made


@functools.cache
def _load_registries() -> None:
    """Load Numba's own registries, once.

    This would take long while Numba's own target is in use.
    """
    _context().numbas.refresh()


@contextlib.contextmanager
def kernel_target() -> Iterator[None]:
    """Make Numba compile for this target; its compiler lock must be held."""
    context, attributes = _context(), vars(cpu_target)
    attributes["_toplevel_target_context"] = context
    try:
        _load_registries()
        with shortcuts():
            yield
    finally:
        attributes["_toplevel_target_context"] = context.numbas
