"""`Session.generate`: tokens, text, statistics."""

from unittest import mock

import numpy as np
import pytest

import byte_tokens
from conftest import LoadTiny
from llamacli import (
    ContextOverflowError,
    InvalidRequestError,
    Model,
    SamplingParams,
    Session,
    SessionBusyError,
    Stats,
    Token,
)
from llamacli.generation.loop import generate
from sessions import PROMPT, RANDOM, logits_after


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(samplers=["nonsense"], temperature=1), "unknown sampler 'nonsense'"),
        (SamplingParams(logit_bias={10**30: 1}), "logit_bias: token 10{30} is not in the vocabulary"),
        (SamplingParams(suppress_tokens=[10**30]), "suppress_tokens: token 10{30} is not in the vocabulary"),
        (SamplingParams(grammar="root"), "grammar: line 1"),
    ],
)
def test_invalid_params_raise_before_eval(params: SamplingParams, said: str, text_model: Model) -> None:
    with text_model.create_session() as session:
        with pytest.raises(InvalidRequestError, match=said):
            session.generate(PROMPT, params)
        assert session.n_past == 0


def test_equals_the_manual_loop(model: Model, session: Session) -> None:
    for params in (None, SamplingParams(repeat_penalty=1.3, repeat_last_n=4), RANDOM):
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


def test_leaving_the_loop_drops_the_token_in_hand(model: Model, session: Session) -> None:
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


def test_the_last_token_is_evaluated_too(model: Model, session: Session) -> None:
    ids = [token.id for token in session.generate(PROMPT, max_tokens=3)]
    assert session.n_past == len(PROMPT) + 3
    np.testing.assert_array_equal(session.logits, logits_after(model, PROMPT + ids))


def test_continues_without_a_prompt(model: Model, session: Session) -> None:
    whole = [token.id for token in model.create_session().generate(PROMPT, max_tokens=10)]
    parts = [token.id for token in session.generate(PROMPT, max_tokens=4)]
    parts += [token.id for token in session.generate([], max_tokens=6)]
    assert parts == whole
    assert session.stats.n_prompt == 0


