"""Which instruction set the kernels are compiled for."""

from __future__ import annotations

import functools
import os

from llvmlite import binding

from llamacli.errors import InvalidRequestError

ISAS = ("generic", "avx2", "avxvnni", "avx512")
"""`avxvnni` and `avx512` have the integer dot product of VNNI; `generic` is plain LLVM IR, compiled for any CPU."""

VARIABLE = "LLAMACLI_ISA"


@functools.cache
def features() -> frozenset[str]:
    """The instruction-set extensions of this CPU, by LLVM's names."""
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


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
    return tuple(runs)


@functools.cache
def isa() -> str:
    """The instruction set in use: the best available, or the one that LLAMACLI_ISA names.

    Raises InvalidRequestError if LLAMACLI_ISA names none, or one that this CPU cannot run.
    """
    forced = os.environ.get(VARIABLE)
    if not forced:
        return available()[-1]
    if forced not in ISAS:
        raise InvalidRequestError(f"{VARIABLE} = {forced!r} is not one of {', '.join(ISAS)}")
    if forced not in available():
        raise InvalidRequestError(f"{VARIABLE} = {forced!r}, but this CPU runs only {', '.join(available())}")
    return forced
