"""Conversion of GGUF files to other tensor types."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gguf_builder as b
from example_formats import Added, dequantize_q3, quantize_q3
from gguf_builder import Kind, Tensor
from llamacli import load_model
from llamacli.conversion import FILE_TYPES, Importance, ImportanceMatrix, Plan, file_type, plan, write
from llamacli.errors import InvalidRequestError, ModelFormatError, PluginError
from llamacli.gguf import GGUFFile, open_gguf
from llamacli.kernels.encoding import encode
from llamacli.kernels.team import Team
from llamacli.quantization import BLOCK_FORMATS, FORMATS, QuantFormat, TensorType
from llamacli.testing import formulas
from suite import slow_but

OWN_KEYS = {"general.file_type", "general.quantization_version"}
WIDE = {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 512}

BITS = {
    "F32": 24, "F16": 11, "BF16": 8, "Q8_0": 7, "Q6_K": 5.5, "Q5_K": 4.5, "Q5_1": 4.5, "Q5_0": 4.3, "Q4_K": 3.5,
    "Q4_1": 3.5, "Q4_0": 3.3, "Q3_K": 2.3, "Q2_K": 1.3, "IQ4_NL": 3.5, "IQ4_XS": 3.5, "NVFP4": 3, "MXFP4": 2.9,
    "IQ3_S": 2.7, "IQ3_XXS": 2.3, "IQ2_S": 1.9, "IQ2_XS": 1.6, "IQ2_XXS": 1.4, "IQ1_M": 1.1, "IQ1_S": 1, "TQ2_0": 1,
    "TQ1_0": 1,
}  # fmt: skip
"""Effective bits of random weights after quantization: NMSE is at most 4^-bits."""

WITH_IMATRIX = ("Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
"""File types that need an importance matrix."""

QUICK = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M", "IQ4_NL", "MXFP4_MOE")
"""File type of each kind of quantizer; the others take long to search, or are as these."""


@pytest.fixture
def model(tiny_gguf) -> Path:
    return tiny_gguf("gqa", **WIDE)


def converted(source: Path, target: Path, name: str, **options) -> GGUFFile:
    with open_gguf(source) as file:
        write(plan(file, file_type(name), **options), target, threads=1)
    return open_gguf(target)


def importance(source: Path, *names: str, spread: float = 0.0) -> ImportanceMatrix:
    """Importance matrix of all matrices of layers, or of those named."""
    random = np.random.default_rng(0)
    with open_gguf(source) as file:
        entries = {}
        for name, info in file.tensors.items():
            if len(info.shape) > 1 and (name in names if names else name.startswith("blk.")):
                n = int(np.prod(info.shape[:-2]))
                sums = np.exp(spread * random.normal(size=(n, info.shape[-1]))).astype(np.float32)
                entries[name] = Importance(3 * sums, np.full(n, 3, np.float32))
    return ImportanceMatrix(source.with_name("some.imatrix"), entries, ["text.txt"], 5, 512)


def raw_metadata(file: GGUFFile) -> dict[str, bytes]:
    return {key: file.pair(key) for key in file.metadata if key not in OWN_KEYS and not key.startswith("split.")}


@pytest.mark.parametrize("name", slow_but(QUICK, FILE_TYPES))
def test_every_type(name: str, model: Path, tmp_path: Path) -> None:
    imatrix = importance(model) if name in WITH_IMATRIX else None
    with open_gguf(model) as before, converted(model, tmp_path / "out.gguf", name, imatrix=imatrix) as after:
        assert list(after.tensors) == list(before.tensors)
        kept = {key: pair for key, pair in raw_metadata(after).items() if not key.startswith("quantize.imatrix.")}
        assert kept == raw_metadata(before)
        assert after.metadata["general.file_type"] == FILE_TYPES[name].number
        assert after.metadata["general.quantization_version"] == 2
        changed = set()
        for tensor, info in after.tensors.items():
            if info.type == before.tensors[tensor].type:
                np.testing.assert_array_equal(after.data(tensor), before.data(tensor))
            else:
                changed.add(info.type)
                error = formulas.nmse(after.tensor(tensor), before.tensor(tensor))
                assert error < 4.0 ** -BITS[info.type.name], tensor
        assert FILE_TYPES[name].type in changed or name in ("F32", "MXFP4_MOE")


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q6_K", "Q4_K_M"])
def test_converted_model_has_similar_logits(name: str, model: Path, tmp_path: Path, plugins, engine) -> None:
    converted(model, tmp_path / "out.gguf", name).close()
    logits = []
    for path in (model, tmp_path / "out.gguf"):
        with load_model(path, "fp32", plugins=plugins, engine=engine) as loaded, loaded.create_session() as session:
            session.eval([1, 5, 9, 7])
            logits.append(session.logits.copy())
    assert 0 < formulas.nmse(*logits) < {"F16": 1e-5, "Q8_0": 0.005, "Q6_K": 0.05, "Q4_K_M": 0.4}[name]


def test_independent_of_chunks_and_threads(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(model, tmp_path / "one.gguf", "Q4_K_M").close()
    monkeypatch.setattr("llamacli.conversion.convert._CHUNK_ELEMENTS", 600)
    seen: list[tuple[int, int]] = []
    with open_gguf(model) as file:
        planned = plan(file, file_type("Q4_K_M"))
        write(
            planned, tmp_path / "two.gguf", threads=len(os.sched_getaffinity(0)), progress=lambda *now: seen.append(now)
        )
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert len(seen) > len(planned.tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (planned.n_bytes, planned.n_bytes)


def test_experts_and_their_router(tiny_gguf, tmp_path: Path) -> None:
    path = tiny_gguf("moe_4_1", **WIDE)
    with open_gguf(path) as before, converted(path, tmp_path / "out.gguf", "Q4_K_S") as after:
        assert after.tensors["blk.0.ffn_gate_inp.weight"].type == TensorType.F32
        experts = "blk.1.ffn_up_exps.weight"
        assert after.tensors[experts].type == TensorType.Q4_K
        assert after.tensors[experts].shape == before.tensors[experts].shape
        for expert in range(4):
            assert formulas.nmse(after.tensor(experts)[expert], before.tensor(experts)[expert]) < 4.0 ** -BITS["Q4_K"]


def test_row_widths_without_blocks_fall_back(tiny_gguf, tmp_path: Path) -> None:
    path = tiny_gguf("gqa", n_embd=64, n_ff=72)
    with open_gguf(path) as file:
        planned = plan(file, file_type("Q4_K_M"))
    fell_back = {tensor.source.name: tensor.target.type.name for tensor in planned.tensors if tensor.fell_back}
    assert fell_back["blk.0.ffn_up.weight"] == "Q5_0"
    assert fell_back["blk.0.ffn_down.weight"] == "F16"
    assert "output_norm.weight" not in fell_back
    with converted(path, tmp_path / "out.gguf", "Q4_K_M") as after:
        assert after.tensors["blk.0.ffn_down.weight"].type == TensorType.F16


def test_tensors_of_the_same_type_are_copied(tiny_gguf, tmp_path: Path) -> None:
    path = tiny_gguf("q8_0")
    with open_gguf(path) as before, converted(path, tmp_path / "out.gguf", "Q8_0") as after:
        assert plan(before, file_type("Q8_0")).requantized == []
        for name in before.tensors:
            np.testing.assert_array_equal(after.data(name), before.data(name))


def test_requantized_tensors_are_listed(tiny_gguf) -> None:
    with open_gguf(tiny_gguf("q8_0")) as file:
        again = [tensor.source.name for tensor in plan(file, file_type("Q4_0")).requantized]
        assert "blk.0.attn_q.weight" in again
        assert "output_norm.weight" not in again
        assert plan(file, file_type("F16")).requantized
    with open_gguf(tiny_gguf("bf16")) as file:
        assert plan(file, file_type("Q4_0")).requantized == []


def test_split_model_becomes_one_file(model: Path, tmp_path: Path) -> None:
    with open_gguf(model) as file:
        names, pairs = list(file.tensors), [file.pair(key) for key in file.metadata]
        for i, part in enumerate((names[:4], names[4:])):
            split = [
                b.pair("split.no", Kind.U16, i),
                b.pair("split.count", Kind.U16, 2),
                b.pair("split.tensors.count", Kind.I32, len(names)),
            ]
            tensors = [
                Tensor(name, file.tensors[name].shape[::-1], file.tensors[name].type, data=file.data(name).tobytes())
                for name in part
            ]
            content = b.gguf_bytes([*(pairs if i == 0 else []), *split], tensors)
            (tmp_path / f"split-{i + 1:05}-of-00002.gguf").write_bytes(content)
    converted(model, tmp_path / "whole.gguf", "Q5_K_M").close()
    with converted(tmp_path / "split-00002-of-00002.gguf", tmp_path / "out.gguf", "Q5_K_M") as after:
        assert not [key for key in after.metadata if key.startswith("split.")]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    with open_gguf(tmp_path / "split-00001-of-00002.gguf") as file:
        for shard in file.paths:
            with pytest.raises(InvalidRequestError, match="a file of the source model"):
                write(plan(file, file_type("F16")), shard, overwrite=True)


@pytest.mark.parametrize("link", [shutil.copy2, os.link, os.symlink])
def test_source_model_is_never_overwritten(link, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model.read_bytes())
    other = tmp_path / "other.gguf"
    link(path, other)
    before = path.read_bytes()
    with open_gguf(path) as file:
        planned = plan(file, file_type("Q8_0"))
        if link is shutil.copy2:
            write(planned, other, overwrite=True)
            assert other.read_bytes() != before
        else:
            with pytest.raises(InvalidRequestError, match="a file of the source model"):
                write(planned, other, overwrite=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("value", "name", "error"),
    [
        (np.nan, "Q4_K_M", r"'blk.0.ffn_up.weight' has NaN or infinity"),
        (np.inf, "F16", r"'blk.0.ffn_up.weight' has NaN or infinity"),
        (-np.inf, "F32", None),
        (7e4, "F16", r"'blk.0.ffn_up.weight' has 70000, out of range of F16: use BF16 or F32"),
        (-7e4, "Q5_0", r"has 70000, out of range of Q5_0"),
        (7e4, "BF16", None),
        (3.4e38, "BF16", r"has 3.4e\+38, out of range of BF16"),
        (65504, "F16", None),
    ],
)
def test_values_out_of_range(value: float, name: str, error: str | None, tiny_gguf, tmp_path: Path) -> None:
    weight = np.zeros((512, 256), np.float32)
    weight[300, 200] = value
    path = tiny_gguf("gqa", **WIDE, seed=str(value), tensors={"blk.0.ffn_up.weight": weight})
    if error is None:
        with converted(path, tmp_path / "out.gguf", name) as file:
            assert file.tensor("blk.0.ffn_up.weight")[300, 200] == pytest.approx(value, rel=0.01)
        return
    with pytest.raises((ModelFormatError, InvalidRequestError), match=error):
        converted(path, tmp_path / "out.gguf", name)
    assert not os.listdir(tmp_path)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b.gguf_bytes([], [Tensor("a.weight", [32, 2], TensorType.I32)]))
    with open_gguf(path) as file, pytest.raises(ModelFormatError, match=r"'a.weight' of type I32 cannot"):
        plan(file, file_type("Q8_0"))


def test_full_disk_is_detected_before_writing(model: Path, tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000))
    with pytest.raises(InvalidRequestError, match="the disk has only 1000 free"):
        converted(model, tmp_path / "out.gguf", "Q8_0")


def test_interrupt_leaves_no_file(model: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with open_gguf(model) as file, pytest.raises(KeyboardInterrupt):
        write(plan(file, file_type("Q8_0")), tmp_path / "out.gguf", progress=interrupt)
    assert not os.listdir(tmp_path)


def test_sums_of_a_plan(model: Path, tmp_path: Path) -> None:
    with open_gguf(model) as file:
        planned: Plan = plan(file, file_type("Q4_0"), pure=True)
        write(planned, tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert planned.n_bytes == sum(info.n_bytes for info in file.tensors.values())
        assert {info.type for info in file.tensors.values()} == {TensorType.Q4_0, TensorType.F32}


class TestAddedTypes:
    """Tensor types of plugins, with quantizers of their own."""

    @pytest.fixture
    def add(self, monkeypatch: pytest.MonkeyPatch):
        def add(quantize: Callable[[np.ndarray], np.ndarray] = quantize_q3) -> None:
            monkeypatch.setitem(FORMATS, Added.Q3_S, QuantFormat(Added.Q3_S, 32, 14, dequantize_q3, quantize))

        return add

    def test_file_is_written_and_read(self, add, model: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match=r"unknown type .q3_s.; known are F32, .*NVFP4, Q3_K"):
            file_type("q3_s")
        add()
        with open_gguf(model) as before, converted(model, tmp_path / "out.gguf", "q3_s") as after:
            assert after.metadata["general.file_type"] == Added.Q3_S
            changed = [name for name, info in after.tensors.items() if info.type == Added.Q3_S]
            assert "blk.0.attn_q.weight" in changed
            assert "blk.0.attn_norm.weight" not in changed
            for name in changed:
                assert formulas.nmse(after.tensor(name), before.tensor(name)) < 0.05

    def test_rows_that_fit_no_block_fall_back(self, add, tiny_gguf, tmp_path: Path) -> None:
        add()
        with converted(tiny_gguf("gqa", n_ff=80), tmp_path / "out.gguf", "Q3_S") as after:
            assert after.tensors["blk.0.ffn_down.weight"].type.name == "F16"

    @pytest.mark.parametrize(
        ("quantize", "message"),
        [
            (lambda x: quantize_q3(x)[:, :-1], r"quantize returned uint8 \(.*\), expected uint8"),
            (lambda x: quantize_q3(x).astype(np.int16), "quantize returned int16"),
            (lambda x: x.missing, "tensor type Q3_S failed: AttributeError: .*, at .*test_convert.py"),
        ],
    )
    def test_faulty_quantizers(self, quantize, message: str, add, model: Path, tmp_path: Path) -> None:
        add(quantize)
        with pytest.raises(PluginError, match=message):
            converted(model, tmp_path / "out.gguf", "Q3_S")

    def test_numbers_out_of_range(self, add, model: Path, tmp_path: Path) -> None:
        add(lambda x: np.full((len(x), x.shape[1] // 32 * 14), 0x7C, np.uint8))
        with pytest.raises(InvalidRequestError, match="is out of range of Q3_S"):
            converted(model, tmp_path / "out.gguf", "Q3_S")


KILLS = """
import sys
from pathlib import Path
from kills import kill_writers
from llamacli.conversion import file_type, plan, write as convert
from llamacli.gguf import open_gguf

