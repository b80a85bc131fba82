"""Prompts of the scheduler that survive a restart."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TinyGguf
from llamacli import Model, SamplingParams, load_model
from llamacli.engine import default_engine
from llamacli.kv import snapshot
from llamacli.plugins import Plugins
from llamacli.serve.cache import CacheMemory
from llamacli.serve.requests import Done, GenerationRequest, TextDelta
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings

PROMPT = [(7 * i * i + 3 * i) % 100 + 3 for i in range(150)]


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    with load_model(tiny_gguf(), "fp32", plugins=plugins, engine=default_engine()) as model:
        yield model


def run(model: Model, folder: Path | None, prompt: list[int]) -> tuple[list[Any], int]:
    """Ids of a new scheduler's reply, and its prompt's cached tokens."""
    cache = None if folder is None else (str(folder), 1 << 30)
    scheduler = Scheduler(model, EngineSettings(n_ctx=200, prompt_cache=cache))
    scheduler.submit(
        GenerationRequest(
            id="a", model="m", prompts=(tuple(prompt),), params=SamplingParams(temperature=0.0, n_probs=1),
            max_tokens=8, ignore_eos=True,
        )
    )  # fmt: skip
    if (reader := scheduler.memory._reader) is not None:
        reader.submit(lambda: None).result()  # what it reads is there before the first step
    ids, n_cached = list[Any](), 0
    while scheduler.busy:
        for _, event in scheduler.step():
            if isinstance(event, TextDelta):
                ids += [(token.id, token.logprob) for token in event.tokens]
            elif isinstance(event, Done):
                n_cached = event.usage.cached
    scheduler.close()
    return ids, n_cached


def test_a_restarted_server_reads_its_prompts(model: Model, tmp_path: Path) -> None:
    expected, _ = run(model, None, PROMPT)
    assert run(model, tmp_path / "prompts", PROMPT) == (expected, 0)
    assert len([*(tmp_path / "prompts").iterdir()]) == 1
    again, n_cached = run(model, tmp_path / "prompts", PROMPT)
    assert (again, n_cached) == (expected, len(PROMPT) - 1)
    other = run(model, tmp_path / "prompts", [*PROMPT[:100], 5, 6, 7])
    assert (other[0], other[1]) == (run(model, None, [*PROMPT[:100], 5, 6, 7])[0], 100)


@pytest.mark.medium
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_a_process_that_dies_while_it_reads_a_prompt_leaves_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(model, tmp_path / "prompts", PROMPT)
    restore = snapshot.Snapshot.restore

    def dies(*given: Any) -> None:
        restore(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(snapshot.Snapshot, "restore", dies)
        run(model, tmp_path / "prompts", PROMPT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert run(model, tmp_path / "prompts", PROMPT) == (expected, len(PROMPT) - 1)


def test_a_read_without_memory_is_no_error_of_the_request(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(model, tmp_path / "prompts", PROMPT)
    with monkeypatch.context() as failing:
        failing.setattr(snapshot.Snapshot, "restore", lambda *_: (_ for _ in ()).throw(MemoryError))
        assert run(model, tmp_path / "prompts", PROMPT) == (expected, 0)
    assert run(model, tmp_path / "prompts", PROMPT) == (expected, len(PROMPT) - 1)


def test_prompts_wait_for_their_prefix_but_not_for_long(model: Model, tmp_path: Path) -> None:
    gate, begun = threading.Event(), []
    settings = EngineSettings(n_ctx=512, prompt_cache=(str(tmp_path / "p"), 1 << 30))
    memory = CacheMemory(model, settings)

    def load(*given: object) -> int:
        begun.append(given)
        gate.wait(30)
        return 0

    memory._prompts.load = load  # type: ignore[union-attr,method-assign]
    memory.read_ahead(PROMPT, "")
    assert memory.read_of(PROMPT, 1.0) is not None
    assert memory.read_of([*PROMPT, 5], 1.0) is None
    reading, _ = memory.reads[tuple(PROMPT)]
    for share, waits in ((0.45, True), (0.55, False)):  # of the time that evaluating takes
        memory.reads[tuple(PROMPT)] = reading, time.monotonic() - share * len(PROMPT)
        assert (memory.read_of(PROMPT, 1.0) is not None) == waits
    gate.set()
    reading.result()
    assert memory.read_of(PROMPT, 1.0) is None
    assert (len(begun), memory.reads) == (1, {})
    memory.close()
