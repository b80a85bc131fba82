"""Instruction set that kernels are compiled for."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from typing import Any

from llamacli.errors import InvalidRequestError
from llamacli.kernels.cpu import host

ISAS = ("generic", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "i8mm")
"""`avxvnni` and `avx512` have the integer dot product of VNNI, `neon` that of ARM's FEAT_DotProd, of signed bytes, and
`i8mm` that of FEAT_I8MM, of unsigned by signed ones; `generic` is plain LLVM IR, compiled for the CPU at hand.
`avx512bf16` is `avx512` with the dot product of bfloat16, `amx` with tiles of bfloat16."""

_V3 = frozenset({"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"})
_V4 = frozenset({*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"})
_BF16 = _V4 | {"avx512bf16"}
_NEEDS: dict[str, frozenset[str]] = {
    "avx2": _V3,
    "avxvnni": _V3 | {"avxvnni"},
    "avx512": _V4,
    "avx512bf16": _BF16,
    "amx": _BF16 | {"amx-tile", "amx-bf16"},
    "neon": frozenset({"dotprod"}),
    "i8mm": frozenset({"dotprod", "i8mm"}),
}
"""Extensions that a CPU needs for an instruction set, by LLVM's names."""

_SKYLAKE = "-adx,-aes,-clflushopt,-fsgsbase,-invpcid,-pclmul,-prfchw,-rdrnd,-rdseed,-sgx,-xsavec,-xsaveopt,-xsaves"
_TUNING = "+fast-dpwssd"
"""No extension: without it LLVM splits VPDPWSSD in two, with a broadcast of its own, for less latency."""

_TARGETS = {
    "avx2": ("skylake", _SKYLAKE),
    "avxvnni": ("skylake", f"{_SKYLAKE},+avxvnni,{_TUNING}"),
    "avx512": ("x86-64-v4", f"+avx512vnni,{_TUNING}"),
    "avx512bf16": ("x86-64-v4", f"+avx512vnni,+avx512bf16,{_TUNING}"),
    "amx": ("x86-64-v4", f"+avx512vnni,+avx512bf16,+amx-tile,+amx-bf16,{_TUNING}"),
    "neon": ("generic", "+v8.2a,+dotprod"),
    "i8mm": ("generic", "+v8.2a,+dotprod,+i8mm"),
}
"""CPU whose costs of instructions LLVM assumes, and features: what every CPU with the instruction set has, no more.

Skylake without the features that follow is level x86-64-v3 of the psABI; x86-64-v4 has Skylake's costs too."""

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


def target() -> tuple[str, str, str]:
    """Triple, name and features of the CPU that kernels are compiled for.

    Nothing but the instruction set counts, so that code runs on each CPU that it is chosen on; that of `generic` is for
    this CPU alone.
    """
    triple, cpu, flags = host()
    if isa() != "generic":
        cpu, flags = _TARGETS[isa()]
        if architecture(triple) != (arch := "aarch64" if isa() in ARM else "x86_64"):
            triple = f"{arch}-unknown-linux-gnu"
    return triple, cpu, flags


def architecture(triple: str) -> str:
    """Architecture of a triple, such as `x86_64` or `aarch64`."""
    return triple.partition("-")[0].replace("arm64", "aarch64")


def target_machine(opt: int = 3) -> Any:
    """LLVM's target machine, which object code for `target` is made by."""
    from llvmlite import binding

    triple, cpu, flags = target()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=flags, opt=opt, reloc="static" if architecture(triple) == "x86_64" else "default",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip


@functools.cache
def features() -> frozenset[str]:
    """The instruction-set extensions of this CPU, by LLVM's names."""
    triple, cpu, flags = host()
    listed = {flag[1:] for flag in flags.split(",") if flag.startswith("+")}
    if platform.machine().lower() in ("aarch64", "arm64"):
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        listed |= arm_features(binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=flags))
    return frozenset(listed)


def arm_features(machine: Any) -> frozenset[str]:
    """`dotprod` and `i8mm`, if this compiles for a CPU that has them.

    LLVM knows most extensions of an ARM CPU by its name and does not list them, and to use one that it does not know of
    would end the process. So this looks at what it makes of plain dot products.
    """
    from llvmlite import binding

    found = {}
    for name, extend, instruction in (("dotprod", "sext", "\tsdot"), ("i8mm", "zext", "\tusdot")):
        module = binding.parse_assembly(_DOTS.format(name=name, extend=extend))
        found[name] = instruction in machine.emit_assembly(module)
    return frozenset(name for name, present in found.items() if present)


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's system call on x86-64, its ARCH_REQ_XCOMP_PERM, and the state component of tiles."""


def _tiles_permitted() -> bool:
    """Ask Linux to permit AMX, for all threads and forked processes."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def available() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, slowest first.

    Intel's dot product of two bfloat16 takes four times as long as a multiplication of float32; AMD's takes as long, as
    its tables say.
    """
    has = features()
    runs = ["generic", *(name for name in _TARGETS if _NEEDS[name] <= has)]
    if "avx512bf16" in runs and not host()[1].startswith("znver"):
        first = runs.index("avx512")
        runs[first : first + 2] = "avx512bf16", "avx512"
    if "amx" in runs and not _tiles_permitted():
        runs.remove("amx")
    return tuple(runs)


_foreign: list[str] = []


def compile_for(name: str) -> None:
    """Choose an instruction set that this CPU may lack.

    To be called before anything asks for it. Kernels can be compiled then, and none is to be run.
    """
    assert not isa.cache_info().currsize, "kernels of this process are for another instruction set"
    _foreign.append(name)


def is_foreign() -> bool:
    """True if kernels are compiled that are not to be run here."""
    return bool(_foreign)


@functools.cache
def isa() -> str:
    """Instruction set in use.

    The best available, or the one that LLAMACLI_ISA names. Raises InvalidRequestError if LLAMACLI_ISA names none, or
    one that this CPU cannot run.
    """
    if _foreign:
        return _foreign[0]
    forced = os.environ.get(VARIABLE)
    if not forced:
        return available()[-1]
    if forced not in ISAS:
        raise InvalidRequestError(f"{VARIABLE} = {forced!r} is not one of {', '.join(ISAS)}")
    if forced not in available():
        raise InvalidRequestError(f"{VARIABLE} = {forced!r}, but this CPU runs only {', '.join(available())}")
    return forced
