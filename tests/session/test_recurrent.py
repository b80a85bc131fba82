"""Sessions of models with recurrent states."""

from collections.abc import Sequence

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import InvalidRequestError, Model, OutOfMemoryError, Session, StateError
from llamacli.engine import batching
from llamacli.generation.stream import eval_batch
from llamacli.kv import pool as kv_pool
from sessions import LONG, fresh
from suite import slow_but

TOKENS = LONG[:90]


@pytest.fixture(params=["qwen35", "qwen3next"])
def hybrid(request: pytest.FixtureRequest, load_tiny: LoadTiny) -> Model:
    return load_tiny(request.param)


def expect_logits(session: Session, tokens: Sequence[int]) -> None:
    """Compare the logits with those of a new session."""
    assert session.tokens == tuple(tokens)
    with fresh(session.model, list(tokens)) as other:
        np.testing.assert_array_equal(session.logits, other.logits)


@pytest.mark.parametrize("sizes", [(1, 89), (89, 1), (16, 17, 33, 24), (2,) * 45])
def test_a_prompt_in_pieces_equals_the_whole(hybrid: Model, sizes: tuple[int, ...]) -> None:
    session, start = hybrid.create_session(reuse=False), 0
    for size in sizes:
        session.eval(TOKENS[start : start + size])
        start += size
    expect_logits(session, TOKENS)


def test_a_batch_of_ragged_sequences_equals_each_alone(hybrid: Model) -> None:
    sessions = [hybrid.create_session() for _ in range(3)]
    pieces = [[TOKENS[:40], TOKENS[7:8], TOKENS[3:20]], [TOKENS[40:41], TOKENS[8:60], TOKENS[20:21]]]
    for parts in pieces:
        eval_batch(zip(sessions, parts, strict=True))
    for i, session in enumerate(sessions):
        expect_logits(session, pieces[0][i] + pieces[1][i])


def test_batches_of_a_long_prompt_hand_the_state_on(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fresh(hybrid, TOKENS).logits
    monkeypatch.setattr(batching, "N_BATCH", 16)
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS)
    np.testing.assert_array_equal(session.logits, whole)


@pytest.mark.parametrize("n", slow_but([0, 1, 12, 17, 24, 27, 30], sorted({*range(0, 31, 3), 1, 17})))
def test_rewind_gives_what_a_new_session_gives(hybrid: Model, n: int) -> None:
    session = hybrid.create_session()
    session.eval(TOKENS[:12])
    session.eval(TOKENS[12:24])
    for token in TOKENS[24:30]:
        session.eval([token])
    session.rewind(n)
    session.eval([5, 6])
    expect_logits(session, [*TOKENS[:n], 5, 6])


def test_rewind_computes_from_the_nearest_checkpoint(hybrid: Model) -> None:
    session = hybrid.create_session()
    session.eval(TOKENS[:40])
    session.eval(TOKENS[40:70])
    session.rewind(65)
    before = session.n_computed
    session.eval([1, 2])
    assert session.n_computed - before == 27, "tokens 40 to 66: the end of the first prompt is the checkpoint"
    expect_logits(session, [*TOKENS[:65], 1, 2])


def test_an_equal_prompt_costs_a_token(hybrid: Model) -> None:
    with hybrid.create_session() as first:
        first.eval(TOKENS)
        expected = first.logits.copy()
        second = hybrid.create_session()
        second.eval(TOKENS)
        assert (second.n_reused, second.n_computed) == (len(TOKENS) - 1, 1)
        np.testing.assert_array_equal(second.logits, expected)
    third = hybrid.create_session()
    third.eval([*TOKENS, 1, 2])
    assert third.n_computed == 2
    expect_logits(third, [*TOKENS, 1, 2])


def test_long_prompts_have_checkpoints_within(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "N_BATCH", 16)
    monkeypatch.setattr(batching, "CHECKPOINT_TOKENS", 32)
    hybrid.create_session().eval(TOKENS)
    session = hybrid.create_session()
    session.eval([*TOKENS[:70], 3, 4])
    assert session.n_reused == 64
    expect_logits(session, [*TOKENS[:70], 3, 4])


