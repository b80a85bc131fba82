"""Tensor types of plugins: loading, kernels made from their packing, errors."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import attrs
import numpy as np
import pytest

import example_formats
import gguf
import gguf_builder
import tiny_llama
from example_formats import Added
from llamacli import ModelFormatError, PluginError, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.gguf import open_gguf
from llamacli.kernels.isa import available
from llamacli.plugins import ARCHITECTURES, GENERAL, Plugins
from llamacli.quantization import FORMATS, QuantFormat
from llamacli.testing import formulas, models

TOKENS = [1, 5, 9, 100, 77, 3]
MODELS = {"dense": {}, "experts": {"n_expert": 4, "n_expert_used": 2}}
WIDE = {"n_embd": 128, "n_ff": 384}
BY_TYPE = {fmt.type: fmt for fmt in example_formats.FORMATS}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plugins() -> Iterator[Plugins]:
    """Plugins of the example formats and of the tiny models' family."""
    before = dict(FORMATS)
    yield Plugins(
        [EntryPoint("llama", "llamacli_llama", ARCHITECTURES), EntryPoint("example", "example_formats", GENERAL)]
    )
    FORMATS.clear()
    FORMATS.update(before)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a tiny model with matrices of an added type."""
    random_tensor = models.random_tensor

    def write(kind: Added, *, dequantized: bool = False, **options: object) -> Path:
        fmt = BY_TYPE[kind]

        def added(seed: str, name: str, shape: tuple[int, ...], matrix_type: str):
            array, stored = random_tensor(seed, name, shape, "F32")
            if array.ndim < 2 or "ffn_gate_inp" in name:
                return array, stored
            raw = fmt.quantize(array)
            if not dequantized:
                return raw, kind
            return fmt.dequantize(raw.reshape(-1, raw.shape[-1])).reshape(shape), stored

        monkeypatch.setattr(models, "random_tensor", added)
        monkeypatch.setitem(gguf.GGML_QUANT_SIZES, kind, (fmt.block_size, fmt.type_size))
        return tiny_llama.write_llama(tmp_path / f"{kind.name}-{dequantized}.gguf", **options)

    return write


def logits(path: Path, mode: str, plugins: Plugins, engine: Engine) -> np.ndarray:
    with load_model(path, mode, plugins=plugins, engine=engine) as model, model.create_session() as session:
        return session.eval(TOKENS, all_logits=True)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("kind", [Added.Q3_S, Added.I8_S])
def test_fp32_equals_dequantized_weights(kind, options, write, plugins, engine) -> None:
    expected = logits(write(kind, dequantized=True, **options), "fp32", plugins, engine)
    np.testing.assert_array_equal(logits(write(kind, **options), "fp32", plugins, engine), expected)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("kind", [Added.Q3_S, Added.Q4_A])
def test_auto_runs_the_kernels_of_the_type(kind, options, write, plugins, caplog) -> None:
    path = write(kind, **options | (WIDE if kind is Added.Q4_A else {}))
    exact = logits(path, "fp32", plugins, ReferenceEngine())
    assert formulas.nmse(logits(path, "auto", plugins, default_engine()), exact) < 5e-3
    assert "no kernel of its own" not in caplog.text


def test_type_without_packing_is_computed_as_q8_0(write, plugins, caplog) -> None:
    path = write(Added.I8_S)
    with caplog.at_level(logging.WARNING):
        found = logits(path, "auto", plugins, default_engine())
    assert formulas.nmse(found, logits(path, "fp32", plugins, ReferenceEngine())) < 5e-3
    assert "I8_S has no kernel of its own: such tensors are kept as Q8_0" in caplog.text


def test_results_differ_from_those_of_q8_0(write, plugins) -> None:
    """Requantizing 3-bit weights to Q8_0 rounds them."""
    path = write(Added.Q3_S)
    own = logits(path, "auto", plugins, default_engine())
    assert (own != logits(path, "q8", plugins, default_engine())).any()


@pytest.mark.slow
@pytest.mark.parametrize("isa", available())
def test_products_under_each_instruction_set(isa: str) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_linear.py"]
    done = subprocess.run(
        [sys.executable, *command, "-k", "(test_product or test_unpacked) and (Q3_S or T_S or Q4_A) and not random"],
        env=os.environ | {"LLAMACLI_ISA": isa}, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found
    assert int(found[1]) >= 42  # three types in all shapes


@pytest.mark.medium
def test_registering_kernels_does_not_import_numba(write) -> None:
    code = f"""
import sys
from importlib.metadata import EntryPoint
from llamacli.loaders import open_model_file
from llamacli.plugins import Plugins
plugins = Plugins([EntryPoint("example", "example_formats", "llamacli")])
file = open_model_file({str(write(Added.Q3_S))!r}, plugins.loaders())
print(file.tensors["output.weight"].type.name, "numba" in sys.modules)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "Q3_S False\n", done.stderr


