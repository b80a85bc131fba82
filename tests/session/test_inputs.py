"""Sessions of embeddings, explicit positions and bidirectional spans."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    ContextOverflowError,
    DraftModel,
    InvalidRequestError,
    Model,
    PromptLookup,
    SamplingParams,
    Session,
    StateError,
    eval_batch,
)
from llamacli.inputs import Inputs, is_positioned

BEFORE, AFTER = [5, 6, 7], [8, 9, 10, 11]
N = 6


def rows(model: Model, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, (N, model.config.n_embd)).astype(np.float32)


def embedded(model: Model, seed: int = 1, **more: Any) -> Inputs:
    return Inputs.of(embeddings=rows(model, seed), **more)


def spanned(model: Model, seed: int = 1) -> Inputs:
    return embedded(model, seed, spans=[(1, 5)])


def placed(model: Model, seed: int = 1) -> Inputs:
    grid = [[3, 3 + i // 3, 3 + i % 3, 0] for i in range(N)]
    return embedded(model, seed, positions=grid)


KINDS: dict[str, tuple[str, Callable[..., Inputs]]] = {
    "embeddings": ("gqa", embedded),
    "spans": ("gqa", spanned),
    "positions of three kinds": ("qwen2vl", placed),
    "embeddings with sliding windows": ("gemma3", embedded),
    "embeddings with recurrent states": ("qwen3next", embedded),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, load_tiny: LoadTiny) -> tuple[Model, Callable[..., Inputs]]:
    variant, make = KINDS[request.param]
    return load_tiny(variant), make


def expected(model: Model, *parts: Inputs | list[int]) -> np.ndarray:
    """Logits after the parts, of a session that has nothing from others."""
    with model.create_session(reuse=False) as session:
        for part in parts:
            session.eval(part)
        return session.logits.copy()


Kind = tuple[Model, Callable[..., Inputs]]


def test_forks_rewinds_and_prefixes_give_the_same_logits(kind: Kind) -> None:
    model, make = kind
    one, other = make(model), make(model, 2)
    after_one, after_other = expected(model, BEFORE, one, AFTER), expected(model, BEFORE, other, AFTER)
    assert not np.array_equal(after_one, after_other)
    with model.create_session() as session, model.create_session() as second:
        session.eval(BEFORE)
        session.eval(one)
        fork = session.fork()
        session.eval(AFTER)
        np.testing.assert_array_equal(session.logits, after_one)
        session.rewind(len(BEFORE))
        session.eval(other)
        session.eval(AFTER)
        np.testing.assert_array_equal(session.logits, after_other)
        fork.eval(AFTER)
        np.testing.assert_array_equal(fork.logits, after_one)
        fork.rewind(len(BEFORE) + N)
        fork.eval(AFTER)
        np.testing.assert_array_equal(fork.logits, after_one)
        fork.close()
        second.eval(BEFORE)
        second.eval(make(model))
        if not (model.program.recurrent or any(group.evicts for group in model.kv_pool().layout.groups)):
            assert second.n_reused > 0, "equal embeddings are the same prefix"
        second.eval(AFTER)
        np.testing.assert_array_equal(second.logits, after_one)
        assert second.tokens == (*BEFORE, *one.keys, *AFTER)


def test_states_are_saved_with_their_contents(kind: Kind, tmp_path: Path) -> None:
    model, make = kind
    with model.create_session(seed=7) as session:
        session.eval(BEFORE)
        session.eval(make(model))
        session.eval(AFTER)
        session.save(tmp_path / "state")
        data = session.save_state()
        whole = [token.id for token in session.generate([], max_tokens=5, ignore_eos=True)]
    for n in (len(BEFORE) + N + 2, 1):
        with model.create_session() as session:
            session.load(tmp_path / "state")
            assert [token.id for token in session.generate([], max_tokens=5, ignore_eos=True)] == whole
            session.load_state(data)
            session.rewind(n)
            wanted = expected(model, BEFORE, make(model), AFTER[:2]) if n > 1 else expected(model, BEFORE[:1])
            session.cache.truncate(0)
            session.eval([12])
            parts = [BEFORE, make(model), AFTER[:2], [12]] if n > 1 else [BEFORE[:1], [12]]
            np.testing.assert_array_equal(session.logits, expected(model, *parts))
            assert len(wanted)


def test_batches_and_text_after_inputs(kind: Kind) -> None:
    model, make = kind
    with model.create_session() as one, model.create_session() as two:
        eval_batch([(one, make(model)), (two, BEFORE)])
        eval_batch([(one, AFTER), (two, make(model, 2))])
        np.testing.assert_array_equal(one.logits, expected(model, make(model), AFTER))
        np.testing.assert_array_equal(two.logits, expected(model, BEFORE, make(model, 2)))
        ids = [token.id for token in one.generate([], max_tokens=4, ignore_eos=True)]
        np.testing.assert_array_equal(one.logits, expected(model, make(model), [*AFTER, *ids]))


def test_prompts_of_generate_and_drafts(kind: Kind) -> None:
    model, make = kind
    prompt = make(model)
    params = SamplingParams(temperature=0.7)
    with model.create_session(seed=3) as session:
        session.eval(BEFORE)
        plain = [token.id for token in session.generate(prompt, params, max_tokens=30, ignore_eos=True)]
    for drafter in (PromptLookup(min_ngram=1), DraftModel(model, 4, min_probability=0.0)):
        with model.create_session(seed=3) as session:
            session.eval(BEFORE)
            drafted = session.generate(prompt, params, max_tokens=30, ignore_eos=True, speculate=drafter)
            assert [token.id for token in drafted] == plain


def test_positions_of_several_components_end_at_the_largest(load_tiny: LoadTiny) -> None:
    model = load_tiny("qwen2vl")
    with model.create_session() as session:
        session.eval(BEFORE)
        session.eval(placed(model))
        assert (session.n_past, session.pos_max) == (len(BEFORE) + N, 5)
        session.eval([8])
        assert session.pos_max == 6


def unchanged(session: Session) -> tuple[Any, ...]:
    return session.tokens, session.n_cached, session.logits.tobytes(), list(session.cache.tokens)


def test_wrong_inputs_leave_the_session_as_it_was(load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa")
    with model.create_session(n_ctx=32) as session:
        session.eval(BEFORE)
        session.eval(spanned(model))
        before = unchanged(session)
        table, n_embd = rows(model), model.config.n_embd
        key = {"embeddings": table, "keys": list(range(N))}
        wrong: list[tuple[str, Callable[[], object]]] = [
            (f"rows of {n_embd - 1} numbers", lambda: session.eval(Inputs.of(embeddings=table[:, 1:]))),
            ("NaN, infinite", lambda: session.eval(Inputs.of(embeddings=table * np.inf))),
            ("is not behind", lambda: session.eval(Inputs.of([5], positions=[2]))),
            ("one position a token", lambda: session.eval(Inputs.of([5], positions=[[9, 9, 9]]))),
            ("is not an id", lambda: session.eval(Inputs.of([model.config.n_vocab], positions=[20]))),
            ("within the span of tokens", lambda: session.rewind(len(BEFORE) + 3)),
            ("cannot move up", lambda: session.remove_range(0, 1)),
            ("is that of another content", lambda: session.eval(
                Inputs.of(embeddings=np.concatenate([table[:1], table[1:2]]), keys=[4, 4]))),
        ]  # fmt: skip
        for message, call in wrong:
            with pytest.raises(InvalidRequestError, match=message):
                call()
            assert unchanged(session) == before, message
        with pytest.raises(ContextOverflowError):
            session.eval(Inputs.of(embeddings=np.zeros((40, n_embd))))
        assert unchanged(session) == before
        session.eval(Inputs.of(**key))
        with pytest.raises(InvalidRequestError, match="is that of another content"):
            session.eval(Inputs.of(embeddings=table[::-1], keys=list(range(N))))


def test_states_without_their_contents_are_refused(load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa")
    with model.create_session() as session:
        session.eval(embedded(model))
        session._contents.save = lambda keys: ({}, [])  # type: ignore[method-assign]
        data = session.save_state()
        with pytest.raises(StateError, match="lacks the content"):
            session.load_state(data)


def test_completions_of_embeddings(load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa", tokenizer="spm")
    prompt = embedded(model)
    with model.create_session() as session:
        text = "".join(token.piece for token in session.generate(prompt, max_tokens=6))
    result = model.create_completion(prompt, max_tokens=6, temperature=0.0)
    assert result["choices"][0]["text"] == text
    assert result["usage"]["prompt_tokens"] == N
    with pytest.raises(InvalidRequestError, match="echo and suffix need a prompt of text or token ids"):
        model.create_completion(prompt, echo=True)


def test_positions_of_decode_steps_look_back_once(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the keys that each step after an image looks at."""
    model, looked_at = load_tiny("qwen2vl"), list[int]()

    def counted(key: int) -> bool:
        looked_at.append(key)
        return is_positioned(key)

    monkeypatch.setattr("llamacli.inputs.is_positioned", counted)
    with model.create_session() as session, model.create_session() as other:
        for text in (session, other):
            text.eval(BEFORE)
            text.eval(placed(model))
        session.eval(AFTER * 4)
        looked_at.clear()
        for token in AFTER * 4:
            session.eval([token])
        assert len(looked_at) < 6 * len(AFTER) + session.n_past
        session.rewind(session.n_past - 4 * len(AFTER) - 2)
        session.eval([9])
        session.rewind(len(BEFORE) + N)
        for token in AFTER:
            session.eval([token])
        other.eval(AFTER)
        np.testing.assert_array_equal(session.logits, other.logits)
        assert session.pos_max == other.pos_max
