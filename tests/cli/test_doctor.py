"""`llamacli doctor`."""

import json

import pytest


@pytest.mark.medium
def test_text_output(invoke) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    labels = [line[:16].strip() for line in result.stdout.splitlines() if line[:1].isalpha()]
    assert labels[:4] == ["versions", "CPU", "instructions", "threads"]
    assert {"kernel cache", "kernels", "plugin"} <= set(labels)
    assert "- NUMBA_DISABLE_JIT is set: models are computed with NumPy" in result.stdout
    assert "  -> unset NUMBA_DISABLE_JIT" in result.stdout


def test_json_output(invoke) -> None:
    answer = json.loads(invoke("doctor", "-o", "json").stdout)
    assert answer["cpu"]["isa"] in answer["cpu"]["available"]
    assert answer["jit_disabled"] is True
    assert next(advice["do"] for advice in answer["advice"]) == "unset NUMBA_DISABLE_JIT"
    assert any("llama" in plugin["architectures"] for plugin in answer["plugins"])


@pytest.mark.medium
def test_memory_of_a_model_comes_first(program, tiny_gguf) -> None:
    path = tiny_gguf("gqa")
    result = program("doctor", str(path))
    assert result.returncode == 0, result.stderr
    sizes = "weights 304.00 KiB, cache of 4096 tokens 1.00 MiB: both fit into the free memory"
    assert f"{path}: {sizes}" in result.stderr
    assert sizes in result.stdout


def test_broken_plugin_is_the_first_problem(program, broken_plugin) -> None:
    result = program("doctor")
    assert result.returncode == 0, result.stderr
    assert "failed: plugin" in result.stdout
    advice = result.stdout[result.stdout.index("problems:") :].splitlines()
    assert "no_such_module" in advice[1]
    assert advice[2] == "  -> reinstall or uninstall llamacli-broken"
