"""Digests in the names of plugins' kernels."""

import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import attrs
import numpy as np
import pytest
from numba import njit, types

import example_formats
from example_formats import Added
from llamacli.kernels import jit
from llamacli.kernels.digest import function_digest, packing_digest
from llamacli.kernels.layout import ACTIVATION, START
from llamacli.kernels.linear import LINEAR, linear
from llamacli.kernels.packing import pack
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.team import Team
from llamacli.quantization import FORMATS
from llamacli.testing.kernels import run_kernel

PACKING = example_formats.packing_q3()
FORMAT = example_formats.FORMATS[0]

HELPERS = """
import numpy as np
from numba import njit, types

TABLE = np.arange(8, dtype=np.uint8)
FACTOR = 1.0
UNUSED = 1

@njit
def low_bits(word, at):
    return word >> at & 7
"""

DECODER = """
from collections.abc import Callable
from {helpers} import low_bits
import {helpers} as helpers

FIRST = 2

def make(first=0):
    def decode(block, codes, fields, step=3):
        # reads words of 24 bits
        for i in range(4):
            at = FIRST + first + 3 * i
            word = block[at] | block[at + 1] << 8 | block[at + 2] << 16
            for j in range(8):
                codes[8 * i + j] = helpers.TABLE[low_bits(word, step * j)]
        fields[0] = block[0] | block[1] << 8
    return decode

decode = make()
"""

CHANGES = {
    "a constant": ("", "FIRST = 2", "FIRST = 0"),
    "an instruction": ("", "step * j", "step * (7 - j)"),
    "a default": ("", "step=3", "step=2"),
    "a captured value": ("", "make()", "make(1)"),
    "a helper": ("helpers", "& 7", "& 3"),
    "a helper's options": ("helpers", "@njit", "@njit(fastmath=True)"),
    "a table": ("helpers", "arange(8", "arange(1, 9"),
}
SAME = {
    "a comment": ("", "# reads words of 24 bits", "# 8 codes at a time"),
    "what is not used": ("helpers", "UNUSED = 1", "UNUSED = 2"),
}

numbers = itertools.count()


@pytest.fixture
def decoder(tmp_path, monkeypatch):
    """Decoder of a plugin of two modules, one of them edited."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(module: str = "", old: str = "", new: str = ""):
        name = f"added_decoder_{next(numbers)}"
        sources = {"": DECODER.format(helpers=f"{name}_helpers"), "helpers": HELPERS}
        assert old in sources[module]
        sources[module] = sources[module].replace(old, new)
        for suffix, source in (("", sources[""]), ("_helpers", sources["helpers"])):
            (tmp_path / f"{name}{suffix}.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(name).decode

    yield made
    for name in [name for name in sys.modules if name.startswith("added_decoder_")]:
        del sys.modules[name]


def of(decode) -> str:
    return packing_digest(attrs.evolve(PACKING, decode=decode))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_part_of_a_decoder_counts(change, decoder, monkeypatch) -> None:
    assert of(decoder(*change)) != of(decoder())


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_changes_no_kernel_does_not(change, decoder) -> None:
    assert of(decoder(*change)) == of(decoder())


def test_code_without_a_file_counts() -> None:
    def made(source: str):
        exec(source, names := {})
        return names["decode"]

    source = "def decode(block, codes, fields):\n    fields[0] = {}"
    assert of(made(source.format(1))) == of(made(source.format(1))) != of(made(source.format(2)))


@pytest.mark.parametrize(
    "change",
    [
        {"factors": lambda f: (f["scale"][0], f["scale"][0])},
        {"terms": lambda f, group: [(f["scale"][0], None)]},
        {"planes": (1, 2)},
        {"bias_bits": 3},
        {"bias_bits": None},
        {"table": tuple(range(16))},
        {"code_shift": 1},
        {"decode_table": lambda: np.zeros(3, np.uint8)},
        {"fields": {"scale": (attrs.evolve(PACKING.fields["scale"][0], exponent=0), 1)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_a_description_counts(change) -> None:
    assert packing_digest(attrs.evolve(PACKING, **change)) != packing_digest(PACKING)


@pytest.mark.medium
def test_it_is_the_same_in_every_process() -> None:
    code = "import example_formats as e; from llamacli.kernels.digest import packing_digest; "
    code += "print(packing_digest(e.packing_q3()), packing_digest(e.packing_t()))"
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONPATH": str(Path(example_formats.__file__).parent), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        expected = f"{packing_digest(PACKING)} {packing_digest(example_formats.packing_t())}\n"
        assert done.stdout == expected, done.stderr


straight = njit(inline="always")(example_formats.decode_q3)


def flipped(block, codes, fields) -> None:
    straight(block, codes, fields)
    for i in range(32):
        codes[i] ^= 7


def test_an_edited_plugin_gets_new_kernels_and_an_unchanged_one_the_old_ones(tmp_path, monkeypatch) -> None:
    """Row sums, by a tensor type of one id and name.

    Rows are multiplied by ones, so that products are sums."""
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    compiled: list[str] = []
    monkeypatch.setattr(jit, "listeners", [compiled.append])
    raw = np.random.default_rng(1).integers(0, 256, (ROWS, 14), dtype=np.uint8)
    raw[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    ones = np.zeros((1, 1), ACTIVATION)
    ones["q"], ones["scale"], ones["sum"] = 1, 1, 32
    ones["start"], ones["start_half"] = START - 128 * 32, START - 128 * 16
    team = Team(1)

    def sums(**edit) -> np.ndarray:
        packing = attrs.evolve(PACKING, **edit)
        monkeypatch.setitem(FORMATS, Added.Q3_S, attrs.evolve(FORMAT, packing=lambda: packing))
        packed, out = np.zeros((1, 1, packing.n_bytes), np.uint8), np.zeros((1, ROWS), np.float32)
        pack(team, Added.Q3_S, raw, packed, 32)
        run_kernel(
            team, linear(Added.Q3_S), LINEAR, n_rows=1, weight=packed, tile_bytes=packed.nbytes, n_tiles=1, n_blocks=1,
            x=ones, x_stride=ones.nbytes, out=out, out_stride=out.nbytes, bias=np.zeros(ROWS, np.float32), residual=0,
            n_groups=1, starts=0,
        )  # fmt: skip
        return out[0]

    expected = example_formats.dequantize_q3(raw).sum(axis=1)
    np.testing.assert_array_equal(sums(), expected)
    np.testing.assert_array_equal(sums(decode=flipped), -expected - 16)
    np.testing.assert_array_equal(sums(factors=lambda f: (f["scale"][0], f["scale"][0])), expected + 16)
    kept = len(compiled)
    assert len({name for name in compiled if "Q3_S" in name}) == 6
    np.testing.assert_array_equal(sums(), expected)
    np.testing.assert_array_equal(sums(decode=flipped), -expected - 16)
    assert len(compiled) == kept
    team.close()


def kernel_of(source: str, module: str = "llamacli_other") -> FunctionType:
    """A function of a plugin's module."""
    namespace = {"__name__": module}
    exec(source, namespace)
    function = namespace["double"]
    assert isinstance(function, FunctionType)
    return function


