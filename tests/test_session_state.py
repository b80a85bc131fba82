"""What sessions do with their state: cut it, share it, do without it, evaluate it together."""

import gc
import threading

import numpy as np
import pytest

import naive
from conftest import LoadTiny
from llamacli import InvalidRequestError, Model, SamplingParams
from llamacli.kv import CacheStrategy, OutOfMemoryError
from llamacli.session import Session, eval_batch

LONG = np.random.RandomState(7).randint(0, 128, 100).tolist()
RANDOM = SamplingParams(temp=1.0, top_k=40)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


def fresh(model: Model, tokens: list[int], **options: object) -> Session:
    session = model.create_session(reuse=False, **options)
    session.eval(tokens)
    return session


class TestCuts:
    @pytest.mark.parametrize("variant", ["gqa", "rope_yarn", "rope_linear", "rope_freqs"])
    def test_keys_behind_a_cut_are_those_of_their_new_positions(self, variant: str, load_tiny: LoadTiny) -> None:
        model = load_tiny(variant)
        session = fresh(model, LONG[:50])
        logits = session.logits.copy()
        session.remove_range(5, 23)
        rest = LONG[:5] + LONG[23:50]
        assert (session.n_past, session.pos_max, session.tokens) == (32, 31, tuple(rest))
        np.testing.assert_array_equal(session.logits, logits)
        # Keys and values of the first layer depend on a token and its position alone.
        for mine, expected in zip(session.cache.read(0, 32), fresh(model, rest).cache.read(0, 32), strict=True):
            assert naive.nmse(mine, expected) < 1e-9
        session.eval([1, 2, 3])
        assert session.n_past == 35

    def test_a_cut_at_the_end_is_a_rewind(self, model: Model) -> None:
        session = fresh(model, LONG[:30])
        session.remove_range(20)
        session.eval(LONG[20:40])
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:40]).logits)

    @pytest.mark.parametrize(("p0", "p1"), [(-1, 3), (5, 4), (0, 31), (31, -1), (0, -2), (True, 3), (1.0, 3)])
    def test_ranges_that_are_not_there(self, p0: object, p1: object, model: Model) -> None:
        session = fresh(model, LONG[:30])
        with pytest.raises(InvalidRequestError, match="positions"):
            session.remove_range(p0, p1)
        session.eval(LONG[30:40])
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:40]).logits)

    def test_reseeding_begins_anew_with_both_ends(self, model: Model) -> None:
        session = fresh(model, LONG, seq_len=128)
        session.clear_and_reseed(LONG[:4], LONG[-20:])
        assert session.pos_max == 23
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:4] + LONG[-20:]).logits)
        with pytest.raises(InvalidRequestError, match="neither"):
            session.clear_and_reseed([], [])
        assert session.pos_max == 23


class TestStrategies:
    @pytest.mark.parametrize("strategy", CacheStrategy)
    def test_no_strategy_changes_logits(self, strategy: CacheStrategy, model: Model) -> None:
        session = model.create_session(strategy=strategy, reuse=False)
        for start in (0, 7, 8, 9):
            session.eval(LONG[start : start + 7] if start == 0 else LONG[start - 0 : start + 1])
            tokens = list(session.tokens)
            np.testing.assert_array_equal(session.logits, fresh(model, tokens).logits)
            held = 0 if strategy in ("disabled", "long_sequence_only") else len(tokens)
            assert len(session.cache.tokens) == held
        if strategy == "disabled":
            assert not any(table.any() for table in session.cache.tables)

    def test_long_sequences_only(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llamacli.kv.strategies.LONG_SEQUENCE", 20)
        session = model.create_session(strategy="long_sequence_only", reuse=False)
        held = []
        for token in LONG[:24]:
            session.eval([token])
            held.append(len(session.cache.tokens))
        assert held == [0] * 20 + [21, 22, 23, 24]
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:24]).logits)

    def test_unknown(self, model: Model) -> None:
        with pytest.raises(InvalidRequestError, match="'never' is not one of always"):
            model.create_session(strategy="never")

    def test_out_of_memory_names_both_figures(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        session = model.create_session()
        monkeypatch.setattr("llamacli.kv.pool.available", lambda: 1000)
        with pytest.raises(OutOfMemoryError, match=r"needs \d+ bytes more, and 1000 are available") as raised:
            session.eval(LONG[:3])
        assert isinstance(raised.value, MemoryError)
        monkeypatch.undo()
        session.eval(LONG[:3])
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:3]).logits)


