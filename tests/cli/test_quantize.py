"""`llamacli quantize`."""

from pathlib import Path

import numpy as np
import pytest

from llamacli.cli import progress
from llamacli.conversion import Importance, ImportanceMatrix, write_imatrix
from llamacli.gguf import open_gguf

WIDE = {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 512}
KERNELS = {"NUMBA_DISABLE_JIT": "0"}


@pytest.fixture
def wide(tiny_gguf) -> Path:
    return tiny_gguf("gqa", **WIDE)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.gguf"


def test_output_file_and_types(program, model: Path, out: Path) -> None:
    done = program("quantize", model, out, "q8_0", env=KERNELS)
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["type", "tensors", "size"]
    assert [row[0] for row in rows[1:3]] == ["Q8_0", "F32"]
    assert done.stdout.splitlines()[-1].startswith(f"{out}: Q8_0, ")
    with open_gguf(out) as file:
        types = [info.type.name for info in file.tensors.values()]
    assert [int(row[1]) for row in rows[1:3]] == [types.count("Q8_0"), types.count("F32")]
    said = program("run", out, "once", "-n", "4", "--temp", "0")
    assert (said.returncode, said.stdout[:4]) == (0, "once")


def test_dry_run_writes_nothing(invoke, wide: Path, out: Path) -> None:
    result = invoke("quantize", wide, out, "Q4_K_M", "--dry-run")
    assert result.exit_code == 0
    assert {line.split()[0] for line in result.stdout.splitlines()[1:-1]} == {"Q4_K", "Q6_K", "F32"}
    assert result.stdout.splitlines()[-1].startswith(f"{out} would be: Q4_K_M, ")
    assert not out.exists()


def test_interrupt_says_that_nothing_is_written(invoke, wide: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llamacli.conversion.write", interrupt)
    monkeypatch.setattr("llamacli.engine.jit_disabled", lambda: False)
    result = invoke("quantize", wide, out, "Q4_0")
    assert result.exit_code == 130
    assert f"interrupted: {out} is not written" in result.stderr
    assert not out.exists()


def test_pure(invoke, wide: Path, out: Path) -> None:
    result = invoke("quantize", wide, out, "Q4_K_M", "--dry-run", "--pure")
    assert {line.split()[0] for line in result.stdout.splitlines()[1:-1]} == {"Q4_K", "F32"}


def test_tensor_types(invoke, wide: Path, out: Path) -> None:
    types = ("--tensor-type", "attn_v=q8_0", "--tensor-type", "attn_=Q5_K")
    result = invoke("quantize", wide, out, "Q4_K_M", "--dry-run", *types)
    assert {line.split()[0] for line in result.stdout.splitlines()[1:-1]} == {"Q8_0", "Q5_K", "Q4_K", "Q6_K", "F32"}
    for wrong in ("attn_v", "attn_v=Q9", "=Q8_0"):
        refused = invoke("quantize", wide, out, "Q4_K_M", "--tensor-type", wrong)
        assert (refused.exit_code, "expected NAME=TYPE" in refused.stderr) == (2, True)
    assert "in no name" in invoke("quantize", wide, out, "Q4_K_M", "--tensor-type", "attn_x=Q8_0").stderr
    assert not out.exists()


def test_fallbacks_are_one_warning_per_width(invoke, tiny_gguf, out: Path) -> None:
    result = invoke("quantize", tiny_gguf("gqa", n_embd=64, n_ff=72), out, "Q4_K_S", "--dry-run")
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if "not a multiple" in line] == [
        "llamacli: warning: token_embd.weight and 10 more: rows of 64 are not a multiple of Q4_K blocks, using Q5_0",
        "llamacli: warning: blk.0.attn_v.weight and 1 more: rows of 64 are not a multiple of Q5_K blocks, using Q5_1",
        "llamacli: warning: blk.0.ffn_down.weight and 1 more: rows of 72 are not a multiple of Q4_K blocks, using F16",
    ]


def test_existing_file_is_kept(invoke, wide: Path, out: Path) -> None:
    out.write_text("precious")
    result = invoke("quantize", wide, out, "F16")
    assert (result.exit_code, result.stderr) == (1, f"llamacli: error: {out} exists: --force overwrites it\n")
    assert out.read_text() == "precious"


def test_force_overwrites_existing_file(invoke, wide: Path, out: Path) -> None:
    out.write_text("old")
    assert invoke("quantize", wide, out, "F16", "--force").exit_code == 0
    with open_gguf(out) as file:
        assert file.tensors["output.weight"].type.name == "F16"


def test_source_model_is_not_overwritten(invoke, wide: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(wide.read_bytes())
    result = invoke("quantize", path, path, "F16", "--force")
    assert result.exit_code == 1
    assert result.stderr == f"llamacli: error: {path} is a file of the source model: choose another file\n"


def test_quantized_models_need_allow_requantize(invoke, tiny_gguf, out: Path) -> None:
    path = tiny_gguf("q8_0")
    result = invoke("quantize", path, out, "F16")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"llamacli: error: {path}: 16 tensors are already quantized, 'token_embd.weight' as Q8_0;"
    )
    assert "--allow-requantize" in result.stderr
    result = invoke("quantize", path, out, "F16", "--allow-requantize")
    assert result.exit_code == 0
    assert "loses more than quantizing the original" in result.stderr