def test_empty_prompt_without_logits_raises(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
        next(session.generate([]))


def test_the_penalty_window_starts_empty(session: Session) -> None:
    params = SamplingParams(repeat_penalty=1e6, repeat_last_n=100)
    first = [token.id for token in session.generate(PROMPT, params, max_tokens=6)]
    assert len(set(first)) == 6
    assert session._sampler.history == first
    list(session.generate([], params, max_tokens=1))
    assert len(session._sampler.history) == 1


def test_stats(session: Session) -> None:
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


def test_rates_are_zero_where_no_time_passes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.generation.loop.time.perf_counter", lambda: 1.0)
    list(session.generate(PROMPT, max_tokens=2))
    assert session.stats == Stats(n_prompt=len(PROMPT), n_gen=2)


def test_full_context_ends_generation(model: Model) -> None:
    session = model.create_session(n_ctx=len(PROMPT) + 3)
    assert len(list(session.generate(PROMPT, max_tokens=10))) == 3
    assert session.n_past == session.n_ctx
    assert list(session.generate([], max_tokens=10)) == []


@pytest.mark.parametrize("max_tokens", [-2, 2.0, True, "4"])
def test_invalid_max_tokens_raises(max_tokens: object, session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        session.generate(PROMPT, max_tokens=max_tokens)


def test_ends_at_an_end_of_generation_token(load_tiny: LoadTiny) -> None:
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


@pytest.mark.parametrize("params", [None, RANDOM])
def test_public_loop_gives_the_same_tokens(params: SamplingParams | None, model: Model) -> None:
    session, other = model.create_session(), model.create_session()
    tokens = list(generate(session, PROMPT, params, max_tokens=12))
    assert tokens == list(other.generate(PROMPT, params, max_tokens=12))
    assert (session.tokens, session.stats.n_gen) == (other.tokens, 12)


def test_logits_are_left_as_evaluated(session: Session) -> None:
    session.eval(PROMPT)
    before = session.logits.copy()
    next(session.generate([], SamplingParams(repeat_penalty=1.5, temperature=0.7)))
    np.testing.assert_array_equal(session.logits, before)


def test_decoder_continues_the_text_of_the_context(text_model: Model) -> None:
    session, *ids = text_model.create_session(), *text_model.encode("once upon a time")
    session.eval(ids[:3])
    decoder = session.decoder()
    assert text_model.decode(ids[:3]) + "".join(map(decoder.feed, ids[3:])) == "once upon a time"


class TestText:
    """Pieces joined are the text."""

    def pieces(self, model: Model, prompt: list[int], ids: list[int]) -> list[str]:
        """The pieces of a generation that draws `ids` one after the other."""
        session, wanted = model.create_session(), iter(ids)
        session.draw = lambda _: next(wanted)
        return [token.piece for token in session.generate(prompt, max_tokens=len(ids))]

    def test_text_has_no_leading_space(self, text_model: Model) -> None:
        bos, *ids = text_model.encode("once upon a time")
        assert "".join(self.pieces(text_model, [bos], ids)) == "once upon a time"

    def test_continuation_keeps_its_leading_space(self, text_model: Model) -> None:
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

    def test_incomplete_character_comes_with_the_last_token(self, text_model: Model) -> None:
        bos, *ids = text_model.encode("a€")
        assert self.pieces(text_model, [bos], ids[:-1])[-1] == "\ufffd"


class TestStopStrings:
    """Text ends before a stop string, and the context with it."""

    def run(self, model: Model, text: str, stop: str | list[str], n_extra: int = 0) -> tuple[list[Token], Session]:
        """Tokens of a generation that draws those of `text`, and its session."""
        session, ids = model.create_session(), model.encode(text)[1:]
        wanted = iter([*ids, *[model.tokenizer.eos_id] * n_extra])
        session.draw = lambda _: next(wanted)
        tokens = list(session.generate([1], SamplingParams(stop=stop), max_tokens=len(ids) + n_extra))
        return tokens, session

    def test_text_ends_before_a_stop_string(self, text_model: Model) -> None:
        whole = "once upon a time there"
        for stop in ("upon", "on a", "e", " ", "time there", "o"):
            tokens, session = self.run(text_model, whole, ["nothing", stop])
            assert "".join(token.piece for token in tokens) == whole.partition(stop)[0]
            assert session.stop_string == stop
            assert text_model.decode(session.tokens) == whole[: len(text_model.decode(session.tokens))]
            assert len(text_model.decode(session.tokens)) <= whole.index(stop)
            assert len(session.tokens) >= len(tokens)

    def test_a_stop_string_that_does_not_come_changes_nothing(self, text_model: Model) -> None:
        for n_extra in (0, 1):
            tokens, session = self.run(text_model, "once upon a", "upon a time", n_extra)
            assert "".join(token.piece for token in tokens) == "once upon a"
            assert [token.id for token in tokens] == text_model.encode("once upon a")[1:]
            assert (session.stop_string, session.tokens) == ("", tuple(text_model.encode("once upon a")))

    def test_bytes_of_a_stop_string_leave_the_context(self, text_model: Model) -> None:
        tokens, session = self.run(text_model, "a é€😀 a", "€")
        assert "".join(token.piece for token in tokens) == "a é"
        assert text_model.decode(session.tokens) == "a é"

    @pytest.mark.parametrize("inner", [[], ["<unused>"]])
    @pytest.mark.parametrize("first", ["\u00c3", "a\u00c3"])
    def test_first_byte_of_a_stop_string_leaves_the_context(
        self, first: str, inner: list[str], load_tiny: LoadTiny
    ) -> None:
        """Also within a token of text, or before a token without text."""
        model = load_tiny("gqa", tokenizer=f"gpt2:{byte_tokens.N_VOCAB}", metadata=byte_tokens.byte_keys())
        session, wanted = model.create_session(), map(byte_tokens.TEXTS.index, ["b", first, *inner, "\u00a9"])
        session.draw = lambda _: next(wanted)
        tokens = list(session.generate([1], SamplingParams(stop="é")))
        assert "".join(token.piece for token in tokens) == "b" + first[:-1]
        assert session.tokens == (1, byte_tokens.TEXTS.index("b"))

    def test_leaving_the_loop_drops_tokens_held_back(self, text_model: Model) -> None:
        session, ids = text_model.create_session(), text_model.encode("once upon a time")[1:]
        wanted = iter(ids)
        session.draw = lambda _: next(wanted)
        tokens = session.generate([1], SamplingParams(stop="once upon a dog"), max_tokens=len(ids))
        assert next(tokens).id == ids[0]
        assert session.n_past > 1
        tokens.close()
        assert session.tokens == (1,)

    def test_interrupted_draw_drops_tokens_held_back(self, text_model: Model) -> None:
        session, ids = text_model.create_session(), text_model.encode("once upon a time")[1:]
        session.draw = mock.Mock(side_effect=[*ids[:3], KeyboardInterrupt])
        tokens = session.generate([1], SamplingParams(stop="upon a dog"))
        assert next(tokens).id == ids[0]
        with pytest.raises(KeyboardInterrupt):
            next(tokens)
        assert session.tokens == (1, ids[0])

    def test_a_loop_left_late_changes_no_later_tokens(self, text_model: Model) -> None:
        session, ids = text_model.create_session(), text_model.encode("once upon a time")[1:]
        wanted = iter(ids)
        session.draw = lambda _: next(wanted)
        tokens = session.generate([1], SamplingParams(stop="once upon a dog"), max_tokens=len(ids))
        next(tokens)
        session.eval(ids)
        expected = session.tokens
        tokens.close()
        assert session.tokens == expected

    def test_closed_session_ends_quietly(self, text_model: Model) -> None:
        session = text_model.create_session()
        tokens = session.generate(PROMPT, SamplingParams(stop="once upon a dog"))
        next(tokens)
        session.close()
        tokens.close()


class TestTextPrompt:
    def test_text_is_the_prompt_with_bos(self, text_model: Model) -> None:
        with text_model.create_session() as session, text_model.create_session() as other:
            ids = text_model.tokenizer.encode_prompt("a b")
            assert ids[0] == text_model.tokenizer.bos_id
            expected = list(other.generate(ids, max_tokens=4))
            assert list(session.generate("a b", max_tokens=4)) == expected
            assert session.tokens == other.tokens

    def test_later_text_continues(self, text_model: Model) -> None:
        with text_model.create_session() as session:
            session.eval(session.encode("a b"))
            assert session.encode("a") == text_model.tokenizer.encode_run("a", continues=True)
            n_past = session.n_past
            list(session.generate("a b", max_tokens=0))
            assert session.tokens[n_past:] == tuple(session.encode("a b"))
            assert text_model.decode(session.tokens) == "a ba b"

    def test_special_tokens_stay_text_unless_asked(self, text_model: Model) -> None:
        bos = text_model.tokenizer.bos_id
        spelled = text_model.tokenizer.token_text(bos)
        with text_model.create_session() as session:
            for _ in range(2):
                assert session.encode(spelled).count(bos) == (0 if session.n_past else 1)
                assert session.encode(f"a{spelled}b", parse_special=True)[1:].count(bos) == 1
                session.eval([5])

    def test_eval_refuses_text(self, session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="not the text 'Once': use encode"):
            session.eval("Once")


class TestBusy:
    def test_second_generate_is_refused(self, session: Session) -> None:
        tokens = session.generate(PROMPT, max_tokens=5)
        later = session.generate(PROMPT, max_tokens=5)  # has not begun, so neither is busy yet
        next(tokens)
        for begin in (lambda: session.generate(PROMPT), lambda: next(later)):
            with pytest.raises(SessionBusyError, match="another generate that has not ended"):
                begin()
        assert len(list(tokens)) == 4
        assert session.n_past == len(PROMPT) + 5
        assert len(list(session.generate([], max_tokens=2))) == 2

    @pytest.mark.parametrize("params", [None, SamplingParams(stop="zzz")])
    def test_closing_frees_it(self, session: Session, params: SamplingParams | None) -> None:
        tokens = session.generate(PROMPT, params, max_tokens=5)
        next(tokens)
        tokens.close()
        assert len(list(session.generate([], max_tokens=2))) == 2

    def test_errors_free_it(self, model: Model) -> None:
        with model.create_session(n_ctx=len(PROMPT)) as session:
            tokens, later = session.generate(PROMPT), session.generate(PROMPT)
            assert list(tokens) == []
            with pytest.raises(ContextOverflowError):
                next(later)
            session.rewind(0)
            assert list(session.generate(PROMPT)) == []


def test_repr(model: Model) -> None:
    session = model.create_session(n_ctx=32)
    session.eval(PROMPT)
    assert repr(session) == "<Session, 8 of 32 tokens, cache f32>"
    session.close()
    assert repr(session) == "<Session, closed>"


@pytest.mark.parametrize("max_tokens", [None, -1])
def test_without_a_limit_the_context_is_filled(max_tokens: int | None, model: Model) -> None:
    with model.create_session(n_ctx=len(PROMPT) + 70) as session:
        tokens = list(session.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True))
        assert (len(tokens), session.n_past) == (70, session.n_ctx)
    assert len(model.generate([PROMPT], max_tokens=max_tokens)[0].tokens) > 0
