import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from llamacli.gguf import GGUFFile
from llamacli.testing import vocabularies
from suite import calls_at_most


def fields(stdout: str) -> dict[str, str]:
    """Lines of the summary by label."""
    summary = stdout.split("\n\n")[0]
    return {line[:16].strip(): line[16:] for line in summary.splitlines()}


def test_summary(invoke, model: Path) -> None:
    shown = fields(invoke("inspect", model).stdout)
    assert shown["file"] == str(model)
    assert shown["format"] == "GGUF v3"
    assert shown["architecture"] == "llama"
    assert shown["plugin"].startswith("llamacli_llama (")
    assert shown["context length"] == "64"
    assert (shown["layers"], shown["heads"], shown["heads (k, v)"]) == ("2", "4", "2")
    assert shown["vocabulary"] == f"{len(vocabularies.spm_vocabulary()[0])} tokens (llama)"
    assert "cannot run" not in shown
    assert "chat template" not in shown


@pytest.mark.parametrize(
    ("without", "expected"), [([], ""), (["blk.2.attn_q.weight", "blk.2.nextn.enorm.weight"], "incomplete ")]
)
def test_multi_token_prediction_heads_are_shown(invoke, tiny_gguf, without: list[str], expected: str) -> None:
    shown = fields(invoke("inspect", tiny_gguf("glm4_nextn", without=without)).stdout)
    assert shown["variant"].endswith(f"; {expected}multi-token-prediction head")
    assert "cannot run" not in shown
    assert "multi-token" not in fields(invoke("inspect", tiny_gguf("glm4")).stdout)["variant"]


def test_chat_template_length_and_hash(invoke, tiny_gguf) -> None:
    path = tiny_gguf("gqa", tokenizer="spm", metadata={"tokenizer.chat_template": "é{{ messages }}"})
    assert fields(invoke("inspect", path).stdout)["chat template"] == (
        f"15 characters, SHA-256 {hashlib.sha256('é{{ messages }}'.encode()).hexdigest()[:16]}..."
    )


def test_syntax_of_replies_is_shown(invoke, tiny_gguf) -> None:
    template = (
        "{%- for m in messages -%}{{ m.content }}{%- for c in m.tool_calls -%}"
        "{{ '[CALL]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{%- endfor -%}{%- endfor -%}<think>"
    )
    path = tiny_gguf("gqa", tokenizer="spm", metadata={"tokenizer.chat_template": template})
    shown = fields(invoke("inspect", path, "--replies").stdout)["replies"]
    assert shown.startswith("derived; reasoning <think> </think>; calls [CALL]")
    assert "after='[ARGS]'" in shown


def test_syntax_of_messages_to_tools_is_shown(invoke, tiny_gguf) -> None:
    template = (
        "{%- for m in messages -%}{{ '<' + m.role + '>' }}{%- if m.role == 'assistant' -%}"
        "{{- '>>>all\\n' + m.content if m.content -}}{%- for c in m.tool_calls -%}"
        "{{- '>>>' + c.function.name + '\\n' + c.function.arguments | tojson -}}{%- endfor -%}"
        "{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}{{ '<assistant>>>>' if add_generation_prompt }}"
    )
    path = tiny_gguf("gqa", tokenizer="spm", metadata={"tokenizer.chat_template": template})
    shown = fields(invoke("inspect", path, "--replies").stdout)["replies"]
    assert shown == r"derived; calls NAME\n arguments in JSON"


def test_summary_counts_tensors_and_parameters(invoke, tiny_gguf) -> None:
    path = tiny_gguf("q8_0")
    summary = json.loads(invoke("inspect", path, "--json", "--tensors").stdout)
    assert summary["n_bytes"] == path.stat().st_size
    assert summary["n_params"] == sum(math.prod(tensor["shape"]) for tensor in summary["tensors"])
    assert summary["n_tensors"] == len(summary["tensors"])
    for name, kind in summary["tensor_types"].items():
        sizes = [tensor["n_bytes"] for tensor in summary["tensors"] if tensor["type"] == name]
        assert (kind["n_tensors"], kind["n_bytes"]) == (len(sizes), sum(sizes))
    assert list(summary["tensor_types"]) == ["Q8_0", "F32"]  # the largest share first
    assert (summary["plugin"]["module"], summary["error"]) == ("llamacli_llama", None)


def test_tensor_shapes_have_rows_first(invoke, model: Path) -> None:
    lines = invoke("inspect", model, "--tensors").stdout.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("blk.0.ffn_up.weight")]
    assert row == ["blk.0.ffn_up.weight", "96", "x", "64", "F32", str(96 * 64 * 4)]


def test_long_metadata_is_shortened_without_full(invoke, tiny_gguf) -> None:
    path = tiny_gguf("gqa", metadata={"general.description": "x" * 500, "general.tags": ["a\nb", "c"]})
    shown = invoke("inspect", path).stdout
    assert f"general.description = {'x' * 80}... (500 characters)" in shown
    assert r"general.tags = [a\nb, c]" in shown
    assert "tokenizer.ggml.tokens = [tok_0, tok_1, tok_2, tok_3, ...] (128 items)" in shown
    shown = invoke("inspect", path, "--full").stdout
    assert "x" * 500 in shown
    assert "tok_127]" in shown


