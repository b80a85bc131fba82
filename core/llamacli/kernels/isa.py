"""Instruction set that kernels are compiled for."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

from llvmlite import binding

from llamacli.errors import InvalidRequestError

ISAS = ("generic", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "i8mm")
"""`avxvnni` and `avx512` have the integer dot product of VNNI, `neon` that of ARM's FEAT_DotProd, of signed bytes, and
`i8mm` that of FEAT_I8MM, of unsigned by signed ones; `generic` is plain LLVM IR, compiled for any CPU. `avx512bf16` is
`avx512` with the dot product of bfloat16, `amx` with tiles of bfloat16."""

ARM = ("neon", "i8mm")
AVX512 = ("avx512", "avx512bf16", "amx")

VARIABLE = "LLAMACLI_ISA"

_DOTS = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @dot_{name}(<16 x i8> %x, <16 x i8> %y) {{
  %a = {extend} <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %products = mul <16 x i32> %a, %b
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}}
"""


def host() -> tuple[str, str, str]:
    """Triple, name and features of this CPU, for LLVM."""
    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


@functools.cache
def features() -> frozenset[str]:
    """The instruction-set extensions of this CPU, by LLVM's names."""
    listed = {name for name, present in binding.get_host_cpu_features().items() if present}
    if platform.machine().lower() in ("aarch64", "arm64"):
        triple, cpu, flags = host()
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        listed |= arm_features(binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=flags))
    return frozenset(listed)


def arm_features(machine: binding.TargetMachine) -> frozenset[str]:
    """`dotprod` and `i8mm`, if this compiles for a CPU that has them.

    LLVM knows most extensions of an ARM CPU by its name and does not list them, and to use one that it does not know of
    would end the process. So this looks at what it makes of plain dot products.
    """
    found = {}
    for name, extend, instruction in (("dotprod", "sext", "\tsdot"), ("i8mm", "zext", "\tusdot")):
        module = binding.parse_assembly(_DOTS.format(name=name, extend=extend))
        found[name] = instruction in machine.emit_assembly(module)
    return frozenset(name for name, present in found.items() if present)


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's system call on x86-64, its ARCH_REQ_XCOMP_PERM, and the state component of tiles."""


def _tiles_permitted() -> bool:
    """Ask Linux for the permission of this process to use AMX.

    It holds for all threads, and for processes that are forked.
    """
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def available() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, slowest first.

    Intel's dot product of two bfloat16 takes four times as long as a multiplication of float32; AMD's takes as long, as
    its tables say.
    """
    has = features()
    runs = ["generic"]
    if {"avx2", "fma", "f16c"} <= has:
        runs.append("avx2")
        if "avxvnni" in has:
            runs.append("avxvnni")
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"} <= has:
        runs.append("avx512")
        if "avx512bf16" in has:
            runs.insert(len(runs) - (not host()[1].startswith("znver")), "avx512bf16")
            if {"amx-tile", "amx-bf16"} <= has and _tiles_permitted():
                runs.append("amx")
    if "dotprod" in has:
        runs.append("neon")
        if "i8mm" in has:
            runs.append("i8mm")
    return tuple(runs)


@functools.cache
def isa() -> str:
    """Instruction set in use.

    The best available, or the one that LLAMACLI_ISA names. Raises InvalidRequestError if LLAMACLI_ISA names none, or
    one that this CPU cannot run.
    """
    forced = os.environ.get(VARIABLE)
    if not forced:
        return available()[-1]
    if forced not in ISAS:
        raise InvalidRequestError(f"{VARIABLE} = {forced!r} is not one of {', '.join(ISAS)}")
    if forced not in available():
        raise InvalidRequestError(f"{VARIABLE} = {forced!r}, but this CPU runs only {', '.join(available())}")
    return forced
