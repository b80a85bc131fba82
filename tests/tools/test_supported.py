"""Architectures of models by their names."""

import pytest

from llamacli.tools.supported import reasons, support


@pytest.mark.parametrize(
    ("name", "architectures"),
    [
        ("qwen3", ["qwen3"]),
        ("Qwen3-Coder-30B-A3B-Instruct", ["qwen3moe"]),
        ("Llama 3.2", ["llama"]),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", ["llama"]),
        ("DeepSeek-V3.1", ["deepseek2"]),
        ("DeepSeek-R1-Distill-Qwen-7B", ["qwen2"]),
        ("gemma-3-4b-it", ["gemma3"]),
        ("EmbeddingGemma", ["gemma-embedding"]),
        ("GLM-4.7-Flash", ["deepseek2"]),
        ("GLM-4.6", ["glm4moe"]),
        ("Qwen3.6", ["qwen35", "qwen35moe"]),
        ("Model 2", []),
        ("", []),
    ],
)
def test_support_by_name(name: str, architectures: list[str]) -> None:
    found = support(name)
    assert [one.architecture for one in found] == architectures
    assert all(one.runs and one.plugin and one.models for one in found)


@pytest.mark.parametrize("name", sorted(reasons()))
def test_names_that_do_not_run_have_reasons(name: str) -> None:
    (found,) = support(name)
    assert (found.runs, found.plugin, found.note) == (False, None, reasons()[name])
    assert found.note
