"""Draws of the next tokens of many texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llamacli.sampling import SamplerChain, SamplerState
from llamacli.sampling.candidates import Logits
from llamacli.serve.texts import ChoiceText

MIN_LOGITS = 1 << 18
"""Logits of a step from which threads share its draws: below, handing them over takes longer."""

Draw = tuple[SamplerState, SamplerChain, ChoiceText, Logits]
"""Sampler, its chain, the text that the token is for, and the logits, which are changed."""


class Drawer:
    """Thread pool that draws tokens.

    Texts are independent, so results do not depend on the number of threads. Samplers spend most of their time in
    compiled code and NumPy, which run without Python's lock.
    """

    def __init__(self, n_threads: int = 1):
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads - 1, "llamacli-draw") if n_threads > 1 else None

    def draw(self, draws: Sequence[Draw]) -> list[int | Exception]:
        """Token of each draw, or its error.

        Samplers accept their tokens, but for those that end texts.
        """
        n_parts = min(self._n_threads, len(draws))
        if self._pool is None or n_parts < 2 or sum(len(logits) for *_, logits in draws) < MIN_LOGITS:
            return _draw_each(draws)
        parts = [draws[i::n_parts] for i in range(n_parts)]
        others = [self._pool.submit(_draw_each, part) for part in parts[1:]]
        tokens: list[int | Exception] = [0] * len(draws)
        tokens[::n_parts] = _draw_each(parts[0])
        for i, other in enumerate(others, start=1):
            tokens[i::n_parts] = other.result()
        return tokens

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _draw_each(draws: Sequence[Draw]) -> list[int | Exception]:
    return [_draw(*one) for one in draws]


def _draw(sampler: SamplerState, chain: SamplerChain, text: ChoiceText, logits: Logits) -> int | Exception:
    try:
        token = sampler.sample(logits, chain)
        if not text.is_end(token):
            sampler.accept(token)
    except Exception as error:
        return error
    return token
