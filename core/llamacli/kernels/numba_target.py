"""Numba target that makes machine code of kernels only.

Numba optimises every function that a kernel calls, makes machine code and a wrapper for Python of it, and then copies
its LLVM IR into the kernel, where LLVM optimises it again. Here a function stays LLVM IR as it was lowered. Once the
IR of a kernel is complete, all of it is optimised, and compiled to object code, at once.

The target is registered beside Numba's own one (`numba.core.target_extension`), has typing and lowering rules of its
own, and is chosen for one thread while a kernel compiles. A dispatcher that `numba.njit` made is compiled a second time
for it, so that functions of other authors keep what Numba made of them.

To be imported once something has to be compiled: this module imports Numba.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakKeyDictionary

from llvmlite import binding, ir
from numba.core import config, types, typing
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen
from numba.core.cpu import CPUContext, CPUTargetOptions
from numba.core.decorators import jit
from numba.core.descriptors import TargetDescriptor
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import rtsys
from numba.core.target_extension import (
    CPU,
    dispatcher_registry,
    jit_registry,
    target_override,
    target_registry,
)

from llamacli.kernels.isa import target, target_machine

_NAME = "llamacli"

_REFERENCE_COUNTS = {"NRT_incref", "NRT_decref"}
"""Functions of Numba's runtime (NRT) that code refers to for each array, even if it allocates none."""


def compile_kernel(function: Callable[..., Any], signature: str) -> Any:
    """Compile a function for a signature; Numba's compiler lock must be held.

    Returns Numba's `CompileResult`, with a `Library`.
    """
    with target_override(_NAME):
        dispatcher = _jit(signature)(function)
        (result,) = dispatcher.overloads.values()
    return result


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
    """LLVM for the instruction set of kernels, which another CPU may have."""

    _library_class = Library

    def _init(self, llvm_module: Any) -> None:
        super()._init(llvm_module)
        self._tm = target_machine(config.OPT)
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = target()[0]
        return module


class _Lowering(CPUContext):  # type: ignore[misc]
    """Numba's rules to lower types and functions."""

    def init(self) -> None:
        super().init()
        self._internal_codegen = _Codegen(_NAME)

    def load_additional_registries(self) -> None:
        rtsys.initialize(cpu_target.target_context)  # once for the process: with machine code, so by Numba's own target
        super().load_additional_registries()

    def post_lowering(self, mod: Any, library: Library) -> None:
        """Link no allocator: `Library.emit` does, if there is use for it."""

    def create_cpython_wrapper(self, *arguments: Any, **options: Any) -> None:
        """Make no wrapper: Python calls no function of this target."""

    def create_cfunc_wrapper(self, *arguments: Any) -> None:
        """Make no wrapper: `compiler` makes that of a kernel."""

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> object:
        """Key of a compiled function among its target's."""
        return object()


class _Typing(typing.Context):  # type: ignore[misc]
    """Numba's rules to infer types."""

    def init(self) -> None:
        self._dispatchers: WeakKeyDictionary[Any, Dispatcher] = WeakKeyDictionary()

    def resolve_value_type(self, val: Any) -> Any:
        """Numba type of a global value.

        Of a function of Numba's target it is that of the same function for this target.
        """
        if type(val) is not CPUDispatcher:
            return super().resolve_value_type(val)
        own = self._dispatchers.get(val)
        if own is None:
            own = KernelDispatcher(val.py_func, val.locals, val.targetoptions, val._compiler.pipeline_class)
            self._dispatchers[val] = own
            if not val._can_compile:  # decorated with signatures
                for signature in val.nopython_signatures:
                    own.compile(signature)
                own.disable_compile()
        return types.Dispatcher(own)


class _Kernels(CPU):  # type: ignore[misc]
    """Target that uses what is registered for CPUs."""


class _Descriptor(TargetDescriptor):  # type: ignore[misc]
    options = CPUTargetOptions

    @functools.cached_property
    def typing_context(self) -> _Typing:
        return _Typing()

    @functools.cached_property
    def target_context(self) -> _Lowering:
        return _Lowering(self.typing_context, _NAME)


class KernelDispatcher(Dispatcher):
    """Function that kernels call, compiled once for each signature."""

    targetdescr = _Descriptor(_NAME)

    def add_overload(self, cres: Any) -> None:
        """Note a compiled function, which Python cannot call."""
        self.overloads[tuple(cres.signature.args)] = cres


target_registry[_NAME] = _Kernels
dispatcher_registry[_Kernels] = KernelDispatcher
jit_registry[_Kernels] = _jit = functools.partial(cast(Any, jit), _target=_NAME)
