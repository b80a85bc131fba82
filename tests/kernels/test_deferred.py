"""Stand-ins for Numba's names, until a kernel has to be compiled."""

import os
import subprocess
import sys

import pytest

from llamacli.kernels.deferred import Deferred, resolve_closure, resolved

PROGRAM = """
import sys
from llamacli.kernels import api, attention, jit, simd, team
from llamacli.kernels.deferred import Deferred, import_numba, resolve_closure
import llamacli.session, llamacli.model, llamacli.engine.native
assert "numba" not in sys.modules
assert isinstance(api.njit, Deferred) and isinstance(simd.f32x16, Deferred)
import_numba()
import numba
left = [(module.__name__, name) for module in list(sys.modules.values()) for name, value in vars(module).items()
        if isinstance(value, Deferred)]
assert left == [], left
from llamacli.kernels import arrays
assert api.njit is numba.njit and api.carray is arrays.carray and str(simd.f32x16) == "f32x16"
print("replaced")
"""


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {"PYTHONPATH": paths} | env
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


@pytest.mark.medium
def test_modules_of_kernels_import_no_numba_until_it_is_needed() -> None:
    done = run(PROGRAM, NUMBA_DISABLE_JIT="0")
    assert done.stdout == "replaced\n", done.stderr


@pytest.mark.medium
def test_functions_are_python_code_where_numba_compiles_nothing() -> None:
    program = """
import sys
from llamacli.kernels.deferred import carray, njit, register_jitable
def double(x): return 2 * x
print(njit(double) is double, njit(inline="always")(double) is double, register_jitable(double) is double)
import llamacli.session, llamacli.model
print("numba" in sys.modules)
import numba, numpy as np
x = np.arange(6, dtype=np.float32)
print(numba.njit(double) is double, carray(x.ctypes.data_as(__import__("ctypes").c_void_p), (2, 3), np.float32)[1, 2])
"""
    done = run(program, NUMBA_DISABLE_JIT="1")
    assert done.stdout == "True True True\nFalse\nTrue 5.0\n", done.stderr


def test_attributes_and_calls_are_made_once_and_late() -> None:
    made: list[str] = []

    def make() -> type[str]:
        made.append("str")
        return str

    deferred = Deferred(make)
    text = deferred(Deferred(lambda: 12))
    size = text.zfill(Deferred(lambda: 4))
    assert made == []
    assert (resolved(text), resolved(size), resolved(7)) == ("12", "0012", 7)
    assert resolved(text) is resolved(text)
    assert made == ["str"]
    with pytest.raises(AttributeError):
        deferred.__wrapped__  # noqa: B018 - looked for by `hasattr`


def test_stand_ins_in_closures_are_replaced() -> None:
    inner, unset = Deferred(lambda: 5), Deferred(lambda: 7)

    def within() -> object:
        return unset

    def function() -> object:
        return inner, within()

    resolve_closure(function)
    assert function() == (5, 7)
