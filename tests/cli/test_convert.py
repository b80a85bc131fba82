"""`llamacli convert`."""

from pathlib import Path

import pytest

from checkpoint_cases import CASES, write_adapter, write_checkpoint
from llamacli.gguf import open_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "qwen3")


def test_output_file(invoke, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert "BF16" in invoke("convert", folder, out, "--dry-run").stdout
    assert not out.exists()
    done = invoke("convert", folder, out)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].startswith(f"{out}: BF16, ")
    with open_gguf(out) as file:
        assert file.metadata["general.architecture"] == "qwen3"
        assert file.tensors["output.weight"].type.name == "BF16"
    again = invoke("convert", folder, out, "F16")
    assert again.exit_code == 1
    assert "--force overwrites it" in again.stderr
    assert invoke("convert", folder, out, "F16", "--force").exit_code == 0
    with open_gguf(out) as file:
        assert file.tensors["output.weight"].type.name == "F16"
        assert file.metadata["general.file_type"] == 1


@pytest.mark.medium
def test_quantized_file_runs(program, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert program("convert", folder, out, "q8_0", env={"NUMBA_DISABLE_JIT": "0"}).returncode == 0
    with open_gguf(out) as file:
        assert file.tensors["output.weight"].type.name == "Q8_0"
        assert file.metadata["general.file_type"] == 7
    said = [program("run", source, "once", "-n", "4", "--temp", "0") for source in (out, folder)]
    assert [done.returncode for done in said] == [0, 0]


def test_wrong_input(invoke, folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(tmp_path / "config.json")
    done = invoke("convert", folder, tmp_path / "out.gguf")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert "config.json is missing" in done.stderr
    done = invoke("convert", tmp_path / "config.json", tmp_path / "out.gguf")
    assert done.exit_code == 1
    assert "is no folder" in done.stderr
    done = invoke("convert", folder, tmp_path / "out.gguf", "Q9")
    assert done.exit_code in (1, 2)
    assert "Q9" in done.stderr or "config.json" in done.stderr


def test_peft_adapter(invoke, folder: Path, tmp_path: Path) -> None:
    """A folder becomes a file for --lora."""
    adapter, out = write_adapter(tmp_path, "qwen3"), tmp_path / "adapter.gguf"
    shown = invoke("convert", adapter, out, "--dry-run")
    assert (shown.exit_code, shown.stdout) == (0, f"{out} would be: LoRA of qwen3, 14 matrices\n")
    assert not out.exists()
    assert invoke("convert", adapter, out).exit_code == 0  # the base that adapter_config.json names
    assert "--force overwrites it" in invoke("convert", adapter, out).stderr
    assert invoke("convert", adapter, out, "--force", "--base", folder).exit_code == 0
    with open_gguf(out) as file:
        assert file.metadata["general.type"] == "adapter"
        assert file.metadata["adapter.lora.alpha"] == 16.0


@pytest.mark.parametrize("name", ["eagle3", pytest.param("dspark_speculator", marks=pytest.mark.slow)])
def test_draft_heads_get_the_tokenizer_of_their_model(invoke, tmp_path: Path, name: str) -> None:
    """The file drafts, and texts are those without it."""
    head, out = write_checkpoint(tmp_path, name), tmp_path / "head.gguf"
    base, words = tmp_path / CASES[name]["base"], ["then in the end", "-n", "12", "--no-chat", "--temperature", "0"]
    assert invoke("convert", head, out, "--base", base).exit_code == 0
    assert "it is a draft head, for the --draft of its model" in invoke("inspect", out).stdout
    drafted = invoke("run", base, *words, "--draft", out)
    assert (drafted.exit_code, drafted.stdout) == (0, invoke("run", base, *words).stdout)
    alone = invoke("run", base, "a", "-n", "1", "--draft", head)
    assert "is a draft head: `llamacli convert" in alone.stderr
    assert "--base FOLDER` with" in alone.stderr


def test_wrong_uses_with_adapters(invoke, folder: Path, tmp_path: Path) -> None:
    adapter, out = write_adapter(tmp_path, "qwen3", base_model_name_or_path="user/model"), tmp_path / "out.gguf"
    missing = invoke("convert", adapter, out)
    assert missing.exit_code == 1
    assert "base_model_name_or_path is 'user/model', which is no folder here" in missing.stderr
    assert invoke("convert", adapter, out, "F16", "--base", folder).exit_code == 2
    assert "--base is for PEFT adapters" in invoke("convert", folder, out, "--base", folder).stderr
    loaded = invoke("run", folder, "a", "-n", "1", "--lora", adapter)
    assert "llamacli convert FOLDER OUT" in loaded.stderr
    assert not out.exists()
