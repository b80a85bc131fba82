"""`Session.eval`: logits, splits, invalid arguments and progress."""

import itertools

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    ContextOverflowError,
    InvalidRequestError,
    Model,
    SamplingParams,
    Session,
)
from sessions import LONG, PROMPT, RANDOM, TOKENS, fresh, logits_after


def test_n_past_counts_and_logits_are_the_last_tokens(model: Model, session: Session) -> None:
    assert session.n_past == 0
    session.eval(PROMPT[:3])
    assert session.n_past == 3
    session.eval(PROMPT[3:])
    assert session.n_past == len(PROMPT)
    whole = model.create_session().eval(PROMPT, all_logits=True)
    assert whole.shape == (len(PROMPT), model.config.n_vocab)
    assert whole.dtype == session.logits.dtype == np.float32
    np.testing.assert_array_equal(session.logits, whole[-1])


def test_all_logits_leave_the_last_row_as_logits(session: Session) -> None:
    rows = session.eval(PROMPT, all_logits=True)
    np.testing.assert_array_equal(session.logits, rows[-1])
    session.sample(SamplingParams(temperature=0.5))
    assert not np.array_equal(session.logits, rows[-1]), "sampling must not reach into what eval returned"


def test_no_tokens_change_nothing(session: Session) -> None:
    assert session.eval([]) is None
    assert session.eval([], all_logits=True).shape == (0, 128)
    with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
        _ = session.logits
    session.eval(PROMPT)
    before = session.logits.copy()
    session.eval([])
    assert session.n_past == len(PROMPT)
    np.testing.assert_array_equal(session.logits, before)


