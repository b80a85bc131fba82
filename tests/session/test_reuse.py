"""Prefix caching between sessions, and checkpoints of sliding windows."""

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    Model,
    eval_batch,
)
from sessions import LONG, fresh


def test_common_prefix_is_shared(model: Model) -> None:
    first, second = model.create_session(), model.create_session()
    first.eval(LONG[:60])
    list(second.generate([*LONG[:40], 1, 2, 3], max_tokens=1))
    assert (second.stats.n_prompt, second.stats.n_reused) == (43, 40)
    shared = set(first.cache.tables[0][:2]) & set(second.cache.tables[0])
    assert len(shared) == 2, "whole pages are shared"
    second.rewind(43)
    second.eval([4])
    np.testing.assert_array_equal(second.logits, fresh(model, [*LONG[:40], 1, 2, 3, 4]).logits)
    first.eval(LONG[60:])
    np.testing.assert_array_equal(first.logits, fresh(model, LONG).logits)


def test_the_last_token_is_always_evaluated(model: Model) -> None:
    first, second = model.create_session(), model.create_session()
    for session in (first, second):
        session.eval(LONG[:33])
    assert second.n_reused == 32
    np.testing.assert_array_equal(first.logits, second.logits)


def test_closed_sessions_are_kept_within_the_size_limit(model: Model) -> None:
    def run(tokens: list[int]) -> int:
        with model.create_session() as session:
            session.eval(tokens)
            return session.n_reused

    others = [[token ^ number for token in LONG[:48]] for number in range(1, 5)]
    assert [run(tokens) for tokens in others] == [0] * 4
    assert [run(tokens) for tokens in others] == [47] * 4
    index = model.prefixes(model.create_session().cache.kv_type, 256)
    model.prefix_cache_bytes = index.n_bytes // 2
    assert run(others[3]) == 47
    run(LONG[:48])
    assert index.n_bytes <= model.prefix_cache_bytes
    assert run(others[0]) == 0, "the least recently used went"
    model.prefix_cache_bytes = 0
    pool = model.kv_pool()
    index.clear()
    assert pool.n_used_bytes == 0
    run(LONG)
    assert pool.n_used_bytes == 0


def test_interrupt_drops_reused_cells(model: Model) -> None:
    first, second = model.create_session(), model.create_session()
    second.eval(LONG[:3])
    first.eval(LONG[:50])
    program = model.program

    class Interrupting:
        has_encoder, prompts = False, program.prompts

        def forward(*_: object, **__: object) -> np.ndarray:
            raise KeyboardInterrupt

    model._program = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        second.eval(LONG[3:20])
    model._program = program
    assert second.tokens == tuple(LONG[:3]) == tuple(second.cache.tokens)
    assert second.n_reused == 0
    second.eval([9, 9])
    np.testing.assert_array_equal(second.logits, fresh(model, [*LONG[:3], 9, 9]).logits)


def test_cache_types_do_not_share(model: Model) -> None:
    first, second = model.create_session(kv_type="f32"), model.create_session(kv_type="f16")
    first.eval(LONG[:30])
    second.eval(LONG[:30])
    assert second.n_reused == 0


@pytest.fixture
def windowed(load_tiny: LoadTiny) -> Model:
    return load_tiny("gemma3", n_layer=6, context_length=400)


def test_checkpoint_of_a_prompt_is_found_after_its_session_went_on(windowed: Model) -> None:
    with windowed.create_session() as first:
        list(first.generate(LONG, max_tokens=60, ignore_eos=True))
        for more in ([], [5, 6, 7]):
            with windowed.create_session() as second:
                list(second.generate([*LONG, *more], max_tokens=1, ignore_eos=True))
                assert (second.stats.n_prompt, second.stats.n_reused) == (100 + len(more), 99 + bool(more))
                second.rewind(100 + len(more))
                second.eval([9])
                np.testing.assert_array_equal(second.logits, fresh(windowed, [*LONG, *more, 9]).logits)


def test_checkpoints_are_bounded(windowed: Model) -> None:
    session = windowed.create_session()
    windowed.prefix_cache_bytes = 0
    session.eval(LONG)
    window = session.cache.pool.groups[0]
    assert window.n_used <= 2
    windowed.prefix_cache_bytes = 1 << 20
    session.eval(LONG)
    session.eval(LONG)
    assert windowed.prefixes(session.cache.kv_type, 400).n_bytes <= 1 << 20


@pytest.mark.parametrize("variant", ["gemma3", "gemma4_e", "gptoss_gqa", "phi3_long", "qwen3_gqa"])
def test_sharing_saving_and_batching_keep_logits_bit_equal(variant: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(variant, "fp32")
    n_vocab = model.config.n_vocab
    tokens = [token % n_vocab for token in LONG[:60]]
    expected = fresh(model, tokens).logits
    first = model.create_session()
    first.eval(tokens[:50])
    second = model.create_session()
    second.eval(tokens[:50])
    assert second.n_reused == 49
    third = model.create_session(reuse=False)
    third.load_state(first.save_state())
    sessions = [first, second, third, first.fork()]
    eval_batch((session, tokens[50:]) for session in sessions)
    for session in sessions:
        np.testing.assert_array_equal(session.logits, expected)


def test_counts_of_cached_and_computed_tokens(model: Model) -> None:
    session = fresh(model, LONG[:30])
    assert (session.n_cached, session.n_computed) == (30, 30)
    session.cache.truncate(20)
    assert (session.n_past, session.n_cached) == (30, 20)
    session.eval([5])
    assert (session.n_cached, session.n_computed) == (31, 41)
    with model.create_session() as first, model.create_session() as second:
        first.eval(LONG[:30])
        second.eval(LONG[:40])
        assert (second.n_cached, second.n_reused, second.n_computed) == (40, 30, 10)
