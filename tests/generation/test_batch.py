"""`Model.generate`: several prompts at once."""

from typing import Any

import pytest

from conftest import LoadTiny
from llamacli import ContextOverflowError, InvalidRequestError, Model, SamplingParams
from sessions import RANDOM

TEXTS = ["a b", "b", "", "a b c a b c a b c", "a b"]


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa", tokenizer="spm", context_length=64)


@pytest.mark.parametrize("n_parallel", [1, 3, 16])
@pytest.mark.parametrize("params", [None, RANDOM, SamplingParams(temperature=1.5, repeat_penalty=1.3, stop=["e", "o"])])
@pytest.mark.parametrize("max_tokens", [5, 80])
def test_equals_generate_of_each(model: Model, n_parallel: int, params: Any, max_tokens: int) -> None:
    made = model.generate(TEXTS, params, max_tokens=max_tokens, seed=7, n_parallel=n_parallel)
    assert len(made) == len(TEXTS)
    for text, found in zip(TEXTS, made, strict=True):
        with model.create_session(seed=7) as session:
            tokens = list(session.generate(text, params, max_tokens=max_tokens))
            assert found.text == "".join(token.piece for token in tokens)
            assert found.tokens[: len(tokens)] == tuple(token.id for token in tokens)
            is_long = not session.stop_string and (len(tokens) == max_tokens or session.n_past == session.n_ctx)
            assert found.finish_reason == ("length" if is_long else "stop")


def test_nothing_to_do(model: Model) -> None:
    assert model.generate([]) == []
    (found,) = model.generate(["a"], max_tokens=0)
    assert (found.text, found.tokens) == ("", ())


def test_memory_is_freed(model: Model) -> None:
    model.prefix_cache_bytes = 0
    model.generate(TEXTS, max_tokens=4)
    assert model.kv_pool().n_bytes == 0


def test_errors(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="put a single text into a list"):
        model.generate("a b")
    with pytest.raises(
        InvalidRequestError, match="max_tokens must be an integer of at least 0, or None or -1 for no limit, not -2"
    ):
        model.generate(["a"], max_tokens=-2)
    with pytest.raises(InvalidRequestError, match="n_parallel must be an integer of at least 1, not 0"):
        model.generate(["a"], n_parallel=0)
    with pytest.raises(ContextOverflowError, match="65 more do not fit into 64"):
        model.generate([[5] * 65])
    with pytest.raises(InvalidRequestError, match="token 999999 at index 0 is not an id from 0"):
        model.generate([[999999]])
