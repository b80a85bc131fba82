"""Object code that is linked without Numba."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from llamacli.engine.catalog import catalog
from llamacli.kernels import elf, jit, linker

IR = """
declare double @cbrt(double)
declare void @{missing}()
@shared = weak global i64 0
define double @root_{missing}(double %x) {{
  %y = call double @cbrt(double %x)
  ret double %y
}}
define void @never_{missing}() {{
  call void @{missing}()
  ret void
}}
"""


def object_code(missing: str) -> bytes:
    """Object code that refers to two functions."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return machine.emit_object(binding.parse_assembly(IR.format(missing=missing)))


def test_undefined_symbols() -> None:
    assert elf.undefined_symbols(object_code("one_more")) == ["cbrt", "one_more"]
    assert elf.undefined_symbols(b"\xcf\xfa\xed\xfe" + bytes(100)) is None


def test_code_is_linked() -> None:
    import ctypes

    code = object_code("labs")
    address = linker.link(code, "root_labs", elf.undefined_symbols(code))
    assert address
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(address)(27.0) == pytest.approx(3.0)


def test_code_that_needs_what_is_not_there_is_refused() -> None:
    """LLVM would end the process."""
    code = object_code("llamacli_is_not_there")
    assert linker.link(code, "root_llamacli_is_not_there", elf.undefined_symbols(code)) is None


FAILS = """
from llamacli.kernels.jit import Compiled
def divided(x): return 7 // x
print(Compiled(divided, "int64(int64)").call(0))
"""

ALLOCATES = """
import sys
import numpy as np
from llamacli.kernels.jit import Compiled
def allocating(n): return np.arange(n).sum()
print(Compiled(allocating, "int64(int64)").call(5), "numba" in sys.modules)
"""

ALLOCATES_AFTER_OTHERS = """
import sys
import numpy as np
from llamacli.kernels.jit import ArrayFunction, Compiled
def summed(x): return x[1:].sum()
ArrayFunction(summed, "int64(int64[::1])")(np.arange(3))
def allocating(n): return np.arange(n).sum()
print(Compiled(allocating, "int64(int64)").call(5), "numba" in sys.modules)
"""

FIRST_OF_A_PROCESS = """
import sys
from llvmlite import binding
from llamacli.kernels import elf, linker
binding.initialize_native_target()
binding.initialize_native_asmprinter()
machine = binding.Target.from_default_triple().create_target_machine(jit=True)
code = machine.emit_object(binding.parse_assembly('''
declare void @NRT_MemInfo_call_dtor()
define void @root() {
  call void @NRT_MemInfo_call_dtor()
  ret void
}
'''))
needs = elf.undefined_symbols(code)
print(needs, bool(linker.link(code, "root", needs)), bool(binding.address_of_symbol(*needs)))
"""


@pytest.mark.medium
def test_first_code_of_a_process_needs_no_function_of_the_system() -> None:
    """LLVM knows the system's functions only once there is a linker."""
    command, env = [sys.executable, "-c", FIRST_OF_A_PROCESS], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "['NRT_MemInfo_call_dtor'] True True\n"


@pytest.mark.medium
@pytest.mark.parametrize(
    "program",
    [FAILS, pytest.param(ALLOCATES, marks=pytest.mark.slow), ALLOCATES_AFTER_OTHERS],
    ids=["fails", "allocates", "allocates_after_others"],
)
def test_code_from_the_cache_does_what_compiled_code_does(program: str, tmp_path: Path) -> None:
    env = os.environ | {"LLAMACLI_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        if program is not FAILS:  # Numba's allocator is imported for it
            assert done.stdout == "10 True\n", done.stderr
        else:
            assert done.stdout == "0\n"
            assert "RuntimeError: the compiled function divided raised an exception" in done.stderr


def test_no_kernel_needs_anything_of_numba() -> None:
    """Only functions of the system, and one that the linker registers."""
    folder = jit.cache_directory()
    needs = {}
    for path in (folder / kernel.file_name for kernel in catalog()):
        head = path.read_bytes()[32:].partition(b"\n")[0] if path.exists() else b"[0, []]"
        needs[path.stem] = set(json.loads(head)[1] or ())
    foreign = {
        name: sorted(found)
        for name, symbols in needs.items()
        if (found := {symbol for symbol in symbols if symbol.startswith(("numba_", "NRT_", "Py"))})
    }
    assert foreign == {}