def test_forks_go_on_by_themselves(hybrid: Model) -> None:
    one = hybrid.create_session()
    one.eval(TOKENS[:20])
    two = one.fork()
    eval_batch([(one, TOKENS[20:25]), (two, [9])])
    expect_logits(one, TOKENS[:25])
    expect_logits(two, [*TOKENS[:20], 9])
    two.eval(TOKENS[30:40])
    one.close()
    expect_logits(two, [*TOKENS[:20], 9, *TOKENS[30:40]])


def test_saved_states_continue_bit_for_bit(hybrid: Model) -> None:
    one, two = hybrid.create_session(), hybrid.create_session(reuse=False)
    one.eval(TOKENS[:33])
    state = one.save_state()
    two.eval([1, 2, 3])
    two.load_state(state)
    np.testing.assert_array_equal(two.logits, one.logits)
    two.eval(TOKENS[33:40])
    assert two.n_computed == 3 + 7
    expect_logits(two, TOKENS[:40])


def test_states_of_other_shapes_are_refused(load_tiny: LoadTiny) -> None:
    one, two = (load_tiny("qwen35", n_head_v=n) for n in (4, 2))
    two.identity = one.identity  # as if the digest did not tell
    session = one.create_session()
    session.eval([1, 2])
    with pytest.raises(StateError, match="layers differ"):
        two.create_session().load_state(session.save_state())


def test_tokens_removed_from_the_middle_are_evaluated_again(hybrid: Model) -> None:
    session = hybrid.create_session()
    session.eval(TOKENS[:30])
    session.remove_range(10, 20)
    assert session.n_cached == 0
    session.eval([4])
    expect_logits(session, [*TOKENS[:10], *TOKENS[20:30], 4])


def test_numbered_sequences_are_copied_whole_or_refused(hybrid: Model) -> None:
    with hybrid.kv_cache(3, n_ctx_seq=64) as cache:
        session = Session(hybrid, sequence=cache.sequence(0))
        session.eval(TOKENS[:20])
        for refused in (
            lambda: cache.remove_range(0, 5, 10),
            lambda: cache.remove_range(0, 5),
            lambda: cache.seq_cp(0, 1, 0, 10),
        ):
            with pytest.raises(InvalidRequestError, match="recurrent states"):
                refused()
        assert cache.pos_max(0) == 19
        cache.seq_cp(0, 1)
        other = Session(hybrid, sequence=cache.sequence(1))
        other.eval([7])
        expect_logits(other, [*TOKENS[:20], 7])
        cache.remove_range(0)
        assert cache.pos_max(0) == -1


def test_memory_is_counted_and_returned(hybrid: Model) -> None:
    pool = hybrid.kv_pool()
    state = pool.layout.groups[-1].page_bytes
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS[:5])
    session.eval(TOKENS[5:9])
    cells = sum(pages.page_bytes for pages in pool.groups[:-1])
    assert pool.n_used_bytes == cells + 2 * state, "the state and a spare page"
    assert session.cache.n_bytes >= 4 * state
    session.close()
    assert pool.n_used_bytes == 0


def test_checkpoints_stay_within_the_limit(hybrid: Model) -> None:
    state = hybrid.kv_pool().layout.groups[-1].page_bytes
    assert hybrid.prefix_cache_bytes >= 8 * state
    hybrid.prefix_cache_bytes = 40 * (state + hybrid.kv_pool().groups[0].page_bytes)
    session = hybrid.create_session()
    for i in range(0, 88, 2):
        session.eval(TOKENS[i : i + 2])
    kept = hybrid.prefixes(session.cache.kv_type, session.n_ctx)
    assert kept.n_bytes <= hybrid.prefix_cache_bytes
    session.rewind(80)
    session.eval([1])
    assert session.n_computed < 88 + 12, "recent checkpoints are near one another"
    session.rewind(20)
    before = session.n_computed
    session.eval([1])
    assert session.n_computed - before < 21, "an old checkpoint is left"


