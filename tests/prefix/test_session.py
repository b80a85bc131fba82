import hashlib
import threading
from unittest import mock

import attrs
import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import ContextOverflowError, InvalidRequestError, Model, OutOfMemoryError, PromptLookup
from llamacli.prefix import (
    CancelledError,
    DecodeConfig,
    PrefixConfig,
    PrefixSession,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
    hash_token_ids,
)
from prefix_helpers import CONFIG, OTHER, PREFIX, SUFFIX, CancelAfter

GREEDY = DecodeConfig(max_tokens=8, temperature=0.0)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa", tokenizer="spm")


@pytest.fixture
def session(model: Model) -> PrefixSession:
    return PrefixSession(model, CONFIG)


def text_of(session: PrefixSession, config: DecodeConfig = GREEDY) -> str:
    chunks = list(session.decode(config))
    assert all(chunk.error is None for chunk in chunks)
    return "".join(chunk.text for chunk in chunks)


def test_drafters_do_not_change_the_text(session: PrefixSession, model: Model) -> None:
    session.ensure_prefix(PREFIX)
    session.prefill_suffix(SUFFIX)
    expected = text_of(session)
    with PrefixSession(model, CONFIG) as other:
        other.ensure_prefix(PREFIX)
        other.prefill_suffix(SUFFIX)
        drafter = PromptLookup(min_ngram=1)
        assert "".join(chunk.text for chunk in other.decode(GREEDY, speculate=drafter)) == expected
        assert len(drafter._tokens) > 1
        assert other.tokens == session.tokens


def cold(model: Model, *texts: str) -> tuple[str, np.ndarray]:
    """Text and logits of a new session that reuses nothing."""
    model.prefix_cache_bytes = 0
    session = PrefixSession(model, CONFIG)
    session._session._prefixes = None
    session.ensure_prefix(texts[0])
    for text in texts[1:]:
        session.prefill_suffix(text)
    return text_of(session), session._session.logits


