"""Object code that is loaded without LLVM."""

import contextlib
import ctypes
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding

from llamacli.kernels import elf
from llamacli.kernels.elf import UnsupportedCodeError, load

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="other systems have LLVM's linker"
)

IR = """
@table = internal constant [3 x i64] [i64 11, i64 22, i64 33], align 64
@names = internal constant [2 x ptr] [ptr getelementptr (i8, ptr @table, i64 8), ptr @looked_up]
declare double @cbrt(double)
declare i64 @own_one(i64)
define double @root(double %x) noinline {
  %y = call double @cbrt(double %x)
  ret double %y
}
define i64 @looked_up(i64 %i) {
  %place = getelementptr [3 x i64], ptr @table, i64 0, i64 %i
  %value = load i64, ptr %place
  %changed = call i64 @own_one(i64 %value)
  ret i64 %changed
}
define i64 @indirect() {
  %there = load volatile ptr, ptr @names
  %value = load i64, ptr %there
  %function_place = getelementptr ptr, ptr @names, i64 1
  %function = load volatile ptr, ptr %function_place
  %other = call i64 %function(i64 2)
  %sum = add i64 %value, %other
  ret i64 %sum
}
"""


def compiled(text: str, *, model: str = "jitdefault", reloc: str = "static", triple: str = "") -> bytes:
    """Object code, by default as kernels are compiled."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple or binding.get_process_triple())
    machine = target.create_target_machine(reloc=reloc, codemodel=model, jit=True)
    return bytes(machine.emit_object(binding.parse_assembly(text)))


@pytest.fixture(scope="module")
def code() -> bytes:
    return compiled(IR)


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def own_one(x: int) -> int:
    return x + 1


OWN = {"own_one": ctypes.cast(own_one, ctypes.c_void_p).value or 0}


def call(address: int, kind: type, *args: float) -> float:
    return ctypes.CFUNCTYPE(kind, *[kind] * len(args))(address)(*args)


def test_undefined_symbols(code: bytes) -> None:
    assert elf.undefined_symbols(code) == ["cbrt", "own_one"]
    assert elf.undefined_symbols(b"\xcf\xfa\xed\xfe" + bytes(100)) is None
    assert elf.undefined_symbols(b"") is None


def test_functions_of_libraries_are_found(code: bytes) -> None:
    assert call(load(code, "root", OWN), ctypes.c_double, 27.0) == pytest.approx(3.0)


def test_constants_and_own_symbols_are_found(code: bytes) -> None:
    assert call(load(code, "looked_up", OWN), ctypes.c_int64, 1) == 23
    assert call(load(code, "indirect", OWN), ctypes.c_int64) == 22 + 34


def test_nothing_is_writable_and_executable(code: bytes) -> None:
    address = load(code, "root", OWN)
    ranges = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {tuple(int(edge, 16) for edge in edges.split("-")): kind for edges, kind in ranges}
    (kind,) = [kind for (start, end), kind in found.items() if start <= address < end]
    assert kind == "r-xp"


@pytest.mark.parametrize(
    "text",
    [
        "@x = global i64 1\ndefine void @f() {\n store i64 2, ptr @x\n ret void\n}",
        "@x = common global i64 0\ndefine void @f() {\n store i64 2, ptr @x\n ret void\n}",
        "@x = thread_local global i64 0\ndefine void @f() {\n store i64 2, ptr @x\n ret void\n}",
        "declare void @llamacli_is_not_there()\ndefine void @f() {\n call void @llamacli_is_not_there()\n ret void\n}",
        "declare void @__init__()\ndefine void @f() {\n call void @__init__()\n ret void\n}",
        "@f = constant i64 1",
        "define void @g() {\n ret void\n}",
    ],
    ids=["variable", "common", "thread", "undefined", "of_python", "constant", "missing"],
)
def test_other_code_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedCodeError):
        load(compiled(text), "f", {})


@pytest.mark.parametrize(
    "options",
    [{"model": "small"}, {"model": "small", "reloc": "pic"}, {"triple": "aarch64-unknown-linux-gnu"}],
    ids=["small", "pic", "arm"],
)
def test_other_kinds_of_code_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(UnsupportedCodeError):
        load(compiled(IR, **options), "root", OWN)


def test_memory_that_must_not_run_is_refused(code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SELinux, for instance."""

    class Refusing:
        mprotect: Callable[..., int] = staticmethod(lambda *_: -1)
        __getitem__ = staticmethod(ctypes.CDLL(None).__getitem__)

    monkeypatch.setattr(elf, "_process", Refusing)
    with pytest.raises(UnsupportedCodeError, match="protected"):
        load(code, "root", OWN)


def test_every_number_is_checked(code: bytes) -> None:
    """Other numbers are an error, or other code, which is not run."""
    (sections_at,) = struct.unpack_from("<Q", code, 40)
    for at in [*range(0, 64, 2), *range(sections_at, len(code), 4)]:
        for value in (0xFFFF, 0x7FFF, 1):
            damaged = bytearray(code)
            struct.pack_into("<H", damaged, at, value)
            with contextlib.suppress(UnsupportedCodeError):
                assert load(bytes(damaged), "root", OWN) > 0


@given(n_bytes=st.integers(0, 1 << 20))
def test_cut_code_is_refused(code: bytes, n_bytes: int) -> None:
    with pytest.raises(UnsupportedCodeError):
        load(code[: n_bytes % len(code)], "root", OWN)
