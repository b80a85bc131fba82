"""`llamacli imatrix`."""

from pathlib import Path

import pytest

from llamacli.conversion import read_imatrix
from llamacli.gguf import open_gguf

TEXT = "once upon a time there was a little girl and the dog saw a big ball " * 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, invoke) -> None:
    """Run models with kernels in this process."""
    monkeypatch.setattr("llamacli.engine.jit_disabled", lambda: False)


@pytest.mark.usefixtures("kernels")
def test_output_file_and_summary(invoke, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "imatrix.gguf"
    result = invoke("imatrix", model, "-f", text, "-o", out, "-c", "16", "--chunks", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}: 14 tensors, 2 chunks of 16 tokens\n"
    matrix = read_imatrix(out)
    assert (matrix.chunk_count, matrix.chunk_size, matrix.datasets) == (2, 16, ["text.txt"])
    with open_gguf(model) as file:
        names = {name for name, info in file.tensors.items() if name.startswith("blk.") and len(info.shape) > 1}
    assert matrix.entries.keys() == names
    assert {entry.counts.tolist()[0] for entry in matrix.entries.values()} == {32}


@pytest.mark.usefixtures("kernels")
def test_result_serves_to_quantize(invoke, tiny_gguf, text: Path, tmp_path: Path) -> None:
    model = tiny_gguf("moe_4_1", tokenizer="spm", n_embd=256, n_head=4, n_head_kv=2, n_ff=256)
    out, small = tmp_path / "imatrix.gguf", tmp_path / "small.gguf"
    result = invoke("imatrix", model, "-f", text, "-o", out, "-c", "16", "--process-output")
    assert result.exit_code == 0, result.stderr
    assert "output.weight" in read_imatrix(out).entries
    result = invoke("quantize", model, small, "IQ2_XXS", "--imatrix", out)
    assert result.exit_code == 0, result.stderr
    assert all("compiling kernels" in line for line in result.stderr.splitlines())
    with open_gguf(small) as file:
        assert file.tensors["blk.0.ffn_up_exps.weight"].type.name == "IQ2_XXS"
        assert file.metadata["quantize.imatrix.file"] == "imatrix.gguf"


@pytest.mark.usefixtures("kernels")
def test_interrupt_says_that_nothing_is_written(
    invoke, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llamacli.Session.eval", interrupt)
    result = invoke("imatrix", model, "-f", text, "-o", tmp_path / "out.gguf", "-c", "16")
    assert result.exit_code == 130
    assert f"interrupted: {tmp_path / 'out.gguf'} is not written" in result.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_existing_file_is_kept(invoke, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    result = invoke("imatrix", model, "-f", text, "-o", out)
    assert (result.exit_code, result.stderr) == (1, f"llamacli: error: {out} exists: --force overwrites it\n")
    assert out.read_text() == "precious"


def test_kernels_are_needed(invoke, model: Path, text: Path, tmp_path: Path) -> None:
    result = invoke("imatrix", model, "-f", text, "-o", tmp_path / "out.gguf")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "NUMBA_DISABLE_JIT is set" in result.stderr


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-c", "8"), 2, "'8' is not an integer from 16 to 2147483647"),
        (("-c", "5000"), 1, "tokens, and a chunk has 5000"),
        ((), 1, "tokens, and a chunk has 512"),
    ],
)
def test_wrong_arguments(
    invoke, model: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = invoke("imatrix", model, "-f", text, "-o", tmp_path / "out.gguf", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.usefixtures("kernels")
def test_text_from_stdin(invoke, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "imatrix.gguf"
    assert invoke("imatrix", model, "-o", out, "-c", "16", "--chunks", "1", input=TEXT).exit_code == 0
    assert read_imatrix(out).datasets == ["stdin"]
