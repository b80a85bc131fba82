import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import ENGINES, LoadTiny, TinyGguf
from llamacli import (
    ClosedError,
    ContextOverflowError,
    InvalidRequestError,
    Model,
    SamplingParams,
    Session,
    Stats,
    demo_path,
    load_model,
)
from llamacli.kv import KVSequence
from llamacli.plugins import Plugins
from llamacli.testing import formulas

PROMPT = [5, 17, 101, 3, 77, 42, 9, 64]
LONG = np.random.RandomState(7).randint(0, 128, 40).tolist()
RANDOM = SamplingParams(temp=1.0, top_k=40)
BOUNDS = {
    "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-4, "q5_0": 6e-3, "q5_1": 4e-3, "q4_0": 2e-2, "q4_1": 1.5e-2, "iq4_nl": 2e-2,
}  # fmt: skip
"""NMSE of logits with the cache as each type, against f32."""


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


@pytest.fixture
def session(model: Model) -> Session:
    return model.create_session()


@pytest.fixture
def text_model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa", tokenizer="spm")


def logits_after(model: Model, tokens: list[int]) -> np.ndarray:
    with model.create_session() as session:
        session.eval(tokens)
        return session.logits


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(samplers=["nonsense"], temp=1), "unknown sampler 'nonsense'"),
        (SamplingParams(logit_bias={10**30: 1}), "logit_bias: token 10{30} is not in the vocabulary"),
        (SamplingParams(suppress_tokens=[10**30]), "suppress_tokens: token 10{30} is not in the vocabulary"),
        (SamplingParams(grammar="root"), "grammar: line 1"),
    ],
)
def test_parameters_that_make_no_sampler_are_refused_before_anything_is_evaluated(
    params: SamplingParams, said: str, text_model: Model
) -> None:
    with text_model.create_session() as session:
        with pytest.raises(InvalidRequestError, match=said):
            session.generate(PROMPT, params)
        assert session.n_past == 0


class TestLength:
    def test_seq_len_is_read_when_the_session_is_created(self, model: Model) -> None:
        before = model.create_session()
        model.config.seq_len = 32
        assert (before.seq_len, model.create_session().seq_len) == (256, 32)
        assert model.create_session(seq_len=48).seq_len == 48

    def test_a_lower_cap_shrinks_memory_and_changes_no_token(self, model: Model) -> None:
        whole, capped = model.create_session(), model.create_session(seq_len=32)
        assert capped.cache.n_bytes * 8 == whole.cache.n_bytes
        generated = [[token.id for token in session.generate(PROMPT, max_tokens=20)] for session in (whole, capped)]
        assert generated[0] == generated[1]

    @pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "head_dim"])
    @pytest.mark.parametrize(("kv_type", "size"), [("f32", 4), ("f16", 2), ("bf16", 2)])
    def test_size_law(self, variant: str, kv_type: str, size: int, load_tiny: LoadTiny) -> None:
        config = (model := load_tiny(variant)).config
        for seq_len in (64, 1024):
            session = model.create_session(seq_len=seq_len, kv_type=kv_type)
            kv_dim = config.n_head_kv * config.head_dim
            assert session.cache.n_bytes == 2 * config.n_layer * seq_len * kv_dim * size

    def test_the_cache_is_exact_in_fp32_mode_and_half_as_large_otherwise(self, load_tiny: LoadTiny) -> None:
        types = [load_tiny("gqa", mode).create_session().cache.kv_type.k for mode in ("fp32", "auto", "q8", "q4")]
        assert types == ["f32", "f16", "f16", "f16"]

    @pytest.mark.parametrize("seq_len", [0, -1, 1 << 31, 10**30, True, 3.5, "64"])
    def test_a_length_is_a_positive_integer_of_32_bits(self, seq_len: object, model: Model) -> None:
        with pytest.raises(InvalidRequestError, match="seq_len"):
            model.create_session(seq_len=seq_len)
        with pytest.raises(InvalidRequestError, match="seq_len"):
            model.config.seq_len = seq_len

    @pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
    def test_numpy_integers_will_do(self, kind: type[np.integer], model: Model) -> None:
        model.config.seq_len = kind(127)
        session = model.create_session(seq_len=kind(100))
        assert (type(model.config.seq_len), session.seq_len) == (int, 100)
        session.set_seed(kind(7))
        assert len(list(session.generate(PROMPT, max_tokens=kind(127)))) == 100 - len(PROMPT)
        session.rewind(kind(1))
        assert session.n_past == 1

    def test_unknown_cache_type(self, model: Model) -> None:
        with pytest.raises(InvalidRequestError, match=r"kv_type 'f8' is not one of f32, f16"):
            model.create_session(kv_type="f8")

    @pytest.mark.parametrize("mode", ["fp32", "auto"])
    @pytest.mark.parametrize(("kv_type", "bound"), BOUNDS.items())
    def test_rounded_keys_and_values_stay_close(
        self, kv_type: str, bound: float, mode: str, load_tiny: LoadTiny
    ) -> None:
        model = load_tiny("gqa", mode)
        exact = model.create_session(kv_type="f32").eval(LONG, all_logits=True)
        rounded = model.create_session(kv_type=kv_type).eval(LONG, all_logits=True)
        assert 0 < formulas.nmse(rounded, exact) < bound


