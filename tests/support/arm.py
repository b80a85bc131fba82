"""AArch64 machine code of emitted functions, run in the emulator `unicorn`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from llvmlite import binding
from llvmlite import ir as llvm

from llamacli.kernels import ir
from llamacli.kernels.linker import _register

TRIPLE = "aarch64-unknown-linux-gnu"
CPUS = {"generic": "cortex-a53", "neon": "neoverse-n1", "i8mm": "neoverse-v1"}
"""CPU to compile for, by the best instruction set that it has."""

PAGE, STACK, RETURN = 4096, 1 << 20, 0x1000


def machine(cpu: str) -> binding.TargetMachine:
    """Target machine of an ARM CPU, with MCJIT's options."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple(TRIPLE).create_target_machine(cpu=cpu, features="", opt=3, jit=True)


def host() -> binding.TargetMachine:
    """Target machine of this CPU."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True
    )


class Emitted:
    """Compiled function of int64 arguments, addresses or integers.

    `emit` emits the body for the instruction set `isa`.

    LLVM's loader puts its code into this process, ready to run at its address on the CPU that it is for.
    """

    def __init__(self, isa: str, target: binding.TargetMachine, n_args: int, emit: Callable[..., None]):
        module, chosen = llvm.Module(), ir.isa
        module.triple, module.data_layout = target.triple, str(target.target_data)
        function = llvm.Function(module, llvm.FunctionType(llvm.VoidType(), [ir.I64] * n_args), "emitted")
        b = llvm.IRBuilder(function.append_basic_block())
        ir.isa = lambda: isa
        try:
            emit(b, *function.args)
        finally:
            ir.isa = chosen
        b.ret_void()
        parsed = binding.parse_assembly(str(module))
        passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        self.assembly = target.emit_assembly(parsed)
        self._n_args = n_args
        self._engine = binding.create_mcjit_compiler(parsed, target)
        self._engine.finalize_object()
        self._address = self._engine.get_function_address("emitted")


class HostFunction(Emitted):
    """Function compiled for this CPU and one of its instruction sets."""

    def __init__(self, isa: str, n_args: int, emit: Callable[..., None]):
        super().__init__(isa, host(), n_args, emit)

    def __call__(self, *args: int | np.ndarray) -> None:
        """Run it."""
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._n_args)(self._address)
        call(*map(number, args))


class ArmFunction(Emitted):
    """Function compiled for an ARM CPU whose best instruction set is `isa`.

    The emulator sees this process's memory at its own addresses, page by page as it asks for it, so operands are NumPy
    arrays.
    """

    def __init__(self, isa: str, n_args: int, emit: Callable[..., None]):
        super().__init__(isa, machine(CPUS[isa]), n_args, emit)

    def count(self, instruction: str) -> int:
        """Count an instruction in the assembly."""
        return [line.split()[:1] for line in self.assembly.splitlines()].count([instruction])

    def __call__(self, *args: int | np.ndarray) -> None:
        """Run it in the emulator."""
        import unicorn
        from unicorn import arm64_const as arm

        cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        cpu.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)

        def share_page(cpu: unicorn.Uc, access: int, address: int, *_: object) -> bool:
            page = address // PAGE * PAGE
            cpu.mem_map_ptr(page, PAGE, unicorn.UC_PROT_ALL, page)
            return True

        cpu.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, share_page)
        for i, arg in enumerate(args):
            cpu.reg_write(arm.UC_ARM64_REG_X0 + i, number(arg))
        stack = np.zeros(STACK, np.uint8)
        cpu.reg_write(arm.UC_ARM64_REG_SP, (stack.ctypes.data + STACK // 2) // 16 * 16)
        cpu.reg_write(arm.UC_ARM64_REG_X30, RETURN)
        at = self._address
        while at != RETURN:
            try:
                cpu.emu_start(at, RETURN)
            except unicorn.UcError:
                at = cpu.reg_read(arm.UC_ARM64_REG_PC)
                if not _usdot(cpu, ctypes.c_uint32.from_address(at).value):
                    raise
                at += 4
            else:
                at = cpu.reg_read(arm.UC_ARM64_REG_PC)


class ArmObject(ArmFunction):
    """Function of AArch64 object code, which is linked for the emulator."""

    def __init__(self, code: bytes, symbol: str):
        self._engine = binding.create_mcjit_compiler(
            binding.parse_assembly(f'target triple = "{TRIPLE}"'), machine("neoverse-v1")
        )
        _register([])  # LLVM would end the process if it did not know the function for failures
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._address = self._engine.get_function_address(symbol)


def number(arg: int | np.ndarray) -> int:
    """Convert an argument to an integer; an array becomes its address."""
    return arg.ctypes.data if isinstance(arg, np.ndarray) else arg


def _usdot(cpu: object, word: int) -> bool:
    """Emulate USDOT, which unicorn lacks; False if `word` is another instruction.

    Arm Architecture Reference Manual, C7.2, USDOT (vector) and (by element), of 128 bits.
    """
    from unicorn import arm64_const as arm

    def lanes(register: int, kind: type[np.generic]) -> np.ndarray:
        value: int = cpu.reg_read(arm.UC_ARM64_REG_V0 + register)
        return np.frombuffer(value.to_bytes(16, "little"), kind)

    total, unsigned, signed = word & 31, word >> 5 & 31, word >> 16 & 31
    x, y = lanes(unsigned, np.uint8).reshape(4, 4), lanes(signed, np.int8).reshape(4, 4)
    if word & 0xFFC0F400 == 0x4F80F000:
        y = y[(word >> 11 & 1) * 2 + (word >> 21 & 1)]
    elif word & 0xFFE0FC00 != 0x4E809C00:
        return False
    result = lanes(total, np.int32) + (x.astype(np.int32) * y).sum(axis=1, dtype=np.int32)
    cpu.reg_write(arm.UC_ARM64_REG_V0 + total, int.from_bytes(result.astype("<i4").tobytes(), "little"))
    return True
