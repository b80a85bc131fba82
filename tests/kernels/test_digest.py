"""Digests in the names of plugins' kernels."""

import ast
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
from numba import njit, types

import example_formats
from example_formats import Added
from llamacli.engine.catalog import catalog
from llamacli.kernels import digest, experts, jit
from llamacli.kernels.deferred import _is_filled, import_numba, resolved
from llamacli.kernels.digest import function_digest, packing_digest
from llamacli.kernels.layout import ACTIVATION, START
from llamacli.kernels.linear import LINEAR, linear
from llamacli.kernels.packing import pack
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import FORMATS

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
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        expected = f"{packing_digest(PACKING)} {packing_digest(example_formats.packing_t())}\n"
        assert done.stdout == expected, done.stderr


straight = njit(inline="always")(example_formats.decode_q3)


def flipped(block, codes, fields) -> None:
    straight(block, codes, fields)
    for i in range(32):
        codes[i] ^= 7


@pytest.mark.medium
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


ASSERTS = """
def double(args, run, thread, n_threads):
    assert args
"""


@pytest.mark.medium
def test_bytecode_does_not_count(tmp_path: Path) -> None:
    """Without assertions it is another, as with another version of Python."""
    (tmp_path / "llamacli_asserts.py").write_text(ASSERTS)
    code = "from llamacli.kernels.digest import function_digest as d; import llamacli_asserts as a; print(d(a.double))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    runs = [
        subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        for flags in ((), ("-O",))
    ]
    assert runs[0] == runs[1] != "\n"


def test_bytecode_counts_where_a_file_has_changed(decoder) -> None:
    """The file has other code than is loaded."""
    decode = decoder()
    before = of(decode)
    path = Path(decode.__code__.co_filename)
    path.write_text(path.read_text().replace("step * j", "step * (7 - j)"))
    digest._file.cache_clear()
    assert of(decode) != before
    digest._file.cache_clear()


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


# --- sources of the core's kernels -----------------------------------------------------------------------------------


def test_sources_import_nothing_that_is_not_hashed() -> None:
    """But for what goes in no machine code."""
    spared = re.compile(r"llamacli\.(errors|gguf|inputs|kv(\.layout)?|util(\.\w+)?)")
    for module, source in digest.sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("llamacli"):
                names = {f"{node.module}.{name.name}" for name in node.names}
                assert digest.imported(source) >= ({str(node.module)} | names) & digest.sources().keys()
                covered = node.module in digest.sources() or names <= digest.sources().keys()
                assert covered or spared.fullmatch(str(node.module)), f"{module} imports {node.module}"
            assert not isinstance(node, ast.Import) or not node.names[0].name.startswith("llamacli")


@pytest.mark.parametrize(
    "text",
    [
        "from llamacli.kernels.ir import load",
        "from llamacli.kernels import (\n    deferred,\n    ir as i,\n)",
        "    from llamacli.kernels import ir",
        "import llamacli.kernels.ir as other",
        'module = importlib.import_module("llamacli.kernels.ir")',
    ],
)
def test_imports_of_every_form_are_found(text) -> None:
    assert "llamacli.kernels.ir" in digest.imported(text)


def test_package_of_a_module_counts() -> None:
    assert digest.imported("from llamacli.quantization.blocks import x") == {
        "llamacli.quantization", "llamacli.quantization.blocks",
    }  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> list[jit.Compiled]:
    found = [kernel for kernel in catalog() if kernel._function.__module__.startswith("llamacli.")]
    return [kernel for kernel in found if kernel._module.startswith("llamacli.")]  # other tests define verbs


def keys(kernels: list[jit.Compiled]) -> dict[str, str]:
    for cached in (digest.sources, digest.source_digest, digest._imports, digest._hash):
        cached.cache_clear()
    return {kernel.name: kernel.file_name for kernel in kernels}


