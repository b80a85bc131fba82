"""Compilation of functions to object code with Numba.

The function that Python or a step table calls is a wrapper of plain C types. Numba's own one (CFunc) refers to Numba's
helpers to report exceptions; this one refers to a single function of `linker`, so that object code can be linked
without Numba.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

from llamacli.kernels.deferred import import_numba, resolve_closure
from llamacli.kernels.linker import FAILED


def compile_function(function: Callable[..., Any], signature: str, name: str) -> tuple[str, bytes]:
    """Compile a function for a signature.

    Returns the symbol of the wrapper, which no other process uses, and object code. `name` is that in the message of an
    exception: kernels raise none, but for those that NUMBA_BOUNDSCHECK adds.
    """
    import_numba()
    resolve_closure(function)
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    from llamacli.kernels.numba_target import kernel_target

    try:
        with global_compiler_lock, kernel_target(), _garbage_kept():
            library, symbol = (_with_checks if config.BOUNDSCHECK else _with_wrapper)(function, signature, name)
            return symbol, library.emit(symbol)
    except BaseException:
        # An interrupt at the wrong moment would otherwise leave the lock with this thread for ever.
        while global_compiler_lock.is_locked():
            global_compiler_lock.release()
        raise


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Pause the garbage collector.

    It would look through Numba's many objects again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiled(function: Callable[..., Any], signature: str, *, wrapper: bool) -> Any:
    """Result of Numba's compiler, with its own wrapper or without."""
    from numba.core.ccallback import CFunc, _CFuncCompiler
    from numba.core.compiler import Compiler
    from numba.core.sigutils import normalize_signature

    class WithoutWrapper(_CFuncCompiler):  # type: ignore[misc]
        def _customize_flags(self, flags: Any) -> Any:
            flags = super()._customize_flags(flags)
            flags.no_cfunc_wrapper = not wrapper
            return flags

    args, result = normalize_signature(signature)
    code = CFunc(function, (args, result), locals={}, options={})
    return WithoutWrapper(function, code._targetdescr, {}, {}, pipeline_class=Compiler).compile(args, result)


def _with_checks(function: Callable[..., Any], signature: str, name: str) -> tuple[Any, str]:
    """Compile a function with Numba's wrapper, which prints exceptions."""
    compiled = _compiled(function, signature, wrapper=True)
    return compiled.library, compiled.fndesc.llvm_cfunc_wrapper_name


def _with_wrapper(function: Callable[..., Any], signature: str, name: str) -> tuple[Any, str]:
    """Compile a function with a wrapper that needs nothing of Numba."""
    from llvmlite import ir

    compiled = _compiled(function, signature, wrapper=False)
    context, about, library = compiled.target_context, compiled.fndesc, compiled.library
    module = context.create_module("wrapper")
    convention = context.call_conv
    callee = ir.Function(module, convention.get_function_type(about.restype, about.argtypes), about.llvm_func_name)
    kind = ir.FunctionType(context.get_value_type(about.restype), [*map(context.get_value_type, about.argtypes)])
    wrapper = ir.Function(module, kind, f"llamacli_{os.urandom(8).hex()}")
    failed = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), FAILED)
    b = ir.IRBuilder(wrapper.append_basic_block())
    status, out = convention.call_function(b, callee, about.restype, about.argtypes, wrapper.args, attrs=("noinline",))
    with b.if_then(status.is_error, likely=False):
        b.call(failed, [context.insert_const_string(module, name)])
    b.ret(out)
    library.add_ir_module(module)
    return library, wrapper.name
