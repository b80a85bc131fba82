"""Batched generation: several prompts of one model at once."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence

import attrs

from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import ContextOverflowError, InvalidRequestError
from llamacli.generation import token_limit
from llamacli.sampling import SamplingParams, StopStrings
from llamacli.session import Session, eval_batch
from llamacli.util.numbers import is_integer


@attrs.frozen
class Generated:
    """Text generated for one prompt.

    - `tokens`: the ids drawn, without the end token.
    - `finish_reason`: "length" for `max_tokens` or a full context, else "stop".
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str


def generate_batch(
    model: CompiledModel,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | None = None,
    *,
    max_tokens: int | None = None,
    seed: int | None = 1234,
    n_parallel: int = 16,
) -> list[Generated]:
    """Generate the text after each prompt, in sessions that are evaluated together.

    `Model.generate` calls it.
    """
    if isinstance(prompts, str):
        raise InvalidRequestError("prompts is a list of texts or of token ids: put a single text into a list")
    if not is_integer(n_parallel) or n_parallel < 1:
        raise InvalidRequestError(f"n_parallel must be an integer of at least 1, not {n_parallel!r}")
    limit = token_limit(max_tokens, model.config.n_ctx)
    params = SamplingParams() if params is None else params
    with contextlib.ExitStack() as stack:
        streams = [_Stream(stack.enter_context(Session(model, seed=seed)), prompt, params, limit) for prompt in prompts]
        waiting = collections.deque(stream for stream in streams if limit)
        active: list[_Stream] = []
        while waiting or active:
            while waiting and len(active) < n_parallel:
                active.append(waiting.popleft())
            eval_batch((stream.session, stream.new_ids) for stream in active)
            for stream in active:
                stream.step()
            active = [stream for stream in active if not stream.ended]
        return [Generated(stream.text, tuple(stream.tokens), stream.finish_reason) for stream in streams]


class _Stream:
    """Generation for one prompt; `new_ids` are to be evaluated next."""

    def __init__(self, session: Session, prompt: str | Sequence[int], params: SamplingParams, max_tokens: int):
        self.session, self._max_tokens = session, max_tokens
        session.params = params
        self.new_ids = session.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if len(self.new_ids) > session.n_ctx:
            raise ContextOverflowError(0, len(self.new_ids), session.n_ctx)
        self._decoder = session.model.tokenizer.stream(self.new_ids)
        self._stops = StopStrings(params.stop)
        self.tokens: list[int] = []
        self.text, self.finish_reason, self.ended = "", "length", False

    def step(self) -> None:
        """Draw a token, or end. Evaluated sessions only."""
        session = self.session
        if session.n_past == session.n_ctx:
            self._end("length", self._decoder.flush())
            return
        token = session.draw()
        if token in session.model.tokenizer.eog_ids:
            self._end("stop")
            return
        self.tokens.append(token)
        self.text += self._stops.feed(self._decoder.feed(token))
        if self._stops.stopped:
            self._end("stop")
        elif len(self.tokens) == self._max_tokens:
            self._end("length", self._decoder.flush())
        else:
            session.accept(token)
            self.new_ids = [token]

    def _end(self, reason: str, rest: str = "") -> None:
        if not self._stops.stopped:
            self.text += self._stops.feed(rest)
            self.text += self._stops.flush()
        self.finish_reason, self.ended = reason, True
        self.session.close()
