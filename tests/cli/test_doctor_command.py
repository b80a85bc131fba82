"""`llamacli doctor` and `llamacli warmup`."""

import json

from numba import types

from llamacli import engine
from llamacli.kernels import catalog
from llamacli.kernels.jit import Compiled


def double(x):
    return 2 * x


def test_the_doctors_page(invoke) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    labels = [line[:16].strip() for line in result.stdout.splitlines() if line[:1].isalpha()]
    assert labels[:4] == ["versions", "CPU", "instructions", "threads"]
    assert {"kernel cache", "kernels", "plugin"} <= set(labels)
    assert "- NUMBA_DISABLE_JIT is set: models are computed by NumPy" in result.stdout
    assert "  -> unset NUMBA_DISABLE_JIT" in result.stdout


def test_the_doctors_json(invoke) -> None:
    answer = json.loads(invoke("doctor", "-o", "json").stdout)
    assert answer["cpu"]["isa"] in answer["cpu"]["available"]
    assert answer["jit_disabled"] is True
    assert next(advice["do"] for advice in answer["advice"]) == "unset NUMBA_DISABLE_JIT"
    assert any("llama" in plugin["architectures"] for plugin in answer["plugins"])


def test_a_broken_plugin_is_what_the_doctor_names_first(program, broken_plugin) -> None:
    result = program("doctor")
    assert result.returncode == 0, result.stderr
    assert "failed: plugin" in result.stdout
    advice = result.stdout[result.stdout.index("what could be better:") :].splitlines()
    assert "no_such_module" in advice[1]
    assert advice[2] == "  -> reinstall or uninstall llamacli-broken"


def test_warmup_compiles_what_is_missing(invoke, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine, "jit_disabled", lambda: False)
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    for expected in ("1 kernels are ready: 1 compiled in ", "1 kernels are ready: 0 compiled in "):
        monkeypatch.setattr(catalog, "catalog", lambda: [Compiled(double, types.int64(types.int64))])
        result = invoke("warmup")
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr.splitlines()[-1].startswith(expected)
    assert [path.name for path in tmp_path.rglob("*.kernel")] == ["double.kernel"]


def test_warmup_where_nothing_may_be_compiled(invoke) -> None:
    result = invoke("warmup")
    assert (result.exit_code, result.stderr) == (
        1, "llamacli: error: NUMBA_DISABLE_JIT is set, which forbids to compile kernels\n"
    )  # fmt: skip