def test_block_types_need_kernels(invoke, wide: Path, out: Path) -> None:
    result = invoke("quantize", wide, out, "Q8_0")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "NUMBA_DISABLE_JIT is set" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Q9_K"], "unknown type 'Q9_K'; known are F32, F16, BF16, Q8_0"),
        (["Q8_0", "-t", "0"], "'0' is not an integer from 1 to 1024"),
        ([], "Missing argument 'TYPE'"),
    ],
)
def test_wrong_usage(args: list[str], message: str, invoke, wide: Path, out: Path) -> None:
    result = invoke("quantize", wide, out, *args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["", "folder/"])
def test_output_must_be_a_file_name(name: str, invoke, wide: Path) -> None:
    result = invoke("quantize", wide, name, "F16")
    assert result.exit_code == 2
    assert f"{name!r} is not a file name." in result.stderr


def test_unreadable_and_unwritable_files(invoke, wide: Path, out: Path, tmp_path: Path) -> None:
    for model, target, message in (
        (tmp_path / "none.gguf", out, "none.gguf: no such file"),
        (wide, tmp_path / "none" / "out.gguf", "out.gguf: No such file or directory"),
        (wide, tmp_path, "exists and is not a regular file"),
    ):
        result = invoke("quantize", model, target, "F16")
        assert result.exit_code == 1
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_progress_only_on_a_terminal(invoke, wide: Path, out: Path, monkeypatch) -> None:
    assert invoke("quantize", wide, out, "F16").stderr == ""
    monkeypatch.setattr(progress, "has_status", lambda: True)
    monkeypatch.setattr(progress, "_DELAY_S", 0)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0)
    shown = invoke("quantize", wide, out, "F16", "--force").stderr
    assert f"writing {out.name}" in shown
    assert shown.endswith("\r\x1b[K")


def test_types_that_need_an_importance_matrix(invoke, wide: Path, out: Path) -> None:
    needs = "tensor 'blk.0.attn_q.weight' would be IQ2_XS, which needs an importance matrix, and none is given"
    result = invoke("quantize", wide, out, "IQ2_S")
    assert (result.exit_code, needs in result.stderr) == (1, True)
    result = invoke("quantize", wide, out, "IQ2_S", "--dry-run")
    assert (result.exit_code, needs in result.stderr) == (0, True)
    assert {line.split()[0] for line in result.stdout.splitlines()[1:-1]} == {"IQ2_XS", "IQ3_S", "Q5_K", "F32"}
    assert not out.exists()


def test_importance_matrix_without_some_entries(invoke, wide: Path, out: Path, tmp_path: Path) -> None:
    entry = Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32))
    path = tmp_path / "some.gguf"
    write_imatrix(ImportanceMatrix(path, {"blk.0.attn_q.weight": entry}, [], 1, 512))
    result = invoke("quantize", wide, out, "Q4_K_M", "--dry-run", "--imatrix", path)
    assert result.exit_code == 0
    assert f"warning: {path} has no entry of blk.0.attn_k.weight and 12 more: quantized with equal weights" in (
        result.stderr
    )


@pytest.mark.parametrize("name", ["missing.gguf", "model.gguf"])
def test_file_that_is_no_importance_matrix(invoke, wide: Path, out: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name if name == "missing.gguf" else wide
    result = invoke("quantize", wide, out, "Q4_K_M", "--imatrix", path)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert str(path) in result.stderr


def test_copies_split_and_merge(invoke, wide: Path, tmp_path: Path) -> None:
    result = invoke("quantize", wide, tmp_path / "part.gguf", "COPY", "--split-max-tensors", "8")
    shards = sorted(tmp_path.glob("part-*.gguf"))
    assert result.exit_code == 0
    assert f"{len(shards)} shards: {shards[0]} to {shards[-1].name}" in " ".join(result.stdout.split())
    merged = tmp_path / "merged.gguf"
    assert invoke("quantize", shards[1], merged, "copy").exit_code == 0
    with open_gguf(wide) as before, open_gguf(merged) as after:
        assert before.tensors.keys() == after.tensors.keys()
        assert all((before.data(name) == after.data(name)).all() for name in before.tensors)
    result = invoke("quantize", shards[0], tmp_path / "kept.gguf", "F16", "--keep-split")
    assert result.exit_code == 0
    assert len(list(tmp_path.glob("kept-*.gguf"))) == len(shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep-split", "--split-max-tensors", "3"), "exclude each other"),
        (("--pure",), "COPY keeps all types"),
        (("--split-max-size", "much"), "'much' is not a size"),
        (("--split-max-tensors", "0"), "--split-max-tensors"),
    ],
)
def test_wrong_options_of_shards(options, message: str, invoke, wide: Path, out: Path) -> None:
    result = invoke("quantize", wide, out, "COPY", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not out.exists()
