"""What sessions do with their state: cut it, share it, do without it, evaluate it together."""

import gc
import threading

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import ClosedError, InvalidRequestError, Model, SamplingParams, StateError
from llamacli.kv import CacheStrategy, KVSequence, OutOfMemoryError
from llamacli.session import Session, eval_batch
from llamacli.testing import formulas

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
            assert formulas.nmse(mine, expected) < 1e-9
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
        with pytest.raises(InvalidRequestError, match="at least one token"):
            session.clear_and_reseed([], [])
        assert session.pos_max == 23

    def test_what_is_behind_a_cut_is_shared_with_nobody(self, model: Model) -> None:
        """It remembers what was cut out, and what others hold does not."""
        model.prefix_cache_bytes = 0
        first = model.create_session()
        first.eval(LONG[:50])
        first.remove_range(20, 30)
        rest = LONG[:20] + LONG[30:60]
        copies = [model.create_session(reuse=False) for _ in range(2)]
        copies[0].load_state(first.save_state())
        copies[1].cache.copy(first.cache, 0, 35)
        for source in (first, *(Session(model, sequence=copy.cache.fork()) for copy in copies)):
            with model.create_session() as second:
                second.eval(rest)
                assert second.n_reused == 20
                np.testing.assert_array_equal(second.logits, fresh(model, rest).logits)
                source.rewind(20)
        whole = model.create_session()
        whole.eval(rest)
        first.eval(LONG[20:50])
        first.remove_range(15, 20)
        held = first.fork()
        held._prefixes = None
        for session in (first, held):
            session.eval([1, 2, 3])
        np.testing.assert_array_equal(first.logits, held.logits)

    def test_a_window_remembers_what_it_has_of_a_cut(self, load_tiny: LoadTiny) -> None:
        """Cells that move onto a page of which others are forgotten: one cannot go back to where those are seen."""
        model = load_tiny("gemma3", n_layer=6, context_length=400)
        for n, start, stop in ((253, 230, 238), (225, 25, 39), (142, 99, 124), (91, 9, 20)):
            session = fresh(model, (LONG * 3)[:n])
            session.remove_range(start, stop)
            for layer, state in enumerate(model.program.states):
                for n_left in range(start + 1, session.n_past):
                    if state.window is not None and session.cache.can_truncate(n_left):
                        seen = session.cache.read(layer, n_left)[1][:, max(0, n_left - state.window + 1) :]
                        assert seen.any(axis=-1).all()

    def test_reused_tokens_are_forgotten_too(self, model: Model) -> None:
        first, second = model.create_session(), model.create_session()
        first.eval(LONG)
        second.eval(LONG)
        second.rewind(7)
        assert second.n_reused == 7


class TestClosing:
    def test_a_closed_cache_takes_its_sessions_along(self, model: Model) -> None:
        cache = model.kv_cache(2, seq_len=128)
        session = Session(model, sequence=cache.sequence(0))
        session.eval(LONG[:40])
        cache.close()
        for use in (lambda: session.eval([5]), lambda: session.cache, session.save_state):
            with pytest.raises(ClosedError):
                use()

    def test_what_is_closed_is_shared_with_nobody(self, model: Model) -> None:
        """Somebody may still refer to it, if only through a traceback."""
        model.prefix_cache_bytes = 0
        first, second = model.create_session(), model.create_session()
        first.eval(LONG)
        sequence = first.cache
        first.close()
        assert (sequence.closed, sequence.tokens) == (True, [])
        second.eval(LONG)
        assert second.n_reused == 0
        with pytest.raises(ClosedError):
            sequence.reserve(0, 1)
        with pytest.raises(InvalidRequestError, match=r"page 0 .* is not there"):
            sequence.read_cell(0, 0)

    def test_a_session_stays_itself_when_its_cells_are_changed(self, model: Model) -> None:
        cache = model.kv_cache(2, seq_len=128)
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