def test_memory_that_ends_changes_nothing(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = hybrid.create_session()
    session.eval(TOKENS[:20])
    expected = session.logits.copy()

    def refuse(*_: object, **__: object) -> None:
        raise OutOfMemoryError(1, 0)

    with monkeypatch.context() as patch:
        patch.setattr(kv_pool.Pages, "allocate", refuse)
        patch.setattr(kv_pool.Pages, "copy_on_write", refuse)
        with pytest.raises(OutOfMemoryError):
            session.eval(TOKENS[20:60])
    assert session.tokens == tuple(TOKENS[:20])
    np.testing.assert_array_equal(session.logits, expected)
    session.eval(TOKENS[20:25])
    assert session.n_computed == 25, "the state was not lost"
    expect_logits(session, TOKENS[:25])


@pytest.mark.parametrize("n_right", range(5))
@pytest.mark.parametrize("n_batch", [4, 7, 512])
def test_drafts_are_dropped_from_where_they_are_wrong(
    hybrid: Model, n_right: int, n_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop drafts again and again.

    With small batches, the states to go back to are those within another batch than the last.
    """
    monkeypatch.setattr(batching, "N_BATCH", n_batch)
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS[:20])
    for start in range(20, 50, 6):
        draft = [*TOKENS[start + 1 : start + 1 + n_right], *[3] * (4 - n_right)]
        session.eval_ahead(TOKENS[start], draft)
        for i, token in enumerate(TOKENS[start + 1 : start + 6]):
            assert session.is_ahead(token) == (i < n_right)
            session.eval([token])
    expect_logits(session, TOKENS[:50])
    n_again = n_right if n_right < 4 else 0
    assert session.n_computed == 50 + 5 * (4 - n_right + n_again)


def test_drafts_take_a_page_of_states(hybrid: Model) -> None:
    pool = hybrid.kv_pool()
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS[:5])
    cells = sum(pages.page_bytes for pages in pool.groups[:-1])
    for token in TOKENS[5:9]:
        session.eval_ahead(token, [3, 4])
        assert pool.n_used_bytes == cells + 3 * pool.layout.groups[-1].page_bytes
    expect_logits(session, TOKENS[:9])
    session.rewind(0)
    session.eval(TOKENS[:3])
    assert pool.n_used_bytes == cells + pool.layout.groups[-1].page_bytes
    session.close()
    assert pool.n_used_bytes == 0


def test_states_can_be_held_and_returned_to(hybrid: Model) -> None:
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS[:20])
    for end in (23, 25):
        session.cache.hold()
        for token in TOKENS[20:end]:
            session.eval([token])
        before = session.n_computed
        session.rewind(20)
        session.eval([7])
        assert session.n_computed == before + 1
        expect_logits(session, [*TOKENS[:20], 7])
        session.rewind(0)
        session.eval(TOKENS[:20])
    session.cache.hold()
    session.eval(TOKENS[20:30])
    session.cache.hold()
    session.eval([5])
    session.rewind(29)
    session.eval([6])
    expect_logits(session, [*TOKENS[:29], 6])


def test_forks_have_no_drafts(hybrid: Model) -> None:
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS[:20])
    session.eval_ahead(TOKENS[20], TOKENS[21:24])
    session.eval(TOKENS[21:22])
    fork = session.fork()
    fork.eval([9])
    expect_logits(fork, [*TOKENS[:22], 9])
    session.eval(TOKENS[22:23])
    session.eval([8])
    expect_logits(session, [*TOKENS[:23], 8])


def test_memory_that_ends_in_a_draft_changes_nothing(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = hybrid.create_session(reuse=False)
    session.eval(TOKENS[:20])
    pool = hybrid.kv_pool()
    monkeypatch.setattr(pool, "max_bytes", pool.n_used_bytes)
    with pytest.raises(OutOfMemoryError):
        session.eval_ahead(TOKENS[20], TOKENS[21:24])
    monkeypatch.setattr(pool, "max_bytes", None)
    session.eval_ahead(TOKENS[20], TOKENS[21:24])
    assert session.n_computed == 24
    session.eval([9])
    expect_logits(session, [*TOKENS[:21], 9])
