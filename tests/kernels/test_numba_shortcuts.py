"""Shortcuts through Numba's compiler: same machine code as without."""

import contextlib

import numba
import numpy as np
import pytest
from numba.core import ir, postproc
from numba.core.errors import TypingError
from numba.core.types import BaseFunction

from llamacli.kernels import linker, numba_shortcuts, numba_target
from llamacli.kernels.compiler import compile_function
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.jit import Compiled
from llamacli.kernels.simd import pointer

_PROGBITS = 1


@njit
def squares(n):
    for i in range(n):
        yield i * i


def sum_of_squares(n):
    total = 0
    for square in squares(n):
        total += square
    return total


@njit(error_model="numpy")
def quotient(x, y):
    return x / y


def quotients(x, y):
    return quotient(x, y) + (x / y if y > 0.0 else -1.0)


def larger_half(address, n):
    x = carray(pointer(address), n, np.float32)
    total, ends = np.float32(0), (x[0], x[n - 1])
    for i in range(n // 2, n):
        total += max(x[i], ends[0]) * x[i] - ends[1]
    return total


def machine_code(function, signature: str) -> list[bytes]:
    """Sections of code and constants, which hold no names."""
    _, code = compile_function(function, signature, "code")
    _, _, at, size, count = linker._HEADER.unpack_from(code)
    sections = [linker._SECTION.unpack_from(code, at + i * size) for i in range(count)]
    return [code[start : start + length] for kind, start, length, _, _ in sections if kind == _PROGBITS and length]


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (sum_of_squares, "int64(int64)"),
        (quotients, "float64(float64, float64)"),
        (larger_half, "float32(int64, int64)"),
    ],
)
def test_machine_code_is_that_of_numba_alone(function, signature, monkeypatch) -> None:
    machine_code(function, signature)  # what it calls is compiled once, and types of calls are remembered
    short = machine_code(function, signature)
    monkeypatch.setattr(numba_target, "shortcuts", contextlib.nullcontext)
    assert short == machine_code(function, signature)
    assert short


def test_numba_is_as_before_afterwards(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    places = (BaseFunction, "get_call_type"), (postproc.PostProcessor, "run"), (ir.Inst, "_rec_list_vars")
    before = [getattr(owner, name) for owner, name in places]

    def kernel(x):
        return x.no_such_attribute

    with pytest.raises(TypingError) as error:
        Compiled(kernel, "int64(int64)").compile()
    assert "no_such_attribute" in str(error.value)
    assert "\x1b" not in str(error.value)
    assert [getattr(owner, name) for owner, name in places] == before


def test_another_version_of_numba_has_none(monkeypatch) -> None:
    before = BaseFunction.get_call_type
    with numba_shortcuts.shortcuts():
        assert (BaseFunction.get_call_type is before) != numba.__version__.startswith(numba_shortcuts.VERSIONS)
    monkeypatch.setattr(numba, "__version__", "1.0.0")
    with numba_shortcuts.shortcuts():
        assert BaseFunction.get_call_type is before