@pytest.fixture
def edited(tmp_path, monkeypatch, kernels):
    """Names of the kernels whose files' names an edited source changes."""
    before = keys(kernels)
    package = tmp_path / "llamacli"
    for name in ("kernels", "ops", "quantization", "tokenizer"):
        shutil.copytree(digest._PACKAGE / name, package / name)
    monkeypatch.setattr(digest, "_PACKAGE", package)
    assert keys(kernels) == before

    def edited(path: str) -> set[str]:
        whole = (package / path).read_text()
        (package / path).write_text(whole + "\n# edited\n")
        after = keys(kernels)
        (package / path).write_text(whole)
        return {name for name in before if after[name] != before[name]}

    yield edited
    monkeypatch.undo()
    keys([])


def test_edited_source_changes_the_kernels_that_are_made_from_it(edited, kernels) -> None:
    names = {kernel.name for kernel in kernels}
    assert len(names) > 100
    assert edited("ops/softcap.py") == set(), "formulas have digests of their instructions"
    assert edited("ops/rope.py") == {"rotate"}
    assert edited("ops/rms_norm.py") == {"rms_norm"}
    assert {name.partition("_")[0] for name in edited("kernels/experts.py")} == {
        name.partition("_")[0] for name in names if name in vars(experts)
    }
    attention = edited("kernels/attention.py")
    assert attention == {name for name in names if name.startswith(("attention_", "store_kv_", "cached_"))} - {
        "attention_temperature"
    }
    assert edited("tokenizer/kernels.py") == {name for name in names if name.startswith("tokenizer_")}
    products = edited("kernels/ggml_packings.py")
    assert products >= {name for name in names if name.startswith(("linear_Q", "linear_F", "pack_integers_"))}
    assert edited("kernels/registry.py") == products
    assert not products & attention
    for path in ("jit", "compiler", "numba_target", "deferred", "simd", "arrays", "ir"):
        assert edited(f"kernels/{path}.py") == names


def functions_in(value: Any, names: frozenset[str], seen: set[int]) -> Iterator[FunctionType]:
    """Functions that code reaches from a value; of a module, members `names`."""
    value = resolved(value)
    if id(value) in seen and not isinstance(value, ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        yield value
        codes = list(digest._codes(value.__code__))
        used = frozenset(name for code in codes for name in code.co_names)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        for part in (*cells, *(value.__globals__[name] for name in used & value.__globals__.keys())):
            yield from functions_in(part, used, seen)
    elif isinstance(value, ModuleType):
        if value.__name__.startswith("llamacli"):
            for name in names & vars(value).keys():
                yield from functions_in(getattr(value, name), names, seen)
    elif isinstance(value, type):
        if value.__module__.startswith("llamacli"):
            for member in vars(value).values():
                yield from functions_in(member, names, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from functions_in(item, names, seen)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from functions_in(item, names, seen)
    elif isinstance(value, partial):
        yield from functions_in((value.func, *value.args), names, seen)
    elif hasattr(value, "_defn"):  # an intrinsic
        yield from functions_in(value._defn, names, seen)
    elif hasattr(value, "__wrapped__"):  # a Numba dispatcher
        yield from functions_in(value.__wrapped__, names, seen)
    elif type(value).__module__.startswith("llamacli"):
        fields = [getattr(value, field.name) for field in getattr(type(value), "__attrs_attrs__", ())]
        for part in (type(value), *fields, *getattr(value, "__dict__", {}).values()):
            yield from functions_in(part, names, seen)


OF_FILES = {"llamacli.errors", "llamacli.util.files", "llamacli.util.folders", "llamacli.util.memory"}
"""Modules by which the features of the CPU are read from a file."""


def test_key_covers_all_functions_that_a_kernel_reaches(kernels) -> None:
    import_numba()
    keys([])
    for kernel in kernels:
        module = kernel._module
        covered, left = set(), [module, "llamacli.kernels.jit"]
        while left:
            name = left.pop()
            if name not in covered:
                covered.add(name)
                left += digest._imports(name)
        functions = functions_in(kernel._function, frozenset(), set())
        names = {str(function.__globals__["__name__"]) for function in functions}
        hashed = {name for name in names if name.startswith("llamacli.") and name not in OF_FILES}
        assert str(kernel._function.__module__) in hashed
        if module == "llamacli.kernels.lanewise":  # has a digest of the formula's instructions
            hashed = {name for name in hashed if not name.startswith("llamacli.ops.")}
        assert hashed <= covered, kernel.name
