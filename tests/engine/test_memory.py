"""Weights and caches compared with the memory."""

import logging
from pathlib import Path

import pytest

from conftest import TinyGguf
from llamacli.engine import memory
from llamacli.engine.memory import CONTEXT, Need, stays_on_disk
from llamacli.errors import InvalidRequestError, OutOfMemoryError
from llamacli.model import load_model, need_of
from llamacli.plugins import Plugins
from llamacli.util.settings import LoadMode

MIB, PATH = 1 << 20, Path("big.gguf")
NEED = Need(1800 * MIB, 200 * MIB)
NUMBERS = "the weights take 1800 MiB and the cache of 4096 tokens 200 MiB, and"


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch):
    """Set the free memory and that of the machine, in MiB."""

    def run(free: int | None, capacity: int | None) -> None:
        monkeypatch.setattr(memory, "available_memory", lambda: None if free is None else free * MIB)
        monkeypatch.setattr(memory, "memory_capacity", lambda: None if capacity is None else capacity * MIB)

    return run


@pytest.mark.parametrize(
    ("load", "free", "capacity", "can_map", "on_disk", "said"),
    [
        ("auto", 2300, 4000, True, False, ""),
        ("auto", 2200, 4000, True, True, f"{NUMBERS} 2200 MiB of 4000 MiB are free: the weights are read from disk"),
        ("auto", 1000, 4000, False, False, f"{NUMBERS} 1000 MiB of 4000 MiB are free; end other programs"),
        ("auto", 1000, None, False, False, f"{NUMBERS} 1000 MiB are free; end other programs"),
        ("memory", 2300, 4000, True, False, ""),
        ("map", 9000, 9000, True, True, ""),
        ("map", 100, 9000, True, True, ""),
        ("auto", None, None, True, False, ""),
    ],
)
def test_place_of_weights(load, free, capacity, can_map, on_disk, said, has, caplog) -> None:
    has(free, capacity)
    with caplog.at_level(logging.WARNING):
        assert stays_on_disk(LoadMode(load), NEED, PATH, can_map=can_map) is on_disk
    assert [message.startswith(f"big.gguf: {said}") for message in caplog.messages] == [True] * bool(said)


@pytest.mark.parametrize(
    ("load", "capacity", "can_map", "remedy"),
    [
        ("memory", 4000, True, ": --load map reads the weights from disk when they are used"),
        ("memory", 1700, False, "; take a smaller quantization or model"),
        ("auto", 1700, False, "; take a smaller quantization or model"),
    ],
)
def test_weights_that_must_be_in_memory_are_refused(load, capacity, can_map, remedy, has) -> None:
    has(1000, capacity)
    with pytest.raises(OutOfMemoryError) as refused:
        stays_on_disk(LoadMode(load), NEED, PATH, can_map=can_map)
    assert str(refused.value) == f"big.gguf: {NUMBERS} 1000 MiB of {capacity} MiB are free{remedy}"
    assert (refused.value.asked, refused.value.available) == (2000 * MIB, 1000 * MIB)


def test_weights_that_cannot_be_mapped_and_shall_be_are_refused(has) -> None:
    has(9000, 9000)
    with pytest.raises(InvalidRequestError, match=r"big.gguf: load 'map' needs packed copies, .* on Windows"):
        stays_on_disk(LoadMode.MAP, NEED, PATH, can_map=False)


@pytest.mark.parametrize("name", ["gqa", "moe_8_2", "qwen35"])
def test_needs_are_those_of_the_loaded_model(name: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf(name, type="Q8_0")
    need = need_of(path, plugins)
    with load_model(path, threads=1, plugins=plugins) as model:
        matrices = model.program._weights.copyable.values()
        assert need.cache == model.kv_pool().layout.n_bytes(CONTEXT)
        assert 0 <= need.weights - sum(matrix.packed.nbytes for matrix in matrices) < 4096 * len(matrices)
