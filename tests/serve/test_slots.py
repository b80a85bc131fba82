"""Slots: saved, restored and erased texts, over a fake program."""

from pathlib import Path

import attrs
import pytest

from fake_serving import Simulation, prompt_of, request
from llamacli.serve.errors import BadRequestError
from llamacli.serve.requests import Done

PROMPT = prompt_of(1, 40)


def generate(simulation: Simulation, name: str, slot: int | None, prompt: tuple[int, ...] = PROMPT) -> int:
    """Number of the prompt's tokens that were cached."""
    simulation.submit(attrs.evolve(request(name, max_tokens=8, ignore_eos=True), prompts=(prompt,), slot=slot))
    simulation.run()
    (done,) = [event for event in simulation.events[name] if isinstance(event, Done)]
    return done.usage.cached


def test_a_saved_slot_is_restored_in_another_server(tmp_path: Path) -> None:
    first, second = Simulation(), Simulation()
    assert generate(first, "a", 3) == 0
    n_tokens, n_bytes = first.scheduler.slots.save(3, tmp_path / "a.bin")
    assert (n_tokens, n_bytes) == (len(PROMPT) + 7, (tmp_path / "a.bin").stat().st_size)
    assert second.scheduler.slots.restore(0, tmp_path / "a.bin") == (n_tokens, n_bytes)
    assert generate(second, "b", None, (*PROMPT, 9)) == len(PROMPT)
    assert second.scheduler.slots.save(0, tmp_path / "b.bin")[0] == n_tokens


def test_an_erased_slot_is_computed_again(tmp_path: Path) -> None:
    simulation = Simulation()
    slots = simulation.scheduler.slots
    generate(simulation, "a", 3)
    assert generate(simulation, "b", 3) == len(PROMPT) - 1
    assert slots.erase(3) == len(PROMPT) + 7
    assert generate(simulation, "c", None) == 0
    assert slots.erase(3) == 0
    with pytest.raises(BadRequestError, match="slot 3 has no cached text"):
        slots.save(3, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_files_that_are_no_states_are_refused(tmp_path: Path) -> None:
    simulation = Simulation()
    slots = simulation.scheduler.slots
    generate(simulation, "a", 3)
    used = simulation.scheduler.memory.pool.n_used_bytes
    slots.save(3, tmp_path / "a.bin")
    data = (tmp_path / "a.bin").read_bytes()
    for broken in (b"", b"x" * 100, data[:-1], data[:200] + b"x" + data[201:]):
        (tmp_path / "b.bin").write_bytes(broken)
        with pytest.raises(BadRequestError, match=r"b.bin: "):
            slots.restore(1, tmp_path / "b.bin")
    with pytest.raises(OSError, match=r"none.bin"):
        slots.restore(1, tmp_path / "none.bin")
    assert slots.erase(1) == 0
    assert simulation.scheduler.memory.pool.n_used_bytes == used