def test_json_metadata(invoke, tiny_gguf) -> None:
    path = tiny_gguf(
        "gqa", metadata={"general.a": math.nan, "general.b": [1, 2], "general.c": True, "general.d": "é\n"}
    )
    metadata = json.loads(invoke("inspect", path, "--json").stdout)["metadata"]
    assert [metadata[f"general.{key}"] for key in "abcd"] == ["nan", [1, 2], True, "é\n"]
    assert metadata["tokenizer.ggml.tokens"] == {"length": 128, "first": ["tok_0", "tok_1", "tok_2", "tok_3"]}
    metadata = json.loads(invoke("inspect", path, "--json", "--full").stdout)["metadata"]
    assert metadata["tokenizer.ggml.tokens"] == [f"tok_{i}" for i in range(128)]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_unknown_architecture_is_described(flags: tuple[str, ...], invoke, model, tmp_path) -> None:
    path = tmp_path / "camel.gguf"
    path.write_bytes(model.read_bytes().replace(b"llama", b"camel"))
    result = invoke("inspect", path, *flags)
    assert result.exit_code == 0
    assert "no installed plugin runs architecture 'camel'" in result.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"without": ["output_norm.weight"]}, "tensor output_norm.weight is missing"),
        ({"metadata": {"llama.block_count": None}}, "'llama.block_count' is missing"),
        ({"metadata": {"general.architecture": 3}}, "'general.architecture'"),
    ],
)
def test_reason_why_a_plugin_refuses_the_file(options, reason: str, invoke, tiny_gguf) -> None:
    result = invoke("inspect", tiny_gguf("gqa", **options))
    assert result.exit_code == 0
    assert reason in fields(result.stdout)["cannot run"]


def test_metadata_of_wrong_types(invoke, tiny_gguf) -> None:
    keys = ("general.architecture", "general.name", "tokenizer.ggml.model", "llama.block_count")
    path = tiny_gguf("gqa", metadata={"tokenizer.ggml.tokens": 3} | {key: [1, 2] for key in keys})
    assert "general.name = [1, 2]" in invoke("inspect", path).stdout
    summary = json.loads(invoke("inspect", path, "--json").stdout)
    assert (summary["architecture"], summary["n_vocab"], summary["plugin"]) == (None, 0, None)
    assert "general.architecture" in summary["error"]


def test_broken_plugin_does_not_hide_the_file(invoke, model, monkeypatch) -> None:
    monkeypatch.setattr("llamacli_llama.Llama.configure", lambda *_: {}["x"])
    reason = fields(invoke("inspect", model).stdout)["cannot run"]
    assert reason.startswith("architecture 'llama' failed: KeyError: 'x', at ")


def test_tensor_data_is_not_read(invoke, model, monkeypatch) -> None:
    monkeypatch.setattr(GGUFFile, "data", lambda *_: pytest.fail("tensor data was read"))
    assert invoke("inspect", model, "--tensors").exit_code == 0


def test_vocabulary_only_file_of_unknown_architecture_is_fast(invoke, shared) -> None:
    path = shared("vocab/ggml-vocab-gemma-4.gguf")
    with calls_at_most(32 * 262144):
        shown = fields(invoke("inspect", path).stdout)
    assert shown["vocabulary"] == "262144 tokens (gemma4)"
    assert shown["tensors"] == "0"


def test_vocabulary_only_file_of_known_architecture(invoke, tiny_gguf) -> None:
    names = [
        tensor["name"] for tensor in json.loads(invoke("inspect", tiny_gguf(), "--tensors", "--json").stdout)["tensors"]
    ]
    shown = fields(invoke("inspect", tiny_gguf("gqa", without=names)).stdout)
    assert shown["cannot run"] == "the file has no tensors, only a vocabulary"


def test_file_format_of_a_plugin(invoke, shared, tmp_path) -> None:
    shutil.copy(shared("models/tok512.bin"), tmp_path / "tokenizer.bin")
    shutil.copy(shared("models/stories260K.bin"), tmp_path / "stories.bin")
    summary = json.loads(invoke("inspect", tmp_path / "stories.bin", "--json").stdout)
    assert (summary["format"], summary["architecture"], summary["error"]) == (None, "llama", None)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_of_sizes(suffix: str, invoke, tiny_gguf, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"sizes.{suffix}"
    path = tiny_gguf("q8_0")
    assert invoke("inspect", path, "--plot", picture).stdout == invoke("inspect", path).stdout
    data = picture.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:  # texts are drawn, and kept as comments
        assert {b"Q8_0", b"F32", b"by layer and type", b"rest"} <= set(re.findall(rb"<!-- (.*?) -->", data))


def test_plot_without_tensors(invoke, tiny_gguf, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = [
        tensor["name"] for tensor in json.loads(invoke("inspect", tiny_gguf(), "--tensors", "--json").stdout)["tensors"]
    ]
    assert invoke("inspect", tiny_gguf("gqa", without=names), "--plot", tmp_path / "none.png").exit_code == 0


def test_plot_without_matplotlib(invoke, model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("inspect", model, "--plot", tmp_path / "sizes.png")
    assert result.exit_code == 2
    assert "plots need matplotlib: pip install 'llamacli[plot]'" in result.stderr
