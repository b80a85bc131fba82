"""Helpers of KV cache tests: sequences, cells, interrupts."""

import dis
import sys
from types import FrameType

import numpy as np

from llamacli.kv import KVLayout, KVPool, KVSequence, KVSpec

ONE = KVSpec(2, 4)
"""A layer without a window."""


def new_sequence(layers: list[KVSpec], seq_len: int, kv_type: str | tuple[str, str] = "f32") -> KVSequence:
    return KVSequence(KVPool(KVLayout.of(layers, kv_type)), seq_len)


def random_cells(n: int, spec: KVSpec = ONE, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(n, spec.n_head_kv, spec.head_dim)).astype(np.float32) for _ in range(2))


def fill(sequence: KVSequence, start: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    k, v = random_cells(n, seed=seed)
    sequence.reserve(start, n)
    for layer in range(len(sequence.pool.layout.specs)):
        sequence.write(layer, start, k, v)
    return k, v


CHECKED = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}
"""Instructions after which CPython checks for signals."""


class InterruptAt:
    """Context manager that raises and suppresses one KeyboardInterrupt.

    It is raised at the nth signal check in a file's code.
    """

    def __init__(self, file: str, n: int):
        self.file, self.n = file, n
        self.last: dict[int, str] = {}

    def __enter__(self) -> "InterruptAt":
        self.outer = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self.outer)
        return kind is KeyboardInterrupt

    def enter(self, frame: FrameType, event: str, arg: object) -> object:
        frame.f_trace_opcodes = frame.f_code.co_filename == self.file
        return self.step if frame.f_trace_opcodes else None

    def step(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "opcode":
            before = self.last.get(id(frame))
            self.last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.n -= before in CHECKED
            if not self.n:
                raise KeyboardInterrupt
        return self.step