class TestWindows:
    """Sliding windows forget; what ends of prompts need of them is kept."""

    @pytest.fixture
    def model(self, load_tiny: LoadTiny) -> Model:
        return load_tiny("gemma3", n_layer=6, context_length=400)

    def test_a_prompt_is_found_though_its_session_has_gone_on(self, model: Model) -> None:
        with model.create_session() as first:
            list(first.generate(LONG, max_tokens=60, ignore_eos=True))
            for more in ([], [5, 6, 7]):
                with model.create_session() as second:
                    list(second.generate([*LONG, *more], max_tokens=1, ignore_eos=True))
                    assert (second.stats.n_prompt, second.stats.n_reused) == (100 + len(more), 99 + bool(more))
                    second.rewind(100 + len(more))
                    second.eval([9])
                    np.testing.assert_array_equal(second.logits, fresh(model, [*LONG, *more, 9]).logits)

    def test_going_far_back(self, model: Model) -> None:
        session = model.create_session()
        session.eval(LONG)
        list(session.generate(LONG, max_tokens=60, ignore_eos=True))
        for n, again in ((150, 50), (50, 50)):
            session.rewind(n)
            list(session.generate([1, 2], max_tokens=1, ignore_eos=True))
            assert session.stats.n_prompt == n + 2, "what was forgotten counts"
            assert session.stats.n_prompt - session.stats.n_reused == again + 2
            session.rewind(n + 2)
            session.eval([3])
            tokens = [*(LONG + LONG)[:n], 1, 2, 3]
            np.testing.assert_array_equal(session.logits, fresh(model, tokens).logits)

    def test_the_last_token_can_always_be_evaluated_again(self, model: Model) -> None:
        session = model.create_session(reuse=False)
        for n, token in enumerate(LONG[:70], start=1):
            session.eval([token])
            assert session.cache.can_truncate(n - 1)

    def test_what_is_kept_is_bounded(self, model: Model) -> None:
        session = model.create_session()
        model.prefix_cache_bytes = 0
        session.eval(LONG)
        window = session.cache.pool.groups[0]
        assert window.n_used <= 2
        model.prefix_cache_bytes = 1 << 20
        session.eval(LONG)
        session.eval(LONG)
        assert model.prefixes(session.cache.kv_type, 400).n_bytes <= 1 << 20


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

    @pytest.mark.parametrize("strategy", ["always", "long_sequence_only", "disabled"])
    def test_memory_is_looked_at_by_who_wants_to_know(
        self, strategy: str, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamacli.kv.strategies.available_memory", lambda: pytest.fail("nobody asked"))
        fresh(model, LONG[:5], strategy=strategy)

    def test_unknown(self, model: Model) -> None:
        with pytest.raises(InvalidRequestError, match="'never' is not one of always"):
            model.create_session(strategy="never")

    def test_out_of_memory_names_both_figures(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        session = model.create_session()
        monkeypatch.setattr("llamacli.kv.pool.available_memory", lambda: 1000)
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

    def test_all_or_none_goes_on_whatever_the_types(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = fresh(model, LONG[:10], kv_type="f16"), fresh(model, LONG[:12], kv_type="f32")
        real = KVSequence.reserve

        def refuse(sequence: KVSequence, start: int, n: int) -> None:
            if sequence is other.cache:
                raise OutOfMemoryError(1, 0)
            real(sequence, start, n)

        with monkeypatch.context() as patch:
            patch.setattr(KVSequence, "reserve", refuse)
            with pytest.raises(OutOfMemoryError):
                eval_batch([(one, [1, 2]), (other, [3])])
        assert (one.n_past, other.n_past) == (10, 12)
        eval_batch([(one, [1, 2]), (other, [3])])
        np.testing.assert_array_equal(one.logits, fresh(model, [*LONG[:10], 1, 2], kv_type="f16").logits)
        np.testing.assert_array_equal(other.logits, fresh(model, [*LONG[:12], 3], kv_type="f32").logits)


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
        second.eval(LONG[:3])
        first.eval(LONG[:50])
        program = model.program

        class Interrupting:
            def forward(self, *_: object, **__: object) -> np.ndarray:
                raise KeyboardInterrupt

        model._program = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            second.eval(LONG[3:20])
        model._program = program
        assert second.tokens == tuple(LONG[:3]) == tuple(second.cache.tokens)
        assert second.n_reused == 0
        second.eval([9, 9])
        np.testing.assert_array_equal(second.logits, fresh(model, [*LONG[:3], 9, 9]).logits)

    def test_types_do_not_mix(self, model: Model) -> None:
        first, second = model.create_session(kv_type="f32"), model.create_session(kv_type="f16")
        first.eval(LONG[:30])
        second.eval(LONG[:30])
        assert second.n_reused == 0


class TestStates:
    def test_an_interrupted_cut_is_saved_whole(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        session = fresh(model, LONG[:40])
        session.cache.remove(5, 9, lambda layer, keys: keys)  # what an interrupt leaves that comes right after it
        saved = session.save_state()
        other = model.create_session(reuse=False)
        other.load_state(saved)
        assert other.tokens == session.tokens == tuple(LONG[:40])
        for one in (session, other):
            one.eval(LONG[40:42])
            np.testing.assert_array_equal(one.logits, fresh(model, LONG[:42]).logits)

    def test_a_state_for_a_context_of_another_length_changes_nothing(self, load_tiny: LoadTiny) -> None:
        model = load_tiny("phi3_long", "fp32")
        lengths = sorted({model.program.rope_variant(n): n for n in (8, model.config.seq_len)}.values())
        assert len(lengths) == 2, "long factors make another rope_variant"
        tokens = [token % model.config.n_vocab for token in LONG[:5]]
        short, long = (fresh(model, tokens, seq_len=n) for n in lengths)
        with pytest.raises(StateError, match="another length"):
            long.load_state(short.save_state())
        assert long.tokens == tuple(tokens)
        long.eval([1])
        np.testing.assert_array_equal(long.logits, fresh(model, [*tokens, 1], seq_len=lengths[1]).logits)

    def test_what_is_no_state_and_what_are_no_tokens(self, model: Model) -> None:
        session = fresh(model, LONG[:5])
        for wrong in (5, None, "text"):
            with pytest.raises(StateError, match="a state is bytes, not"):
                session.load_state(wrong)
        for call in (session.eval, session.generate, session.reuse, lambda ids: eval_batch([(session, ids)])):
            with pytest.raises(InvalidRequestError, match="sequence of ids, not 5"):
                call(5)
        with model.kv_cache() as cache, pytest.raises(StateError, match="a state is bytes, not int"):
            cache.state_load(0, 5)
        assert session.tokens == tuple(LONG[:5])


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
            assert formulas.nmse(mine.take(kept, axis), expected.take(kept, axis)) < 1e-9


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


def test_threads_wait_for_one_another(model: Model) -> None:
    """In one session, and when it is closed while another thread evaluates."""
    session = model.create_session(seq_len=200, reuse=False)

    def hammer() -> None:
        for token in LONG:
            session.eval([token, token])
            with session.lock:
                session.rewind(max(0, session.n_past - 3))

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = list(session.tokens)
    session.eval([5])
    np.testing.assert_array_equal(session.logits, fresh(model, [*tokens, 5]).logits)

    raised: list[Exception] = []
    began = threading.Event()

    def run() -> None:
        try:
            while True:
                session.rewind(0)
                session.eval(LONG)
                began.set()
        except ClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    began.wait(60)
    session.close()
    thread.join(60)
    assert len(raised) == 1


def test_closing_a_model_gives_everything_back(model: Model) -> None:
    pool = model.kv_pool()
    kept, late = model.create_session(), model.create_session()
    for session in (kept, late):
        session.eval(LONG[:40])
    kept.close()
    model.close()
    late.close()
    assert (pool.n_used_bytes, pool.n_bytes) == (0, 0)
