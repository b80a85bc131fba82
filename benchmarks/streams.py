"""Requests to an engine, and the times of their texts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llamacli.sampling import SamplingParams
from llamacli.serve.engine import LocalEngine
from llamacli.serve.requests import GenerationRequest, TextDelta


async def timed(
    engine: LocalEngine,
    name: str,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    temperature: float = 1.0,
    background: bool = False,
) -> tuple[list[tuple[float, float]], str]:
    """Times of the texts of a request, and all of it.

    Each is the time since the request by the clock, and that of the processors, in seconds. A caller that is cancelled
    cancels the request.
    """
    wanted = GenerationRequest(
        id=name, model="model", prompts=(tuple(prompt),), params=SamplingParams(temperature=temperature),
        max_tokens=n_tokens, ignore_eos=True, background=background,
    )  # fmt: skip
    clock, processor, times, text = time.perf_counter(), time.process_time(), list[tuple[float, float]](), ""
    stream = engine.submit(wanted)
    try:
        async for event in stream:
            if isinstance(event, TextDelta):
                times.append((time.perf_counter() - clock, time.process_time() - processor))
                text += event.text
    finally:
        stream.cancel()
    return times, text
