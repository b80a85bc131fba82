"""Sampling in sessions."""

import threading
from pathlib import Path

import numpy as np
import pytest

from candidates import exact_softmax
from conftest import LoadTiny, TinyGguf
from llamacli import InvalidRequestError, SamplingParams, load_model
from llamacli.plugins import Plugins
from llamacli.sampling import Draw, Greedy, MinP, SamplerChain, Temperature, TopK

PROMPT = [3, 14, 15, 92, 65, 35]


def test_custom_chain(load_tiny: LoadTiny) -> None:
    params = SamplingParams(temperature=1.3, top_k=9, min_p=0.01, samplers=("top_k", "min_p", "temperature"))
    chain = SamplerChain([TopK(9), MinP(0.01), Temperature(1.3), Draw()])
    texts = []
    with load_tiny() as model:
        for way in (params, chain, None, SamplerChain([Greedy()])):
            with model.create_session(seed=6) as session:
                texts.append([token.id for token in session.generate(PROMPT, way, max_tokens=20)])
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_log_probabilities_of_generated_tokens(load_tiny: LoadTiny) -> None:
    params = SamplingParams(temperature=1.5, repeat_penalty=1.5, n_probs=4)
    with load_tiny() as model, model.create_session() as session, model.create_session() as other:
        tokens = list(session.generate(PROMPT, params, max_tokens=6))
        other.eval(PROMPT)
        for token in tokens:
            exact = np.log(exact_softmax(other.logits))
            assert token.logprobs.chosen == pytest.approx(exact[token.id], abs=1e-6)
            assert [i for i, _ in token.logprobs.top] == np.argsort(-exact)[:4].tolist()
            other.eval([token.id])
        assert next(session.generate([], SamplingParams(), max_tokens=1)).logprobs is None


def test_the_number_of_threads_changes_no_token(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path: Path = tiny_gguf("gqa")
    params = SamplingParams(temperature=1.2, top_p=0.95, xtc_probability=0.3, repeat_penalty=1.1, dry_multiplier=0.5)
    texts = []
    for threads in (1, 2):
        with load_model(path, threads=threads, plugins=plugins) as model, model.create_session(seed=11) as session:
            texts.append([token.id for token in session.generate(PROMPT, params, max_tokens=60)])
    assert texts[0] == texts[1]
    assert len({*texts[0]}) > 10


def test_parameters_can_be_set_once(load_tiny: LoadTiny) -> None:
    third = SamplingParams(logit_bias={3: np.inf})
    with load_tiny() as model, model.create_session() as session:
        session.eval(PROMPT)
        assert session.params == SamplingParams()
        with pytest.raises(InvalidRequestError, match="top_k"):
            session.params = SamplingParams(samplers=("top_k", "no such"))
        assert session.draw() == session.logits.argmax() != 3
        session.params = third
        assert session.draw() == session.fork().draw() == 3
        assert session.legal().ids.tolist() == [3]
        assert session.draw(SamplingParams()) == session.logits.argmax(), "a call's own are for that call"
        assert len(session.legal(SamplingParams())) == model.config.n_vocab
        assert [session.sample(), *(token.id for token in session.generate([], max_tokens=2))] == [3, 3, 3]


def test_numpy_token_ids_can_be_accepted_and_saved(load_tiny: LoadTiny) -> None:
    with load_tiny() as model, model.create_session() as session:
        session.eval(PROMPT)
        session.accept(np.argmax(session.logits))
        session.load_state(session.save_state())
        assert session.tokens == tuple(PROMPT)


@pytest.mark.parametrize("act", ["draw", "sample", "legal", "accept"])
def test_concurrent_draws_are_serialised(load_tiny: LoadTiny, act: str) -> None:
    with load_tiny() as model, model.create_session() as session:
        session.eval(PROMPT)
        thread = threading.Thread(target=getattr(session, act), args=[3] if act == "accept" else [])
        with session.lock:
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join(60)
        assert not thread.is_alive()
