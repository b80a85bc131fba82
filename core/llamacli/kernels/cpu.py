"""Features of this CPU as LLVM finds them, kept in a file.

Loading LLVM for them alone would take 40 MB and 30 ms of each start with cached kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
from pathlib import Path

from llvmlite import __version__

from llamacli.errors import LlamaCliError
from llamacli.kernels.elf import UnsupportedCodeError, executable, is_supported
from llamacli.util.files import make_own_folder, open_own, replacing
from llamacli.util.folders import cache_folder

_FILE = "cpu.json"

_CPUID = bytes.fromhex(
    "53 89f8 89f1 4989d0"  # push rbx; mov eax, edi; mov ecx, esi; mov r8, rdx
    "0fa2 418900 41895804"  # cpuid; mov [r8], eax; mov [r8 + 4], ebx
    "41894808 4189500c 5b c3"  # mov [r8 + 8], ecx; mov [r8 + 12], edx; pop rbx; ret
)
_XGETBV = bytes.fromhex("31c9 0f01d0 c3")  # xor ecx, ecx; xgetbv; ret

_EXTENDED, _OSXSAVE = 1 << 31, 1 << 27
_LEAVES = (
    (0, 0, "abcd"), (1, 0, "acd"), (7, 0, "abcd"), (7, 1, "abcd"), (0xD, 1, "a"), (0x14, 0, "b"), (0x19, 0, "b"),
    (0x1E, 1, "a"), (0x24, 0, "b"), (_EXTENDED, 0, "a"), (_EXTENDED | 1, 0, "cd"), (_EXTENDED | 8, 0, "b"),
)  # fmt: skip
"""Leaves of the instruction CPUID that LLVM reads, and their registers: others may tell cores apart."""


@functools.cache
def host() -> tuple[str, str, str]:
    """Triple, name and features of this CPU, for LLVM."""
    key, folder = _key(), cache_folder()
    if not key or not folder:
        return _ask_llvm()
    kept = _kept(folder / _FILE)
    if kept[:1] == [key]:
        _, triple, name, features = kept
        return triple, name, features
    found = _ask_llvm()
    with contextlib.suppress(LlamaCliError, OSError):
        make_own_folder(folder)
        with replacing(folder / _FILE, overwrite=True) as file:
            file.write(json.dumps([key, *found]).encode())
    return found


def _ask_llvm() -> tuple[str, str, str]:
    from llvmlite import binding

    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def _key() -> str:
    """Text about LLVM and the CPU, "" where the CPU cannot be asked."""
    if not is_supported():
        return ""
    with contextlib.suppress(UnsupportedCodeError):
        return f"{__version__} {_identity()}"
    return ""


def _identity() -> str:
    """Answers of CPUID, and the registers that the system saves, by XGETBV."""
    ask = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(executable(_CPUID))

    def answer(leaf: int, part: int) -> dict[str, int]:
        registers = (ctypes.c_uint32 * 4)()
        ask(leaf, part, registers)
        return dict(zip("abcd", registers, strict=True))

    last = {first: answer(first, 0)["a"] for first in (0, _EXTENDED)}
    found = [
        [answer(leaf, part)[name] for name in names] for leaf, part, names in _LEAVES if leaf <= last[leaf & _EXTENDED]
    ]
    saved = ctypes.CFUNCTYPE(ctypes.c_uint32)(executable(_XGETBV))() if answer(1, 0)["c"] & _OSXSAVE else 0
    return f"{found} {saved}"


def _kept(path: Path) -> list[str]:
    """Key, triple, name and features; [] of a damaged file, or another user's."""
    with contextlib.suppress(OSError, ValueError), open_own(path) as file:
        match json.load(file):
            case [str(), str(), str(), str()] as kept:
                return kept
    return []
