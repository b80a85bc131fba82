"""Compilation of functions to object code with Numba.

The function that Python or a step table calls is a wrapper of plain C types. Numba's own one (CFunc) refers to Numba's
helpers to report exceptions; this one refers to a single function of `linker`, so that object code can be linked
without Numba.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from llamacli.kernels.deferred import import_numba, resolve_closure
from llamacli.kernels.linker import FAILED, register_failure


def compile_function(function: Callable[..., Any], signature: str, name: str) -> tuple[Any, str]:
    """Compile a function for a signature.

    Returns Numba's library and the symbol of the wrapper. `name` is that in the message of an exception: kernels raise
    none, but for those that NUMBA_BOUNDSCHECK adds.

    Symbols get names that no other process uses. Numba numbers functions from 1 in every process and puts the number
    into the symbol, and functions that a kernel calls are weak symbols. Two kernels that two processes compiled would
    use the same name for different closures, and where both are loaded, the second one would call the first one's.
    """
    import_numba()
    resolve_closure(function)
    from numba.core import config
    from numba.core.bytecode import FunctionIdentity
    from numba.core.ccallback import CFunc
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.sigutils import normalize_signature

    FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))
    args, result = normalize_signature(signature)
    code = CFunc(function, (args, result), locals={}, options={})
    try:
        if config.BOUNDSCHECK:
            code.compile()
            return code._library, code.native_name
        with global_compiler_lock:
            return _with_wrapper(code, name)
    except BaseException:
        # An interrupt at the wrong moment would otherwise leave the lock with this thread for ever.
        while global_compiler_lock.is_locked():
            global_compiler_lock.release()
        raise


def _with_wrapper(code: Any, name: str) -> tuple[Any, str]:
    """Compile a CFunc's function with a wrapper that needs nothing of Numba."""
    from llvmlite import ir
    from numba.core.ccallback import _CFuncCompiler
    from numba.core.compiler import Compiler

    class WithoutWrapper(_CFuncCompiler):  # type: ignore[misc]
        def _customize_flags(self, flags: Any) -> Any:
            flags = super()._customize_flags(flags)
            flags.no_cfunc_wrapper = True
            return flags

    register_failure()
    compiler = WithoutWrapper(code._pyfunc, code._targetdescr, {}, {}, pipeline_class=Compiler)
    compiled = compiler.compile(code._sig.args, code._sig.return_type)
    context, about, library = compiled.target_context, compiled.fndesc, compiled.library
    module = context.create_module("wrapper")
    convention = context.call_conv
    callee = ir.Function(module, convention.get_function_type(about.restype, about.argtypes), about.llvm_func_name)
    kind = ir.FunctionType(context.get_value_type(about.restype), [*map(context.get_value_type, about.argtypes)])
    wrapper = ir.Function(module, kind, about.llvm_cfunc_wrapper_name)
    failed = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), FAILED)
    b = ir.IRBuilder(wrapper.append_basic_block())
    status, out = convention.call_function(b, callee, about.restype, about.argtypes, wrapper.args, attrs=("noinline",))
    with b.if_then(status.is_error, likely=False):
        b.call(failed, [context.insert_const_string(module, name)])
    b.ret(out)
    library.add_ir_module(module)
    library.finalize()
    return library, wrapper.name