class TestForks:
    def test_a_fork_draws_what_its_parent_would(self, model: Model) -> None:
        session = fresh(model, LONG[:20])
        [session.sample(RANDOM) for _ in range(3)]
        child = session.fork()
        np.testing.assert_array_equal(child.logits, session.logits)
        drawn = [[token.id for token in one.generate([], RANDOM, max_tokens=10)] for one in (child, session)]
        assert drawn[0] == drawn[1]
        child.eval([1, 2])
        assert (session.n_past, child.n_past) == (30, 32)


class TestBatches:
    @pytest.mark.parametrize("mode", ["fp32", "auto"])
    def test_together_is_bit_for_bit_as_one_by_one(self, mode: str, load_tiny: LoadTiny) -> None:
        model = load_tiny("q8_0", mode)
        sessions = [model.create_session(reuse=False) for _ in range(9)]
        alone = [model.create_session(reuse=False) for _ in range(9)]
        random = np.random.RandomState(1)
        for n_most in (20, 1, 1, 3):
            work = [random.randint(0, 128, random.randint(1, n_most + 1)).tolist() for _ in sessions]
            eval_batch(zip(sessions, work, strict=True))
            for session, other, tokens in zip(sessions, alone, work, strict=True):
                other.eval(tokens)
                assert session.tokens == other.tokens
                np.testing.assert_array_equal(session.logits, other.logits)

    def test_more_than_a_batch_holds(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llamacli.engine.batching.N_BATCH", 16)
        sessions = [model.create_session(reuse=False) for _ in range(3)]
        eval_batch(zip(sessions, (LONG[:40], [], LONG[40:59]), strict=True))
        np.testing.assert_array_equal(sessions[0].logits, fresh(model, LONG[:40]).logits)
        np.testing.assert_array_equal(sessions[2].logits, fresh(model, LONG[40:59]).logits)
        assert sessions[1].n_past == 0

    def test_types_of_cache_may_differ(self, model: Model) -> None:
        sessions = [model.create_session(kv_type=kind, reuse=False) for kind in ("f32", "f16", "f32")]
        eval_batch((session, LONG[:20]) for session in sessions)
        for session, kind in zip(sessions, ("f32", "f16", "f32"), strict=True):
            np.testing.assert_array_equal(session.logits, fresh(model, LONG[:20], kv_type=kind).logits)

    def test_refusals_change_nothing(self, model: Model, load_tiny: LoadTiny) -> None:
        one, other = fresh(model, LONG[:10]), fresh(model, LONG[:12])
        for work in ([(one, [1]), (one, [2])], [(one, [1]), (other, [128])], [(one, [1]), (other, [1] * 300)],
                     [(one, [1]), (fresh(load_tiny("mha"), [1]), [1])]):  # fmt: skip
            with pytest.raises(Exception, match=r"twice|index 0|overflow|different models"):
                eval_batch(work)
        assert (one.n_past, other.n_past) == (10, 12)
        one.eval(LONG[10:20])
        np.testing.assert_array_equal(one.logits, fresh(model, LONG[:20]).logits)


class TestReuse:
    def test_what_another_session_holds_is_not_computed_again(self, model: Model) -> None:
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

    def test_the_last_token_is_always_evaluated(self, model: Model) -> None:
        first, second = model.create_session(), model.create_session()
        for session in (first, second):
            session.eval(LONG[:33])
        assert second.n_reused == 32
        np.testing.assert_array_equal(first.logits, second.logits)

    def test_closed_sessions_are_remembered_within_a_cap(self, model: Model) -> None:
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

    def test_an_interrupt_gives_up_what_was_reused(self, model: Model) -> None:
        first, second = model.create_session(), model.create_session()
        first.eval(LONG[:50])
        second.eval(LONG[:3])
        program = model.program

        class Interrupting:
            def forward(self, *_: object, **__: object) -> np.ndarray:
                raise KeyboardInterrupt

        model._program = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            second.eval(LONG[3:20])
        model._program = program
        assert second.tokens == tuple(LONG[:3]) == tuple(second.cache.tokens)
        second.eval([9, 9])
        np.testing.assert_array_equal(second.logits, fresh(model, [*LONG[:3], 9, 9]).logits)

    def test_types_do_not_mix(self, model: Model) -> None:
        first, second = model.create_session(kv_type="f32"), model.create_session(kv_type="f16")
        first.eval(LONG[:30])
        second.eval(LONG[:30])
        assert second.n_reused == 0


def test_a_cache_of_numbered_sequences(model: Model) -> None:
    with model.kv_cache(3, seq_len=64) as cache:
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
        with pytest.raises(InvalidRequestError, match="overlap or leave a gap"):
            cache.seq_cp(0, 2)


class TestFamilies:
    """What is special about a family must not be forgotten: windows, long factors, states that several layers share."""

    @pytest.mark.parametrize("variant", ["gemma3", "gemma4_e", "gptoss_gqa", "phi3_long", "qwen3_gqa"])
    def test_sharing_saving_and_batching_change_no_bit(self, variant: str, load_tiny: LoadTiny) -> None:
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

    @pytest.mark.parametrize("variant", ["gemma3", "gemma4_e", "gptoss_gqa", "phi3_long", "phi3_partial_long"])
    def test_keys_behind_a_cut_are_those_of_their_new_positions(self, variant: str, load_tiny: LoadTiny) -> None:
        model = load_tiny(variant, "fp32")
        tokens = [token % model.config.n_vocab for token in LONG[:30]]
        session = fresh(model, tokens)
        try:
            session.remove_range(22, 25)
        except InvalidRequestError:
            assert any(state.window for state in model.program.states)
            return
        rest = tokens[:22] + tokens[25:]
        first = 0 if model.program.states[0].window is None else 27 - model.program.states[0].window + 1
        pairs = zip(session.cache.read(0, 27), fresh(model, rest).cache.read(0, 27), strict=True)
        for axis, (mine, expected) in zip((2, 1), pairs, strict=True):
            kept = np.arange(first, 27)
            assert naive.nmse(mine.take(kept, axis), expected.take(kept, axis)) < 1e-9


def test_threads_share_without_harm(model: Model) -> None:
    """Sessions come and go in several threads, begin alike, and each generates what it would have alone."""
    prompts = [[*LONG[:n], n] for n in (20, 33, 48, 48, 60)]
    with model.create_session(reuse=False) as session:
        expected = []
        for prompt in prompts:
            session.rewind(0)
            expected.append([token.id for token in session.generate(prompt, max_tokens=8)])
    wrong: list[object] = []

    def run(seed: int) -> None:
        random = np.random.RandomState(seed)
        for _ in range(12):
            i = random.randint(len(prompts))
            session = model.create_session()
            found = [token.id for token in session.generate(prompts[i], max_tokens=8)]
            if found != expected[i]:
                wrong.append((i, found))
            if random.randint(3):  # else left to the garbage collector
                session.close()

    model.prefix_cache_bytes = 1 << 16
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    model.prefixes(model.kv_pool().layout.kv_type, 256).clear()
    gc.collect()
    assert model.kv_pool().n_used_bytes == 0


def test_closing_a_model_gives_everything_back(model: Model) -> None:
    pool = model.kv_pool()
    kept, late = model.create_session(), model.create_session()
    for session in (kept, late):
        session.eval(LONG[:40])
    kept.close()
    model.close()
    late.close()
    assert (pool.n_used_bytes, pool.n_bytes) == (0, 0)