class TestReuse:
    def test_prefix_is_evaluated_once(self, model: Model, session: PrefixSession) -> None:
        n = len(model.encode(PREFIX))
        first = session.ensure_prefix(PREFIX)
        assert (first.reused, first.prefilled, first.dropped, first.prefix, first.resident) == (0, n, 0, n, n)
        assert first.available == 128 - n
        assert first.token_hash == hash_token_ids(model.encode(PREFIX))
        assert first.byte_hash == hashlib.sha256(PREFIX.encode()).hexdigest()
        session.prefill_suffix(SUFFIX)
        text_of(session)
        held = len(session.tokens)
        again = session.ensure_prefix(PREFIX)
        assert (again.reused, again.prefilled, again.dropped, again.resident) == (n, 0, held - n, n)

    def test_reused_prefix_gives_bit_equal_logits(self, model: Model, session: PrefixSession) -> None:
        for prefix in (PREFIX, OTHER, PREFIX, PREFIX):
            session.ensure_prefix(prefix)
            session.prefill_suffix(SUFFIX)
            warm = text_of(session)
            expected = cold(model, prefix, SUFFIX)
            assert warm == expected[0]
            np.testing.assert_array_equal(session._session.logits, expected[1])

    def test_decode_after_a_fully_reused_prefix(self, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        first = text_of(session)
        session.ensure_prefix(PREFIX)
        assert text_of(session) == first == cold(model, PREFIX)[0]

    def test_interrupted_decode_after_a_fully_reused_prefix(
        self, session: PrefixSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session.ensure_prefix(PREFIX)
        first, tokens = text_of(session), session.tokens
        session.ensure_prefix(PREFIX)
        chunks = session.decode(GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr("llamacli.generation.stream.evaluate", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(chunks)
        assert text_of(session) == first
        assert session.tokens == tokens

    def test_text_goes_on_after_a_decode_without_tokens(
        self, model: Model, session: PrefixSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session.ensure_prefix(PREFIX)
        with monkeypatch.context() as patch:
            patch.setattr("llamacli.Session.draw", lambda *_: model.tokenizer.eos_id)
            assert text_of(session) == ""
        session.prefill_suffix(SUFFIX)
        assert list(session.tokens) == model.encode(PREFIX + SUFFIX)

    def test_suffixes_tokenize_as_the_whole_text(self, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        parts = [session.prefill_suffix(part) for part in (" there", " once", " upon")]
        assert list(session.tokens) == model.encode(PREFIX + " there once upon")
        assert sum(part.suffix for part in parts) + parts[0].prefix == parts[-1].resident == len(session.tokens)

    def test_sliding_windows_can_return_to_the_prefix(self, load_tiny: LoadTiny) -> None:
        model = load_tiny("gemma3", tokenizer="spm", n_layer=6, context_length=400)
        model.prefix_cache_bytes = 0
        session = PrefixSession(model, attrs.evolve(CONFIG, n_ctx=400))
        prefix, alone = PREFIX * 10, PrefixSession(model, attrs.evolve(CONFIG, n_ctx=400))
        n = len(model.encode(prefix))
        alone._session._prefixes = None
        for reused in (0, n - 1, n - 1):
            status = session.ensure_prefix(prefix)
            assert (status.reused, status.prefilled, status.resident) == (reused, n - reused, n)
            session.prefill_suffix(SUFFIX * 20)
            alone.ensure_prefix(prefix)
            alone.prefill_suffix(SUFFIX * 20)
            assert text_of(session) == text_of(alone)
            np.testing.assert_array_equal(session._session.logits, alone._session.logits)
        assert session.ensure_prefix(PREFIX * 5).reused == 0, "but to no shorter prefix"
        session.prefill_suffix(SUFFIX * 20)
        held = session.tokens
        with pytest.raises(CancelledError):
            session.prefill_suffix(SUFFIX * 20, cancel=CancelAfter(5))
        assert session.tokens == held
        alone.ensure_prefix(PREFIX * 5)
        alone.prefill_suffix(SUFFIX * 20)
        assert text_of(session) == text_of(alone)

    def test_generated_tokens_are_part_of_the_context(self, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        n = len(session.tokens)
        text_of(session)
        assert len(session.tokens) == n + 8
        session.prefill_suffix(" upon")
        assert len(session.tokens) > n + 8

    def test_bos_is_added_at_the_start_of_the_context_only(self, model: Model) -> None:
        bos = model.tokenizer.bos_id
        session = PrefixSession(model, CONFIG)
        session.prefill_suffix(PREFIX)
        assert list(session.tokens) == model.encode(PREFIX)
        session.prefill_suffix(SUFFIX)
        assert session.tokens.count(bos) == 1
        without = PrefixSession(model, attrs.evolve(CONFIG, disable_bos=True))
        without.ensure_prefix(PREFIX)
        assert bos not in without.tokens


class TestErrors:
    def test_overflow_changes_nothing(self, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        held = session.tokens
        for stage, call, resident in (
            ("prefix", session.ensure_prefix, 0),
            ("suffix", session.prefill_suffix, len(held)),
        ):
            with pytest.raises(ContextOverflowError, match=stage) as raised:
                call("once upon " * 100)
            assert (raised.value.stage, raised.value.n_past, raised.value.n_ctx) == (stage, resident, 128)
        assert session.tokens == held

    def test_decode_needs_tokens_and_room(self, model: Model, session: PrefixSession) -> None:
        with pytest.raises(ContextOverflowError, match="decode"):
            session.decode()
        small = PrefixSession(model, attrs.evolve(CONFIG, n_ctx=len(model.encode(PREFIX)) // 2 * 2 + 4))
        small.ensure_prefix(PREFIX)
        assert 0 < len(list(small.decode(DecodeConfig(temperature=0.0)))) <= 5, "ends when the context is full"
        with pytest.raises(ContextOverflowError, match="decode"):
            small.decode()

    @pytest.mark.parametrize("stage", ["prefix", "suffix"])
    def test_cancelling_rolls_back_the_context(self, stage: str, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        n_common = len(model.encode("once upon"))
        held = session.tokens
        call, text = {
            "prefix": (session.ensure_prefix, "once upon" + " me" * 20),
            "suffix": (session.prefill_suffix, SUFFIX * 5),
        }[stage]
        with pytest.raises(CancelledError):
            call(text, cancel=CancelAfter(2))
        assert session.tokens == (held[:n_common] if stage == "prefix" else held)
        session.ensure_prefix(PREFIX)
        assert text_of(session) == cold(model, PREFIX)[0]

    def test_cancelling_ends_the_stream_with_an_error(self, session: PrefixSession) -> None:
        cancel = threading.Event()
        session.ensure_prefix(PREFIX)
        chunks = []
        for chunk in session.decode(GREEDY, cancel=cancel):
            chunks.append(chunk)
            if len(chunks) == 3:
                cancel.set()
        assert isinstance(chunks[-1].error, CancelledError)
        assert len(chunks) == 4

    def test_invalid_cancel_leaves_the_session_usable(self, session: PrefixSession) -> None:
        for call in (
            lambda: session.ensure_prefix(PREFIX, cancel=5),
            lambda: session.prefill_suffix(SUFFIX, cancel=5),
            lambda: session.decode(cancel=5),
        ):
            with pytest.raises(InvalidRequestError, match=r"cancel must have an is_set method.*: 5"):
                call()
        session.ensure_prefix(PREFIX)
        assert text_of(session) == cold(session.model, PREFIX)[0]

    def test_engine_failure_is_fatal(self, session: PrefixSession, monkeypatch: pytest.MonkeyPatch) -> None:
        session.ensure_prefix(PREFIX)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the first cause")

        monkeypatch.setattr("llamacli.generation.stream.evaluate", fail)
        with pytest.raises(SessionFatalError, match="first cause"):
            session.prefill_suffix(SUFFIX)
        monkeypatch.undo()
        for call in (lambda: session.ensure_prefix(PREFIX), lambda: session.decode(), session.explain_context):
            with pytest.raises(SessionFatalError, match="first cause"):
                call()

    def test_closed_session_only_explains(self, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        n = len(session.tokens)
        session.close()
        session.close()
        for call in (
            lambda: session.ensure_prefix(PREFIX),
            lambda: session.prefill_suffix("a"),
            session.decode,
            session.identity,
            lambda: session.tokens,
            lambda: session.tokenize("a", True),
        ):
            with pytest.raises(SessionClosedError):
                call()
        report = session.explain_context()
        assert (report.closed, report.resident, report.prefix) == (True, n, n)

    @pytest.mark.parametrize("n_before", [0, 3])
    def test_close_interrupts_a_stream(self, session: PrefixSession, n_before: int) -> None:
        session.ensure_prefix(PREFIX)
        stream = session.decode(GREEDY)
        before = [next(stream).error for _ in range(n_before)]
        session.close()
        (last,) = stream
        assert before == [None] * n_before
        assert isinstance(last.error, SessionClosedError)

    def test_memory_that_ends_while_generating_is_fatal(
        self, session: PrefixSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session.ensure_prefix(PREFIX)

        def fail(*_: object, **__: object) -> None:
            raise OutOfMemoryError(5, 1)

        monkeypatch.setattr("llamacli.generation.stream.evaluate", fail)
        *_, last = session.decode(GREEDY)
        monkeypatch.undo()
        assert isinstance(last.error, SessionFatalError)
        assert isinstance(last.error.cause, OutOfMemoryError)
        with pytest.raises(SessionFatalError, match="needs 5 bytes"):
            session.ensure_prefix(PREFIX)

    def test_prompt_formats_are_found_without_hyphens_and_case(self, model: Model) -> None:
        spelled = [PrefixSession(model, PrefixConfig(prompt_format=name)) for name in ("llama-3", "llama3", "Llama3")]
        assert {session.identity().prompt_format for session in spelled} == {"llama-3"}

    def test_unsupported_features_and_types_are_refused(self, model: Model) -> None:
        for options in ({"n_gpu_layers": 1}, {"tensor_split": (0.5,)}):
            with pytest.raises(UnsupportedFeatureError, match="GPU"):
                PrefixConfig(**options)
        with pytest.raises(UnsupportedFeatureError, match="'smoke signals'"):
            PrefixSession(model, PrefixConfig(prompt_format="smoke signals"))
        with pytest.raises(InvalidRequestError, match="kv_type"):
            PrefixSession(model, PrefixConfig(kv_type="q9"))
        PrefixSession(model, PrefixConfig(kv_type="q8_0", prompt_format="chatml"))

    @pytest.mark.parametrize("name", ["n_ctx", "n_batch", "threads"])
    def test_invalid_numbers_are_refused(self, name: str) -> None:
        for wrong in (None, "8", 1.5, float("nan"), True):
            with pytest.raises(InvalidRequestError, match=r"integer"):
                PrefixConfig(**{name: wrong})
        for wrong in (1, 1 << 40):
            with pytest.raises(InvalidRequestError, match="n_ctx must be 0 or from 2"):
                PrefixConfig(n_ctx=wrong)
        with pytest.raises(InvalidRequestError, match="the default 256"):
            DecodeConfig(max_tokens=1.5)

    def test_defaults(self) -> None:
        config = PrefixConfig(n_ctx=-1, n_batch=0)
        assert (config.n_ctx, config.n_batch, PrefixConfig(n_ctx=129).n_ctx) == (8192, 512, 128)
        params = DecodeConfig().params()
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.8, 0.9, 40, 0.05)
        assert (DecodeConfig(temperature=0.0, top_k=0).params().temperature, DecodeConfig(top_k=0).params().top_k) == (
            0,
            0,
        )
        assert DecodeConfig(max_tokens=0).max_tokens == 256


def test_stop_strings_end_the_text(session: PrefixSession) -> None:
    session.ensure_prefix(PREFIX)
    whole = text_of(session)
    stop = whole[3:5]
    session.ensure_prefix(PREFIX)
    assert text_of(session, attrs.evolve(GREEDY, stop=stop)) == whole.partition(stop)[0]
    assert len(session.tokens) < len(session.model.encode(PREFIX)) + GREEDY.max_tokens
    session.prefill_suffix(SUFFIX)
    assert text_of(session)
