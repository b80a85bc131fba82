"""Functions, files and frames of decode steps, as `benchmarks/calls.py` counts them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "calls.py"


@pytest.fixture(scope="module")
def calls() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calls", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_decode_step_of_run(calls: ModuleType) -> None:
    found = calls.decode_step()
    assert 40 < len(found.functions) <= 60, str(found)
    assert len(found.files) <= 19, str(found)
    assert 0 < found.deepest <= 6, str(found)


def test_a_step_of_the_server(calls: ModuleType) -> None:
    found = calls.server_step()
    assert 50 < len(found.functions) <= 110, str(found)
    assert 0 < found.deepest <= 7, str(found)
