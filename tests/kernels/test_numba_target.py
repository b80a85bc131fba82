"""Numba target of kernels: no machine code of callees, no allocator."""

import sys

import numba
import numpy as np
import numpy.typing as npt
import pytest
from numba import njit, types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.core.target_extension import current_target

from llamacli.kernels import compiler, deferred, ir, isa
from llamacli.kernels.compiler import compile_function
from llamacli.kernels.elf import undefined_symbols
from llamacli.kernels.jit import ArrayFunction, Compiled
from llamacli.kernels.linker import FAILED


@njit
def foreign(x):
    return x * x + 1


@deferred.njit
def own(x):
    return x * x + 1


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))


def sum_of_ends(x: npt.NDArray[np.float64]) -> float:
    return x[1:].sum() + x[: len(x) - 1].sum()


def sum_of_range(n: int) -> int:
    return np.arange(n).sum()


def test_views_of_arrays_need_no_allocator() -> None:
    """References to arrays are counted only where something is allocated."""
    symbol, code = compile_function(
        ArrayFunction(sum_of_ends, "float64(float64[::1])")._to_compile(), "void(int64)", ""
    )
    assert symbol.startswith("llamacli_")
    assert set(undefined_symbols(code)) <= {FAILED}


def test_allocated_arrays_need_numbas_allocator() -> None:
    _, code = compile_function(sum_of_range, "int64(int64)", "sum_of_range")
    assert "NRT_MemInfo_call_dtor" in undefined_symbols(code)
    kernels = Compiled(sum_of_range, "int64(int64)"), ArrayFunction(sum_of_ends, "float64(float64[::1])")
    x = np.arange(4.0)
    assert [kernels[0].call(5), kernels[1](x), kernels[0].call(7)] == [10, 9.0, 21]


def test_function_of_other_authors_stays_callable_from_python() -> None:
    def kernel(x):
        return foreign(x) + 1

    assert Compiled(kernel, "int64(int64)").call(3) == 11
    assert [foreign(3), foreign(4), foreign(0.5)] == [10, 17, 1.25]


def test_functions_that_kernels_call_have_no_machine_code() -> None:
    def kernel(x):
        return own(x) + 1

    assert Compiled(kernel, "int64(int64)").call(3) == 11
    assert deferred.resolved(own).signatures == []
    assert deferred.resolved(own)(4) == 17


def test_declared_signatures_of_other_authors_hold() -> None:
    @njit("float64(float64)")
    def half(x):
        return x / 2

    def kernel(x):
        return half(x) + half(np.float32(x))

    assert Compiled(kernel, "float64(int64)").call(3) == 3.0
    assert half.nopython_signatures == [types.float64(types.float64)]


def test_generators_of_other_authors_run_in_kernels() -> None:
    @njit
    def squares(n):
        for i in range(n):
            yield i * i

    def kernel(n):
        total = 0
        for square in squares(n):
            total += square
        return total

    assert Compiled(kernel, "int64(int64)").call(5) == 30


@njit
def factorial(n):
    return n * factorial(n - 1) if n > 1 else 1


def test_functions_given_and_found_in_modules_are_compiled() -> None:
    @njit
    def apply(function, x):
        return function(x) + functions.factorial(x)

    functions = sys.modules[__name__]

    def kernel(n):
        return apply(factorial, n)

    assert Compiled(kernel, "int64(int64)").call(5) == 240


@ir.expose(deferred.types.void, deferred.types.int64, deferred.types.int64)
def reverse(b: ir.Builder, source: ir.Value, target: ir.Value) -> None:
    """Reverse the order of more vectors than there are registers."""
    vectors = [ir.load(b, ir.offset(b, source, 64 * i), ir.F32X16) for i in range(40)]
    for i, vector in enumerate(reversed(vectors)):
        ir.store(b, ir.offset(b, target, 64 * i), vector)


@pytest.mark.skipif("avx2" not in isa.available(), reason="reads machine code of x86 with vectors of 32 bytes")
def test_the_stack_is_aligned_for_spilled_vectors() -> None:
    def kernel(source, target):
        reverse(source, target)

    _, code = compile_function(kernel, "void(int64, int64)", "")
    assert {code.count(b"\x48\x83\xe4" + mask) for mask in (b"\xc0", b"\xe0")} != {0}  # and rsp, -64 or -32


def test_an_error_in_a_kernel_leaves_numbas_own_target() -> None:
    numbas = dict(vars(cpu_target))

    def kernel(x):
        return x.no_such_attribute

    with pytest.raises(TypingError, match="no_such_attribute"):
        Compiled(kernel, "int64(int64)").compile()
    assert vars(cpu_target) == numbas
    assert current_target() == "cpu"
    assert njit(lambda x: x + 1)(2) == 3


@pytest.mark.parametrize("broken", ["module", "attribute"])
def test_versions_of_numba_without_the_target_compile_callbacks(broken, monkeypatch, caplog) -> None:
    def kernel(x):
        return foreign(x) + np.arange(x).sum()

    if broken == "module":
        monkeypatch.setitem(sys.modules, "llamacli.kernels.numba_target", None)
    else:
        monkeypatch.delattr("llamacli.kernels.numba_target.Library.emit")
    compiler._warn_of_failure.cache_clear()
    made: list[Compiled] = []
    for _ in range(2):  # compiled, and loaded from the cache
        made.append(Compiled(kernel, "int64(int64)"))
        assert made[-1].call(4) == 23
    square_sum = ArrayFunction(sum_of_ends, "float64(float64[::1])")
    assert square_sum(np.arange(4.0)) == 9.0
    (record,) = [record for record in caplog.records if record.name == compiler.__name__]
    assert record.message.startswith(
        f"kernels are compiled as callbacks of Numba {numba.__version__}, which takes longer"
    )