DOUBLE = """
FACTOR = 2
def helper(x):
    return x * FACTOR
def double(args, run, thread, n_threads):
    helper(args)
"""


def test_kernels_of_plugins_are_told_apart_by_their_code() -> None:
    digests = {
        function_digest(kernel_of(source))
        for source in (DOUBLE, DOUBLE.replace("FACTOR = 2", "FACTOR = 3"), DOUBLE.replace("x *", "x +"), DOUBLE + "\n")
    }
    assert len(digests) == 3
    assert function_digest(kernel_of(DOUBLE, "llamacli.ops.other")) == ""
    assert function_digest(kernel_of(DOUBLE, "llamacli_third")) not in digests


def test_functions_that_emit_instructions_count() -> None:
    from llamacli.kernels import ir

    def kernel(emit: object) -> FunctionType:
        namespace = {"__name__": "llamacli_other", "emit": emit}
        exec("def double(args, run, thread, n_threads):\n    emit(args)", namespace)
        return namespace["double"]

    def emitter(body: str) -> object:
        namespace = {"__name__": "llamacli_other"}
        exec(f"def emit(b, x):\n    return {body}", namespace)
        return ir.expose(types.int64, types.int64)(namespace["emit"])

    first, second = (function_digest(kernel(emitter(body))) for body in ("b.add(x, x)", "b.mul(x, x)"))
    assert first != second
    assert first == function_digest(kernel(emitter("b.add(x, x)")))


def test_a_plugins_kernel_is_warmed_up_under_its_digest() -> None:
    import llamacli_l2  # noqa: F401 - imports its verb
    from llamacli.engine.catalog import catalog
    from llamacli_l2.l2_norm import l2_norm_kernel

    name = l2_norm_kernel().name
    assert re.fullmatch(r"l2_norm_[0-9a-f]{16}", name)
    assert name in {kernel.name for kernel in catalog()}


GONE = """
from llamacli.kernels import jit
namespace = {"__name__": "llamacli_gone"}
exec("def nothing(args, run, thread, n_threads): pass", namespace)
compiled = []
jit.listeners.append(compiled.append)
assert jit.Kernel(namespace["nothing"]).address
print(*(name.partition("_")[0] for name in compiled))
"""


@pytest.mark.medium
def test_code_of_a_module_that_is_gone_is_loaded(tmp_path: Path) -> None:
    """Cached code needs no module to be imported."""
    env = os.environ | {"LLAMACLI_CACHE": str(tmp_path)}
    for compiled in ("nothing", ""):
        done = subprocess.run([sys.executable, "-c", GONE], env=env, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == compiled, done.stderr


def test_helpers_defined_behind_a_kernel_count() -> None:
    def named(factor: int) -> str:
        namespace: dict[str, Any] = {"__name__": "llamacli_other", "Kernel": jit.Kernel}
        exec("def double(args, run, thread, n_threads):\n    helper(args)\nmade = Kernel(double)", namespace)
        exec(f"def helper(x):\n    return x * {factor}", namespace)
        return str(namespace["made"].name)

    assert named(2) == named(2) != named(3)
