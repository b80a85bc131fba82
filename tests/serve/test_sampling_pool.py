"""Draws of many sequences at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fake_serving import FakeClock, fake_model
from llamacli.errors import InvalidRequestError
from llamacli.sampling import Candidates, SamplerChain, SamplerState, SamplingParams, build_chain
from llamacli.sampling.choice import Draw as RandomDraw
from llamacli.sampling.sampler import Sampler
from llamacli.serve import sampling_pool
from llamacli.serve.requests import GenerationRequest
from llamacli.serve.sampling_pool import SamplingPool
from llamacli.serve.sequences import RequestState, SequenceState
from llamacli.serve.texts import ChoiceText

TOKENIZER = fake_model(FakeClock()).tokenizer
REQUEST = GenerationRequest(id="a", model="m", prompts=((300,),))


def sequence(chain: SamplerChain, seed: int) -> SequenceState:
    """Sequence whose prompt is evaluated."""
    made = SequenceState(RequestState(REQUEST, 0.0, 1, 1, 0), 0, 0, (300,), 1, 10, chain)
    made.begin_text(SamplerState(seed, TOKENIZER), ChoiceText(REQUEST, 0, TOKENIZER, (300,), 10))
    return made


def some_draws(chain: SamplerChain, n: int) -> list[SequenceState]:
    """Draws with different seeds and logits; the fourth has a NaN."""
    found = []
    for i in range(n):
        logits = np.random.default_rng(i).normal(size=TOKENIZER.n_vocab).astype(np.float32)
        if i == 3:
            logits[5] = np.nan
        found.append(sequence(chain, i))
        found[-1].keep_logits(logits[None])
    return found


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_threads_draw_what_one_thread_draws(n_threads: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_pool, "MIN_LOGITS", 0)
    chain = build_chain(SamplingParams(temperature=1.0, top_p=0.9, repeat_penalty=1.1, mirostat=0), TOKENIZER)
    drawer = SamplingPool(n_threads)
    one, others = some_draws(chain, n), some_draws(chain, n)
    for _ in range(3):
        expected, found = SamplingPool().draw(one, TOKENIZER.n_vocab), drawer.draw(others, TOKENIZER.n_vocab)
        assert [token if isinstance(token, int) else str(token) for token in found] == [
            token if isinstance(token, int) else str(token) for token in expected
        ]
        assert all(isinstance(token, InvalidRequestError) == (i == 3) for i, token in enumerate(found))
    assert [of._sampler.history for of in others] == [of._sampler.history for of in one]
    drawer.close()


class Meet(Sampler):
    """Sampler that waits for another thread to be in it too."""

    barrier = threading.Barrier(2, timeout=20)

    def apply(self, candidates: Candidates) -> None:
        self.barrier.wait()


def test_large_steps_are_shared_between_threads_and_small_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    drawer, chain = SamplingPool(2), SamplerChain([Meet(), RandomDraw()])
    monkeypatch.setattr(sampling_pool, "MIN_LOGITS", 2 * TOKENIZER.n_vocab)
    assert all(isinstance(token, int) for token in drawer.draw(some_draws(chain, 2), TOKENIZER.n_vocab))
    monkeypatch.setattr(sampling_pool, "MIN_LOGITS", 2 * TOKENIZER.n_vocab + 1)
    monkeypatch.setattr(Meet, "barrier", threading.Barrier(2, timeout=0.01))
    errors = drawer.draw(some_draws(chain, 2), TOKENIZER.n_vocab)
    assert all(isinstance(error, Exception) for error in errors), "one thread waits for the other in vain"
    drawer.close()


def test_end_tokens_are_not_accepted() -> None:
    logits = np.full(TOKENIZER.n_vocab, -1.0, np.float32)
    logits[2] = 5
    drawn = sequence(build_chain(SamplingParams(), TOKENIZER), 0)
    drawn.keep_logits(logits[None])
    assert SamplingPool().draw([drawn], TOKENIZER.n_vocab) == [2]
    assert drawn._sampler.history == []
