"""Compilation of functions to object code with Numba.

The function that Python or a step table calls is a wrapper of plain C types. Numba's own one (CFunc) refers to Numba's
helpers to report exceptions; this one refers to a single function of `linker`, so that object code can be linked
without Numba.

A version of Numba in which the target of kernels (`numba_target`) fails compiles them as C callbacks (`numba.cfunc`),
by its public interface alone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

from llamacli.kernels.deferred import import_numba, resolve_closure
from llamacli.kernels.isa import is_foreign, target_machine
from llamacli.kernels.linker import FAILED

_log = logging.getLogger(__name__)


def compile_function(function: Callable[..., Any], signature: str, name: str) -> tuple[str, bytes]:
    """Compile a function for a signature.

    Returns the symbol of the wrapper, which no other process uses, and object code. `name` is that in the message of an
    exception: kernels raise none, but for those that NUMBA_BOUNDSCHECK adds.
    """
    import_numba()
    resolve_closure(function)
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    symbol = f"llamacli_{os.urandom(8).hex()}"
    try:
        with global_compiler_lock:
            if config.BOUNDSCHECK:  # Numba's wrapper prints exceptions
                return symbol, _compile_as_callback(function, signature, symbol)
            try:
                return symbol, _compile_for_target(function, signature, symbol, name)
            except Exception as error:
                if is_foreign():
                    raise
                code = _compile_as_callback(function, signature, symbol)
                _warn_of_failure(repr(error))
                return symbol, code
    except BaseException:
        # An interrupt at the wrong moment would otherwise leave the lock with this thread for ever.
        while global_compiler_lock.is_locked():
            global_compiler_lock.release()
        raise


@functools.cache
def _warn_of_failure(error: str) -> None:
    import numba

    _log.warning("kernels are compiled as callbacks of Numba %s, which takes longer: %s", numba.__version__, error)


def _compile_for_target(function: Callable[..., Any], signature: str, symbol: str, name: str) -> bytes:
    """Compile a function with a wrapper that needs nothing of Numba."""
    from llamacli.kernels.numba_target import compile_kernel

    compiled = compile_kernel(function, signature)
    context, about, library = compiled.target_context, compiled.fndesc, compiled.library
    module = context.create_module("wrapper")
    convention = context.call_conv
    callee = ir.Function(module, convention.get_function_type(about.restype, about.argtypes), about.llvm_func_name)
    kind = ir.FunctionType(context.get_value_type(about.restype), [*map(context.get_value_type, about.argtypes)])
    wrapper = ir.Function(module, kind, symbol)
    failed = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), FAILED)
    b = ir.IRBuilder(wrapper.append_basic_block())
    status, out = convention.call_function(b, callee, about.restype, about.argtypes, wrapper.args, attrs=("noinline",))
    with b.if_then(status.is_error, likely=False):
        b.call(failed, [context.insert_const_string(module, name)])
    b.ret(out)
    library.add_ir_module(module)
    code: bytes = library.emit(symbol)
    return code


def _compile_as_callback(function: Callable[..., Any], signature: str, symbol: str) -> bytes:
    from numba import cfunc

    callback = cfunc(signature)(function)
    text = callback.inspect_llvm()
    assert "numba.dynamic.globals" not in text, f"{function.__name__} holds addresses of this process"
    module = binding.parse_assembly(text)
    for value in (*module.functions, *module.global_variables):
        if value.name == callback.native_name:
            value.name = symbol
        elif not value.is_declaration:
            value.linkage = binding.Linkage.internal
    code: bytes = target_machine().emit_object(module)
    return code
