"""Instruction set that kernels are compiled for."""

from __future__ import annotations

import functools
import os
import platform

from llvmlite import binding

from llamacli.errors import InvalidRequestError

ISAS = ("generic", "avx2", "avxvnni", "avx512", "neon", "i8mm")
"""`avxvnni` and `avx512` have the integer dot product of VNNI, `neon` that of ARM's FEAT_DotProd, of signed bytes, and
`i8mm` that of FEAT_I8MM, of unsigned by signed ones; `generic` is plain LLVM IR, compiled for any CPU."""

ARM = ("neon", "i8mm")

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


def available() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, slowest first."""
    has = features()
    runs = ["generic"]
    if {"avx2", "fma", "f16c"} <= has:
        runs.append("avx2")
        if "avxvnni" in has:
            runs.append("avxvnni")
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"} <= has:
        runs.append("avx512")
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
