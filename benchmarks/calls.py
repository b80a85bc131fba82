"""Count the Python functions, calls and files of decode steps.

    python benchmarks/calls.py           # a table
    python benchmarks/calls.py --list    # with the functions of each

Counted with the demo model and warm kernels: a decode step of `llamacli run`, from one draw to the next, and a step of
the server's scheduler with four running sequences; and the frames between the loop and compiled code.
`tests/test_calls.py` holds them to limits.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from unittest.mock import patch

import attrs

import llamacli
from llamacli.cli.app import app
from llamacli.kernels.team import Team
from llamacli.sampling import SamplerState, SamplingParams
from llamacli.serve.requests import GenerationRequest
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings

CORE = str(Path(llamacli.__file__).parent)
RUN = ["run", "demo", "Tell me a story.", "-n", "12", "--seed", "1", "--temp", "0.8"]
WARM_UP = 4
"""Steps before the one that is counted."""


@attrs.define
class Calls:
    """Calls of functions of the core.

    `deepest` is the largest number of frames between the loop and compiled code.
    """

    functions: collections.Counter[tuple[str, str]] = attrs.field(factory=collections.Counter)
    deepest: int = 0

    @property
    def files(self) -> set[str]:
        """Files of the functions, relative to the package."""
        return {file for file, _ in self.functions}

    def __str__(self) -> str:
        return f"{self.functions.total()} calls of {len(self.functions)} functions in {len(self.files)} files"


def decode_step() -> Calls:
    """Count a decode step of `llamacli run`, from draw to draw."""
    draw = SamplerState.sample.__code__
    with (
        open(os.devnull) as empty,
        patch.object(sys, "stdin", empty),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return _between(draw, lambda: app.main(RUN, standalone_mode=False))


def server_step(n_sequences: int = 4) -> Calls:
    """Count a step of the scheduler that decodes some sequences."""
    with llamacli.load_model(llamacli.demo_path()) as model:
        scheduler = Scheduler(model, EngineSettings(n_ctx=256, max_running=n_sequences))
        prompt = model.encode("Once upon a time")
        for i in range(n_sequences):
            params = SamplingParams(temperature=0.8)
            request = GenerationRequest(
                id=f"r{i}", model="", prompts=(tuple(prompt),), params=params, seed=i, max_tokens=100, ignore_eos=True
            )
            scheduler.submit(request)
        while any(slot.state == "prefill" or not slot.n_generated for slot in scheduler.stats().slots) or (
            len(scheduler.stats().slots) < n_sequences
        ):
            scheduler.step()
        for _ in range(WARM_UP):
            scheduler.step()
        with _recording() as calls:
            scheduler.step()
        scheduler.close()
    return calls


def _between(marker: CodeType, work: Callable[[], object]) -> Calls:
    """Count the calls between two calls of a function."""
    calls, n_seen = Calls(), 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal n_seen
        if event == "call":
            n_seen += frame.f_code is marker
            if n_seen == WARM_UP:
                _count(calls, frame)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@contextlib.contextmanager
def _recording() -> Iterator[Calls]:
    calls = Calls()
    sys.setprofile(lambda frame, event, _: _count(calls, frame) if event == "call" else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _count(calls: Calls, frame: FrameType) -> None:
    code = frame.f_code
    if not code.co_filename.startswith(CORE):
        return
    calls.functions[os.path.relpath(code.co_filename, CORE), code.co_qualname] += 1
    if code is Team.run.__code__:
        calls.deepest = max(calls.deepest, _depth(frame))


def _depth(frame: FrameType | None) -> int:
    n = 0
    while frame is not None and frame.f_code.co_name not in ("generate", "step", "main"):
        n += frame.f_code.co_filename.startswith(CORE)
        frame = frame.f_back
    return n


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the functions too")
    options = parser.parse_args()
    for name, calls in {"decode step of run": decode_step(), "server step, 4 sequences": server_step()}.items():
        print(f"{name}: {calls}; {calls.deepest} frames from the loop to compiled code")
        if options.list:
            for (file, function), n in sorted(calls.functions.items()):
                print(f"    {n:4} {file} {function}")


if __name__ == "__main__":
    main()