def test_format_of_the_plugin_guide_equals_the_example(write, plugins) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    (source,) = (block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "Q3_S" in block)
    path = write(Added.Q3_S)
    expected = logits(path, "auto", plugins, default_engine())
    exec(source, guide := {"__name__": "guide"})
    del FORMATS[Added.Q3_S]
    guide["register_quant_formats"](lambda fmt: FORMATS.update({fmt.type: fmt}))
    assert FORMATS[Added.Q3_S].type is guide["Added"].Q3_S
    np.testing.assert_array_equal(logits(path, "auto", plugins, default_engine()), expected)


def test_rows_of_partial_blocks_are_refused(tmp_path, plugins) -> None:
    plugins.load_group(GENERAL)
    path = tmp_path / "narrow.gguf"
    tensor = gguf_builder.Tensor("output.weight", (48, 4), Added.Q3_S, data=bytes(84))
    path.write_bytes(gguf_builder.gguf_bytes(tensors=[tensor]))
    with pytest.raises(ModelFormatError, match=r"'output.weight'.*rows of 48 numbers .* Q3_S's block of 32"):
        open_gguf(path)


def test_scales_that_are_not_finite_are_refused(write, plugins, monkeypatch) -> None:
    fmt = BY_TYPE[Added.Q3_S]

    def quantize(x: np.ndarray) -> np.ndarray:
        raw = fmt.quantize(x)
        raw.reshape(-1, 14)[-1, :2] = 0x00, 0x7C
        return raw

    monkeypatch.setitem(BY_TYPE, Added.Q3_S, attrs.evolve(fmt, quantize=quantize))
    with pytest.raises(ModelFormatError, match=r"tensor 'token_embd.weight' has weights that are NaN, infinite"):
        logits(write(Added.Q3_S), "auto", plugins, default_engine())


def fail() -> None:
    raise OSError("no such table")


def untyped(block, codes, fields) -> None:
    fields[0] = block["scale"]


def with_packing(**changes: object) -> QuantFormat:
    return attrs.evolve(BY_TYPE[Added.Q3_S], packing=lambda: attrs.evolve(example_formats.packing_q3(), **changes))


BROKEN = {
    "raises": (attrs.evolve(BY_TYPE[Added.Q3_S], packing=fail), "packing of tensor type Q3_S failed: OSError: no such"),
    "none": (attrs.evolve(BY_TYPE[Added.Q3_S], packing=dict), r"tensor type Q3_S is \{\}, expected an IntegerPacking"),
    "block": (
        with_packing(groups=8),
        "packing of tensor type Q3_S has blocks of 256 numbers in 14 bytes; those of the type have 32 in 14",
    ),
    "bytes": (with_packing(file_bytes=16), "blocks of 32 numbers in 16 bytes; those of the type have 32 in 14"),
    "groups": (with_packing(groups=9), "Q3_S failed: ValueError: a block has 1 to 8 groups of 32 numbers, not 9"),
    "planes": (with_packing(planes=(3,)), r"Q3_S failed: ValueError: planes of 1, 2, 4 or 8 bits .* not \(3,\)"),
    "no planes": (with_packing(planes=()), r"Q3_S failed: ValueError: planes of 1, 2, 4 or 8 bits .* not \(\)"),
    "fields": (with_packing(fields={}), "Q3_S failed: ValueError: a block has at least one field"),
    "bias": (with_packing(bias_bits=8), r"Q3_S failed: ValueError: a bias is 2\^0 to 2\^7, not 2\^8"),
    "table": (with_packing(table=(0, 1, 256)), "Q3_S failed: ValueError: a table has 16 unsigned bytes"),
    "formula": (with_packing(factors=lambda f: (f["d"][0], None)), "packing of tensor type Q3_S failed: KeyError: 'd'"),
    "decoder": (with_packing(decode=untyped), "compiling the packing of tensor type Q3_S failed: TypingError"),
    "meaning": (
        with_packing(bias_bits=1),
        r"packing of tensor type Q3_S and its dequantize differ on tensor 'token_embd.weight' of .*\.gguf",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fmt", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_packing_is_refused(fmt, message, write, plugins, monkeypatch) -> None:
    monkeypatch.setattr(example_formats, "FORMATS", (fmt,))
    path = write(Added.Q3_S)
    with pytest.raises(PluginError, match=message):
        logits(path, "auto", plugins, default_engine())
    logits(path, "fp32", plugins, ReferenceEngine())


def test_packing_field_of_eight_bytes_is_refused() -> None:
    from llamacli.kernels.packing_formats import FieldKind

    with pytest.raises(ValueError, match="a field is stored in 1, 2 or 4 bytes, not in the 8 of float64"):
        FieldKind(np.float64, lambda b, address: address)


def test_broken_packing_leaves_other_kernels_alone(plugins, monkeypatch, caplog) -> None:
    from llamacli.engine.catalog import catalog

    monkeypatch.setattr(example_formats, "FORMATS", (BROKEN["raises"][0], BY_TYPE[Added.T_S]))
    plugins.load_group(GENERAL)
    names = {kernel.name.rsplit("_", 1)[0] for kernel in catalog()}
    assert {"linear_T_S", "pack_integers_T_S"} <= names
    assert "linear_Q3_S" not in names
    assert "packing of tensor type Q3_S failed" in caplog.text