STORY = """One day, a little girl named Lily went to the park with her mother. She saw a big dog and wanted to play
with it. The dog was happy and ran to her. Lily laughed and threw a ball. The dog ran after the ball and brought it
back. They played all day, and then it was time to go home. Lily said goodbye to the dog and held her
mother's hand."""
ON_STORIES = {
    "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-4, "q5_0": 1.5e-3, "q5_1": 1.5e-3, "q4_0": 1e-2, "q4_1": 1e-2, "iq4_nl": 1e-2,
}  # fmt: skip


class TestCacheTypes:
    """Both engines keep the same bytes and read the same numbers."""

    @pytest.mark.parametrize("name", ["demo", "stories260K.gguf", "TinyStories-656K.Q8_0.gguf"])
    @pytest.mark.parametrize(("kv_type", "bound"), ON_STORIES.items())
    def test_stories_are_read_as_closely_as_bits_allow(
        self, kv_type: str, bound: float, name: str, plugins: Plugins, shared: Callable[[str], Path]
    ) -> None:
        path = demo_path() if name == "demo" else shared(f"models/{name}")
        model = load_model(path, "fp32", plugins=plugins)
        tokens = model.encode(STORY)
        exact, rounded = (model.create_session(kv_type=kind).eval(tokens, all_logits=True) for kind in ("f32", kv_type))
        assert 0 < formulas.nmse(rounded, exact) < bound

    @pytest.mark.parametrize("variant", ["gqa", "head_dim"])
    @pytest.mark.parametrize("kv_type", [*BOUNDS, ("q8_0", "q4_1"), ("q5_0", "iq4_nl")], ids=str)
    def test_engines_agree(self, kv_type: str, variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        models = [
            load_model(tiny_gguf(variant), "fp32", plugins=plugins, engine=engine()) for engine in ENGINES.values()
        ]
        logits = [model.create_session(kv_type=kv_type).eval(LONG, all_logits=True) for model in models]
        assert formulas.nmse(logits[1], logits[0]) < 1e-6

    @pytest.mark.parametrize("kv_type", BOUNDS)
    def test_engines_read_each_others_cells(self, kv_type: str, load_tiny: LoadTiny) -> None:
        """What was stored by one is the same as what NumPy makes of the same keys and values."""
        model = load_tiny("gqa")
        exact, rounded = (model.create_session(kv_type=kind) for kind in ("f32", kv_type))
        for session in (exact, rounded):
            session.eval(LONG)
        again = KVSequence(model.kv_pool(kv_type), 64)
        again.reserve(0, len(LONG))
        keys, values = exact.cache.read(0, len(LONG))  # of the first layer: the others see rounded ones
        again.write(0, 0, keys.transpose(2, 0, 1), values.transpose(1, 0, 2))
        for mine, theirs in zip(again.read(0, len(LONG)), rounded.cache.read(0, len(LONG)), strict=True):
            np.testing.assert_array_equal(mine, theirs)


class TestEval:
    def test_n_past_counts_and_logits_are_the_last_tokens(self, model: Model, session: Session) -> None:
        assert session.n_past == 0
        session.eval(PROMPT[:3])
        assert session.n_past == 3
        session.eval(PROMPT[3:])
        assert session.n_past == len(PROMPT)
        whole = model.create_session().eval(PROMPT, all_logits=True)
        assert whole.shape == (len(PROMPT), model.config.n_vocab)
        assert whole.dtype == session.logits.dtype == np.float32
        np.testing.assert_array_equal(session.logits, whole[-1])

    def test_all_logits_leave_the_last_row_as_logits(self, session: Session) -> None:
        rows = session.eval(PROMPT, all_logits=True)
        np.testing.assert_array_equal(session.logits, rows[-1])
        session.sample(SamplingParams(temp=0.5))
        assert not np.array_equal(session.logits, rows[-1]), "sampling must not reach into what eval returned"

    def test_no_tokens_are_no_op(self, session: Session) -> None:
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
    def test_every_split_of_a_sequence(self, variant: str, load_tiny: LoadTiny) -> None:
        model, tokens = load_tiny(variant), PROMPT[:7]
        expected = model.create_session().eval(tokens, all_logits=True)
        for mask in itertools.product([False, True], repeat=len(tokens) - 1):
            cuts = [0, *(i + 1 for i, cut in enumerate(mask) if cut), len(tokens)]
            session = model.create_session(seq_len=len(tokens))
            parts = [session.eval(tokens[a:b], all_logits=True) for a, b in itertools.pairwise(cuts)]
            np.testing.assert_array_equal(expected, np.concatenate(parts))

    @pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q5_0", "q4_1"])
    def test_every_cut_of_a_longer_sequence(self, kv_type: str, model: Model) -> None:
        expected = model.create_session(kv_type=kv_type).eval(LONG, all_logits=True)
        for cut in range(1, len(LONG)):
            session = model.create_session(kv_type=kv_type)
            parts = [session.eval(LONG[:cut], all_logits=True), session.eval(LONG[cut:], all_logits=True)]
            np.testing.assert_array_equal(expected, np.concatenate(parts))

    def test_token_by_token(self, model: Model) -> None:
        expected = model.create_session().eval(LONG, all_logits=True)
        session = model.create_session()
        for token, row in zip(LONG, expected, strict=True):
            session.eval([token])
            np.testing.assert_array_equal(row, session.logits)

    def test_batches_beyond_the_largest_are_split(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = model.create_session().eval(LONG, all_logits=True)
        monkeypatch.setattr("llamacli.engine.batching.N_BATCH", 16)
        session = model.create_session()
        np.testing.assert_array_equal(expected, session.eval(LONG, all_logits=True))
        assert session.n_past == len(LONG)

    def test_sessions_do_not_interact(self, model: Model) -> None:
        alone = logits_after(model, PROMPT)
        one, other = model.create_session(), model.create_session()
        for token, noise in zip(PROMPT, LONG, strict=False):
            one.eval([token])
            other.eval([noise, noise])
        assert (one.n_past, other.n_past) == (len(PROMPT), 2 * len(PROMPT))
        np.testing.assert_array_equal(one.logits, alone)
        draws = [model.create_session().generate(PROMPT, RANDOM, max_tokens=8) for _ in range(2)]
        interleaved = [(a.id, b.id) for a, b in zip(*draws, strict=True)]
        assert all(a == b for a, b in interleaved)

    def test_ids_may_be_numpys(self, model: Model) -> None:
        session = model.create_session()
        session.eval(np.array(PROMPT))
        np.testing.assert_array_equal(session.logits, logits_after(model, PROMPT))


class TestRefusals:
    """Nothing is evaluated or written before all is checked."""

    @pytest.fixture
    def started(self, model: Model) -> Session:
        session = model.create_session(seq_len=12)
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
        assert (raised.value.n_past, raised.value.n_tokens, raised.value.seq_len) == (8, 5, 12)
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
            states = model.program.states

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


class TestSampling:
    def test_greedy_by_default(self, session: Session) -> None:
        session.eval(PROMPT)
        before = session.logits.copy()
        assert session.sample() == session.sample(SamplingParams()) == int(before.argmax())
        np.testing.assert_array_equal(session.logits, before)

    def test_needs_logits(self, session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
            session.sample()

    def test_sample_does_not_evaluate(self, session: Session) -> None:
        session.eval(PROMPT)
        session.sample(RANDOM)
        assert session.n_past == len(PROMPT)

    def test_penalty_covers_what_was_generated_and_not_the_prompt(self, session: Session) -> None:
        session.eval(PROMPT)
        before = session.logits.copy()
        first = session.sample(SamplingParams(penalty=1e6))
        assert first == int(before.argmax())
        assert session.sample(SamplingParams(penalty=1e6)) != first

    def test_the_same_seed_draws_the_same(self, session: Session) -> None:
        def draw(n: int) -> list[int]:
            session.eval(PROMPT[:1])
            flat = np.zeros(128, np.float32)
            return [int(session._sampler.sample(flat.copy(), RANDOM)) for _ in range(n)]

        session.set_seed(7)
        first = draw(20)
        session.set_seed(7)
        again, further = draw(20), draw(20)
        session.set_seed(8)
        assert first == again
        assert first not in (further, draw(20))

    def test_seeds(self, model: Model) -> None:
        def draws(**options: int) -> list[int]:
            session = model.create_session(**options)
            return [token.id for token in session.generate(PROMPT, SamplingParams(temp=2.0), max_tokens=20)]

        assert draws() == draws(seed=1234)
        assert draws() != draws(seed=7)

    @pytest.mark.parametrize("seed", [-1, 1.5, True, None, "7"])
    def test_a_seed_is_a_natural_number(self, seed: object, session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="seed"):
            session.set_seed(seed)


class TestGenerate:
    def test_equals_the_manual_loop(self, model: Model, session: Session) -> None:
        for params in (None, SamplingParams(penalty=1.3, penalty_last_n=4), RANDOM):
            session, manual = model.create_session(), model.create_session()
            generated = [token.id for token in session.generate(PROMPT, params, max_tokens=24)]
            manual.eval(PROMPT)
            expected = []
            for _ in range(24):
                expected.append(manual.sample(params))
                manual.eval(expected[-1:])
            assert generated == expected
            assert session.n_past == manual.n_past == len(PROMPT) + 24
            np.testing.assert_array_equal(session.logits, manual.logits)

    def test_leaving_the_loop_drops_the_token_in_hand(self, model: Model, session: Session) -> None:
        ids = [token.id for token in model.create_session().generate(PROMPT, max_tokens=5)]
        for i, token in enumerate(session.generate(PROMPT, max_tokens=20)):
            assert token.id == ids[i]
            if i == 3:
                break
        assert session.stats.n_gen == 3
        assert session.n_past == len(PROMPT) + 3
        assert session._sampler.history == ids[:3]
        np.testing.assert_array_equal(session.logits, logits_after(model, [*PROMPT, *ids[:3]]))
        session.eval(ids[3:4])
        assert session.sample() == ids[4]

    def test_the_last_token_is_evaluated_too(self, model: Model, session: Session) -> None:
        ids = [token.id for token in session.generate(PROMPT, max_tokens=3)]
        assert session.n_past == len(PROMPT) + 3
        np.testing.assert_array_equal(session.logits, logits_after(model, PROMPT + ids))

    def test_continues_without_a_prompt(self, model: Model, session: Session) -> None:
        whole = [token.id for token in model.create_session().generate(PROMPT, max_tokens=10)]
        parts = [token.id for token in session.generate(PROMPT, max_tokens=4)]
        parts += [token.id for token in session.generate([], max_tokens=6)]
        assert parts == whole
        assert session.stats.n_prompt == 0

    def test_nothing_to_continue(self, session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
            next(session.generate([]))

    def test_the_penalty_window_starts_empty(self, session: Session) -> None:
        params = SamplingParams(penalty=1e6, penalty_last_n=100)
        first = [token.id for token in session.generate(PROMPT, params, max_tokens=6)]
        assert len(set(first)) == 6
        assert session._sampler.history == first
        list(session.generate([], params, max_tokens=1))
        assert len(session._sampler.history) == 1

    def test_stats(self, session: Session) -> None:
        assert session.stats == Stats()
        list(session.generate(PROMPT, max_tokens=5))
        stats = session.stats
        assert (stats.n_prompt, stats.n_gen) == (len(PROMPT), 5)
        assert stats.ttft_s > 0
        assert stats.prefill_tps >= len(PROMPT) / stats.ttft_s
        assert stats.gen_tps > 0
        session.eval([1])
        assert session.stats == stats, "only generate counts"
        assert list(session.generate([2], max_tokens=0)) == []
        assert session.stats == Stats(n_prompt=1, prefill_tps=session.stats.prefill_tps)

    def test_rates_are_zero_where_no_time_passes(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llamacli.session.time.perf_counter", lambda: 1.0)
        list(session.generate(PROMPT, max_tokens=2))
        assert session.stats == Stats(n_prompt=len(PROMPT), n_gen=2)

    def test_a_full_context_ends_quietly(self, model: Model) -> None:
        session = model.create_session(seq_len=len(PROMPT) + 3)
        assert len(list(session.generate(PROMPT, max_tokens=10))) == 3
        assert session.n_past == session.seq_len
        assert list(session.generate([], max_tokens=10)) == []

    @pytest.mark.parametrize("max_tokens", [-1, 2.0, True, None])
    def test_max_tokens_is_a_natural_number(self, max_tokens: object, session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            session.generate(PROMPT, max_tokens=max_tokens)

    def test_ends_at_an_end_of_generation_token(self, load_tiny: LoadTiny) -> None:
        free = [token.id for token in load_tiny("rope_base").create_session().generate(PROMPT, max_tokens=30)]
        stop = max(free.index(token) for token in free)
        assert stop > 3
        model = load_tiny("rope_base", metadata={"tokenizer.ggml.eos_token_id": free[stop]})
        session = model.create_session()
        assert [token.id for token in session.generate(PROMPT, max_tokens=30)] == free[:stop]
        assert session.n_past == len(PROMPT) + stop
        assert session.stats.n_gen == stop
        ignoring = model.create_session().generate(PROMPT, max_tokens=30, ignore_eos=True)
        assert [token.id for token in ignoring] == free


class TestText:
    """Pieces joined are the text."""

    def pieces(self, model: Model, prompt: list[int], ids: list[int]) -> list[str]:
        """The pieces of a generation that draws `ids` one after the other."""
        session, wanted = model.create_session(), iter(ids)
        session.draw = lambda _: next(wanted)
        return [token.piece for token in session.generate(prompt, max_tokens=len(ids))]

    def test_a_text_has_no_space_before_it(self, text_model: Model) -> None:
        bos, *ids = text_model.encode("once upon a time")
        assert "".join(self.pieces(text_model, [bos], ids)) == "once upon a time"

    def test_a_continuation_keeps_the_space_before_it(self, text_model: Model) -> None:
        ids = text_model.encode("once upon a time")
        for cut in range(2, len(ids)):
            pieces = self.pieces(text_model, ids[:cut], ids[cut:])
            assert text_model.decode(ids[:cut]) + "".join(pieces) == "once upon a time"

    def test_a_second_generation_continues_the_text(self, text_model: Model) -> None:
        ids = text_model.encode("once upon a time")
        session, wanted = text_model.create_session(), iter(ids[2:])
        session.draw = lambda _: next(wanted)
        session.eval(ids[:2])
        parts = [token.piece for token in session.generate([], max_tokens=1)]
        parts += [token.piece for token in session.generate([], max_tokens=len(ids) - 3)]
        assert text_model.decode(ids[:2]) + "".join(parts) == "once upon a time"

    def test_characters_come_whole(self, text_model: Model) -> None:
        bos, *ids = text_model.encode("a é€😀 a")
        pieces = self.pieces(text_model, [bos], ids)
        assert "".join(pieces) == "a é€😀 a"
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces.count("") == 1 + 2 + 3

    def test_what_is_left_of_a_character_comes_with_the_last_token(self, text_model: Model) -> None:
        bos, *ids = text_model.encode("a€")
        assert self.pieces(text_model, [bos], ids[:-1])[-1] == "\ufffd"


class TestClose:
    def test_a_closed_session(self, session: Session) -> None:
        session.eval(PROMPT)
        session.close()
        session.close()
        for call in (
            lambda: session.eval([1]),
            lambda: session.eval([]),
            lambda: next(session.generate([1])),
            lambda: session.cache,
        ):
            with pytest.raises(ClosedError, match="session is closed"):
                call()

    def test_context_managers(self, model: Model) -> None:
        with model, model.create_session() as session:
            session.eval(PROMPT)
        with pytest.raises(ClosedError, match="model is closed"):
            model.create_session()
        with pytest.raises(ClosedError):
            session.eval([1])

    def test_a_closed_model(self, model: Model, session: Session) -> None:
        session.eval(PROMPT)
        model.close()
        model.close()
        with pytest.raises(ClosedError, match="model is closed"):
            session.eval([1])
        assert session.n_past == len(PROMPT)

    def test_closing_frees_the_cache(self, session: Session) -> None:
        cache = weakref.ref(session.cache)
        session.eval(PROMPT)
        session.close()
        gc.collect()
        assert cache() is None


def test_rewind_forgets_what_came_after(load_tiny):
    with load_tiny() as model, model.create_session() as session:
        expected = session.eval([1, 2, 3, 4, 5], all_logits=True)
        session.rewind(2)
        assert session.n_past == 2
        with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
            session.logits  # noqa: B018
        np.testing.assert_array_equal(session.eval([3, 4, 5], all_logits=True), expected[2:])
        for wrong in (-1, 6, True, 1.0):
            with pytest.raises(InvalidRequestError, match="n_past must be"):
                session.rewind(wrong)
        assert session.n_past == 5


def test_progress_is_told_of_what_takes_more_than_a_batch(load_tiny):
    seen = []
    with load_tiny() as model, model.create_session(seq_len=1200, reuse=False) as session:
        session.progress = lambda done, total: seen.append((done, total))
        session.eval([1] * 512)
        session.eval([2])
        assert seen == []
        session.rewind(0)
        list(session.generate([1, 2] * 550, max_tokens=2))
    assert seen == [(0, 1100), (512, 1100), (1024, 1100), (1100, 1100)]
