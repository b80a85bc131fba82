"""`llamacli warmup`."""

from importlib.metadata import EntryPoint

import attrs
import pytest

import example_formats
from llamacli import engine, plugins
from llamacli.engine import catalog
from llamacli.kernels.jit import Compiled
from llamacli.plugins import GENERAL, Plugins
from llamacli.quantization import FORMATS, QuantFormat


def double(x):
    return 2 * x


def test_missing_kernels_are_compiled(invoke, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine, "jit_disabled", lambda: False)
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    for expected in ("1 kernels are ready: 1 compiled in ", "1 kernels are ready: 0 compiled in "):
        monkeypatch.setattr(catalog, "catalog", lambda: [Compiled(double, "int64(int64)")])
        result = invoke("warmup")
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr.splitlines()[-1].startswith(expected)
    assert [path.name.partition("-")[0] for path in tmp_path.rglob("*.kernel")] == ["double"]


@pytest.mark.parametrize("works", [True, False])
def test_kernels_of_plugins_are_compiled(works, invoke, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine, "jit_disabled", lambda: False)
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    monkeypatch.setattr(plugins, "installed_plugins", lambda: Plugins([EntryPoint("x", "example_formats", GENERAL)]))
    if not works:
        packing = attrs.evolve(example_formats.packing_t(), decode=lambda block, codes, fields: block["codes"])
        fmt = QuantFormat(example_formats.Added.T_S, 256, 66, packing=lambda: packing)
        monkeypatch.setattr(example_formats, "FORMATS", (fmt,))
    every, before = catalog.catalog, dict(FORMATS)
    monkeypatch.setattr(
        catalog, "catalog", lambda: [kernel for kernel in every() if "pack_integers_T_S" in kernel.name]
    )
    try:
        result = invoke("warmup")
    finally:
        FORMATS.clear()
        FORMATS.update(before)
    said = result.stderr.splitlines()
    if works:
        assert said[-1].startswith("1 kernels are ready: 1 compiled in ")
    else:
        assert result.exit_code == 1
        assert any("error: compiling pack_integers_T_S_" in line for line in said)


def test_error_without_jit(invoke) -> None:
    result = invoke("warmup")
    assert (result.exit_code, result.stderr) == (
        1, "llamacli: error: NUMBA_DISABLE_JIT is set, so kernels cannot be compiled\n"
    )  # fmt: skip
