"""Numba target of kernels: no machine code of callees, no allocator."""

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.errors import TypingError
from numba.core.registry import cpu_target

from llamacli.kernels import deferred
from llamacli.kernels.compiler import compile_function
from llamacli.kernels.jit import ArrayFunction, Compiled
from llamacli.kernels.linker import undefined_symbols


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
    assert undefined_symbols(code) == []


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


def test_functions_that_only_kernels_call_have_no_machine_code() -> None:
    def kernel(x):
        return own(x) + 1

    assert Compiled(kernel, "int64(int64)").call(3) == 11
    function = deferred.resolved(own)
    (compiled,) = function.overloads.values()
    assert not isinstance(compiled.library, JITCodeLibrary)
    with pytest.raises(TypeError):
        function(3)


def test_numbas_own_target_is_back_afterwards() -> None:
    numbas = cpu_target.target_context

    def kernel(x):
        return x.no_such_attribute

    with pytest.raises(TypingError):
        Compiled(kernel, "int64(int64)").compile()
    assert cpu_target.target_context is numbas
    assert njit(lambda x: x + 1)(2) == 3