source, target = map(Path, sys.argv[1:3])
contents = []

def write():
    with open_gguf(source) as file:
        convert(plan(file, file_type("Q8_0")), target, threads=1, overwrite=True)

def check():
    assert target.read_bytes() == contents[0]

write()
contents.append(target.read_bytes())
kill_writers(write, check, int(sys.argv[3]), seed=7, seconds=0.03)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_thousand_killed_writers_leave_whole_files(model: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLS, model, tmp_path / "out.gguf", "1000"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True, timeout=600,
    )  # fmt: skip
    assert len(os.listdir(tmp_path)) <= 2, "the next writer removes a leftover"


# --- importance matrices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_IMATRIX)
def test_types_of_few_bits_need_an_importance_matrix(name: str, model: Path, tmp_path: Path) -> None:
    missing = "blk.0.attn_q.weight" if name != "IQ2_M" else "blk.0.attn_k.weight"
    with open_gguf(model) as file:
        planned = plan(file, file_type(name))
        with pytest.raises(InvalidRequestError, match="which needs an importance matrix, and none is given"):
            write(planned, tmp_path / "out.gguf")
        given = [tensor for tensor in importance(model).entries if tensor != missing]
        planned = plan(file, file_type(name), imatrix=importance(model, *given))
        with pytest.raises(InvalidRequestError, match=rf"'{missing}' would be .*some.imatrix has no entry of it"):
            write(planned, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_entry_of_another_size_is_refused(model: Path, tiny_gguf) -> None:
    other = importance(tiny_gguf("gqa", n_embd=64, n_ff=72))
    with open_gguf(model) as file, pytest.raises(InvalidRequestError, match="is it of another model"):
        plan(file, file_type("Q4_K_M"), imatrix=other)


def test_tensors_without_entry_are_listed(model: Path) -> None:
    some = importance(model, "blk.0.attn_q.weight", "blk.1.attn_q.weight")
    with open_gguf(model) as file:
        names = {tensor.target.name for tensor in plan(file, file_type("Q4_K_M"), imatrix=some).unweighted}
        assert not plan(file, file_type("Q4_K_M"), imatrix=importance(model)).unweighted
        assert not plan(file, file_type("Q4_K_M")).unweighted
    assert names == {name for name in importance(model).entries if name not in some.entries}


@pytest.mark.parametrize("name", slow_but(["Q4_K_M"], ["Q4_K_M", "Q8_0", "Q5_1", "IQ4_XS", "IQ2_XXS"]))
def test_weights_lower_the_weighted_error_of_each_matrix(name: str, model: Path, tmp_path: Path) -> None:
    matrix = importance(model, spread=1.5)
    equal = importance(model) if name in WITH_IMATRIX else None
    better = []
    with (
        open_gguf(model) as before,
        converted(model, tmp_path / "plain.gguf", name, pure=True, imatrix=equal) as plain,
        converted(model, tmp_path / "weighted.gguf", name, pure=True, imatrix=matrix) as weighted,
    ):
        for tensor in matrix.entries:
            weights = matrix.weights(before.tensors[tensor])
            errors = [
                np.mean(np.square(file.tensor(tensor) - before.tensor(tensor)).mean(axis=0) * weights)
                for file in (plain, weighted)
            ]
            better.append(errors[1] < errors[0])
        assert all(better)
        assert weighted.metadata["quantize.imatrix.file"] == "some.imatrix"
        assert weighted.metadata["quantize.imatrix.dataset"] == "text.txt"
        assert weighted.metadata["quantize.imatrix.entries_count"] == len(matrix.entries)
        assert weighted.metadata["quantize.imatrix.chunks_count"] == 5


def test_experts_have_their_own_weights(tiny_gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's rows are those of its matrix quantized by itself."""
    path, name = tiny_gguf("moe_4_1", **WIDE | {"n_ff": 64}), "blk.0.ffn_up_exps.weight"
    matrix = importance(path, spread=1.5)
    whole = converted(path, tmp_path / "whole.gguf", "Q4_K_S", imatrix=matrix)
    monkeypatch.setattr("llamacli.conversion.convert._CHUNK_ELEMENTS", 700)
    parts = converted(path, tmp_path / "parts.gguf", "Q4_K_S", imatrix=matrix)
    np.testing.assert_array_equal(parts.data(name), whole.data(name))
    with open_gguf(path) as file:
        rows, weights = file.tensor(name), matrix.weights(file.tensors[name])
    assert weights is not None
    team, fmt = Team(1), BLOCK_FORMATS[TensorType.Q4_K]
    for expert in range(4):
        alone = fmt.pack(encode(team, fmt, rows[expert], weights[expert]))
        found = whole.data(name).reshape(4, -1)[expert]
        np.testing.assert_array_equal(found, alone.reshape(-1))
    team.close()


def test_mxfp4_of_experts(tiny_gguf, tmp_path: Path) -> None:
    after = converted(tiny_gguf("moe_4_1", **WIDE), tmp_path / "out.gguf", "MXFP4_MOE")
    types = {name: info.type for name, info in after.tensors.items()}
    assert types["blk.0.ffn_up_exps.weight"] == TensorType.MXFP4
    assert types["blk.0.attn_q.weight"] == types["output.weight"] == TensorType.Q8_0


def test_nvfp4_is_out_of_range_above_its_largest_number(tiny_gguf, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    data = np.full((2, 64), 3000, np.float32).tobytes()
    path.write_bytes(b.gguf_bytes([], [Tensor("blk.0.attn_q.weight", [64, 2], TensorType.F32, data=data)]))
    with open_gguf(path) as file:
        planned = plan(file, file_type("NVFP4"))
        with pytest.raises(InvalidRequestError, match="has 3000, out of range of NVFP4"):
            write(planned, tmp_path / "out.gguf")