@pytest.mark.parametrize("variant", ["gqa", "moe_8_2", "rope_yarn"])
def test_every_split_gives_the_same_logits(variant: str, load_tiny: LoadTiny) -> None:
    model, tokens = load_tiny(variant), PROMPT[:7]
    expected = model.create_session().eval(tokens, all_logits=True)
    for mask in itertools.product([False, True], repeat=len(tokens) - 1):
        cuts = [0, *(i + 1 for i, cut in enumerate(mask) if cut), len(tokens)]
        session = model.create_session(n_ctx=len(tokens))
        parts = [session.eval(tokens[a:b], all_logits=True) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(expected, np.concatenate(parts))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q5_0", "q4_1"])
def test_every_split_in_two_gives_the_same_logits(kv_type: str, model: Model) -> None:
    expected = model.create_session(kv_type=kv_type).eval(TOKENS, all_logits=True)
    for cut in range(1, len(TOKENS)):
        session = model.create_session(kv_type=kv_type)
        parts = [session.eval(TOKENS[:cut], all_logits=True), session.eval(TOKENS[cut:], all_logits=True)]
        np.testing.assert_array_equal(expected, np.concatenate(parts))


def test_token_by_token_gives_the_same_logits(model: Model) -> None:
    expected = model.create_session().eval(TOKENS, all_logits=True)
    session = model.create_session()
    for token, row in zip(TOKENS, expected, strict=True):
        session.eval([token])
        np.testing.assert_array_equal(row, session.logits)


def test_batches_beyond_the_largest_are_split(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.create_session().eval(TOKENS, all_logits=True)
    monkeypatch.setattr("llamacli.engine.batching.N_BATCH", 16)
    session = model.create_session()
    np.testing.assert_array_equal(expected, session.eval(TOKENS, all_logits=True))
    assert session.n_past == len(TOKENS)


def test_sessions_do_not_interact(model: Model) -> None:
    alone = logits_after(model, PROMPT)
    one, other = model.create_session(), model.create_session()
    for token, noise in zip(PROMPT, TOKENS, strict=False):
        one.eval([token])
        other.eval([noise, noise])
    assert (one.n_past, other.n_past) == (len(PROMPT), 2 * len(PROMPT))
    np.testing.assert_array_equal(one.logits, alone)
    draws = [model.create_session().generate(PROMPT, RANDOM, max_tokens=8) for _ in range(2)]
    interleaved = [(a.id, b.id) for a, b in zip(*draws, strict=True)]
    assert all(a == b for a, b in interleaved)


def test_numpy_ids(model: Model) -> None:
    session = model.create_session()
    session.eval(np.array(PROMPT))
    np.testing.assert_array_equal(session.logits, logits_after(model, PROMPT))


class TestRefusals:
    """Nothing is evaluated or written before all is checked."""

    @pytest.fixture
    def started(self, model: Model) -> Session:
        session = model.create_session(n_ctx=12)
        session.eval(PROMPT)
        return session

    def assert_unchanged(self, model: Model, session: Session, logits: np.ndarray) -> None:
        assert session.n_past == len(PROMPT)
        np.testing.assert_array_equal(session.logits, logits)
        session.eval([1, 2, 3, 4])
        np.testing.assert_array_equal(session.logits, logits_after(model, [*PROMPT, 1, 2, 3, 4]))

    def test_overflow(self, model: Model, started: Session) -> None:
        logits = started.logits.copy()
        kept = [started.cache.read(layer, len(PROMPT)) for layer in range(2)]
        with pytest.raises(
            ContextOverflowError, match="8 tokens in the context and 5 more do not fit into 12"
        ) as raised:
            started.eval([1, 2, 3, 4, 5])
        assert (raised.value.n_past, raised.value.n_tokens, raised.value.n_ctx) == (8, 5, 12)
        with pytest.raises(ContextOverflowError):
            started.generate([1, 2, 3, 4, 5])
        for layer, before in enumerate(kept):
            for was, now in zip(before, started.cache.read(layer, len(PROMPT)), strict=True):
                np.testing.assert_array_equal(now, was)
        self.assert_unchanged(model, started, logits)

    @pytest.mark.parametrize("bad", [-1, 128, 2**31, -(2**40), 1.0, True, None, "a"])
    def test_token_out_of_range(self, bad: object, model: Model, started: Session) -> None:
        logits = started.logits.copy()
        for call in (started.eval, started.generate):
            with pytest.raises(InvalidRequestError, match="at index 1 is not an id from 0 to 127"):
                call([1, bad])
        self.assert_unchanged(model, started, logits)

    def test_room_is_checked_again_when_generation_begins(self, model: Model, started: Session) -> None:
        generation = started.generate([1, 2, 3])
        started.eval([4, 5])
        with pytest.raises(ContextOverflowError):
            next(generation)
        assert started.n_past == 10

    def test_room_is_checked_again_after_every_token(self, started: Session) -> None:
        generation = started.generate([], ignore_eos=True)
        next(generation)
        started.eval([1, 2, 3, 4])
        with pytest.raises(ContextOverflowError):
            next(generation)

    def test_an_interrupt_leaves_the_position(self, model: Model, started: Session) -> None:
        logits = started.logits.copy()

        class Interrupting:
            states, has_encoder, prompts = model.program.states, False, model.program.prompts

            def forward(self, *_: object, **__: object) -> np.ndarray:
                garbage = np.full((2, 2, 16), np.nan, np.float32)
                for layer in range(2):
                    started.cache.write(layer, len(PROMPT), garbage, garbage)
                raise KeyboardInterrupt

        program, model._program = model.program, Interrupting()
        with pytest.raises(KeyboardInterrupt):
            started.eval([1, 2])
        model._program = program
        assert started.n_past == len(PROMPT)
        np.testing.assert_array_equal(started.logits, logits)


def test_progress_of_more_than_a_batch(load_tiny):
    seen = []
    with load_tiny() as model, model.create_session(n_ctx=1200, reuse=False) as session:
        session.progress = lambda done, total: seen.append((done, total))
        session.eval([1] * 512)
        session.eval([2])
        assert seen == []
        session.rewind(0)
        list(session.generate([1, 2] * 550, max_tokens=2))
    assert seen == [(0, 1100), (512, 1100), (1024, 1100), (1100, 1100)]


def test_stale_cells_are_dropped_before_eval(model: Model) -> None:
    cache = model.kv_cache(2, n_ctx_seq=128)
    for change in (
        lambda: cache.remove_range(0, 5, 10), cache.clear_all, cache.clear_metadata, lambda: cache.seq_keep(1),
        lambda: cache.state_load(0, fresh(model, LONG[50:70]).save_state()), lambda: cache.seq_cp(1, 0, 40),
    ):  # fmt: skip
        cache.clear_all()
        Session(model, sequence=cache.sequence(1)).eval(LONG[30:80])
        session = Session(model, sequence=cache.sequence(0))
        session.eval(LONG[:40])
        change()
        session.eval([5])
        np.testing.assert_array_equal(session.logits, fresh(model, [*LONG[:40], 5]).logits)


def test_sessions_over_a_numbered_cache(model: Model) -> None:
    with model.kv_cache(3, n_ctx_seq=64) as cache:
        session = Session(model, sequence=cache.sequence(0))
        session.eval(LONG[:40])
        cache.seq_cp(0, 2)
        other = Session(model, sequence=cache.sequence(2))
        other.eval(LONG[40:50])
        np.testing.assert_array_equal(other.logits, fresh(model, LONG[:50]).logits)
        cache.remove_range(2, 3, 20)
        assert [cache.pos_max(seq) for seq in range(3)] == [39, -1, 32]
        for wrong in (-1, 3, True, "0"):
            with pytest.raises(InvalidRequestError, match="is not one of 0 to 2"):
                cache.pos_max(wrong)
        with pytest.raises(InvalidRequestError, match="holds other tokens"):
            cache.seq_cp(0, 2)
