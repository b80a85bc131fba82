import hashlib
import threading

import attrs
import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import Model, errors
from llamacli.prefix import (
    ContextManifest,
    DecodeConfig,
    ManifestSegment,
    PrefixConfig,
    PrefixSession,
    build_manifest,
    embed,
    embed_available,
    hash_bytes,
    hash_token_ids,
    new_session,
    session_available,
    set_embed_function,
    set_session_factory,
)

PREFIX, OTHER, SUFFIX = "once upon a time", "once upon me", " there once"
GREEDY = DecodeConfig(max_tokens=8, temperature=0.0)
CONFIG = PrefixConfig(num_ctx=128, num_batch=4)


class After:
    """Cancels when it is asked for the nth time."""

    def __init__(self, n: int):
        self.n = n

    def is_set(self) -> bool:
        self.n -= 1
        return self.n < 0


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


def cold(model: Model, *texts: str) -> tuple[str, np.ndarray]:
    """What a session that has never seen anything makes of a prefix and suffixes."""
    model.prefix_cache_bytes = 0
    session = PrefixSession(model, CONFIG)
    session._session._prefixes = None
    session.ensure_prefix(texts[0])
    for text in texts[1:]:
        session.prefill_suffix(text)
    return text_of(session), session._session.logits


class TestWarmth:
    def test_a_prefix_is_evaluated_once(self, model: Model, session: PrefixSession) -> None:
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

    def test_warm_is_cold_bit_for_bit(self, model: Model, session: PrefixSession) -> None:
        for prefix in (PREFIX, OTHER, PREFIX, PREFIX):
            session.ensure_prefix(prefix)
            session.prefill_suffix(SUFFIX)
            warm = text_of(session)
            expected = cold(model, prefix, SUFFIX)
            assert warm == expected[0]
            np.testing.assert_array_equal(session._session.logits, expected[1])

    def test_a_full_hit_draws_from_the_last_token_anew(self, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        first = text_of(session)
        session.ensure_prefix(PREFIX)
        assert text_of(session) == first == cold(model, PREFIX)[0]

    def test_suffixes_add_up_to_the_whole_text(self, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        parts = [session.prefill_suffix(part) for part in (" there", " once", " upon")]
        assert list(session.tokens) == model.encode(PREFIX + " there once upon")
        assert sum(part.suffix for part in parts) + parts[0].prefix == parts[-1].resident == len(session.tokens)

    def test_sliding_windows_come_back_to_the_prefix(self, load_tiny: LoadTiny) -> None:
        model = load_tiny("gemma3", tokenizer="spm", n_layer=6, context_length=400)
        model.prefix_cache_bytes = 0
        session = PrefixSession(model, attrs.evolve(CONFIG, num_ctx=400))
        prefix, alone = PREFIX * 10, PrefixSession(model, attrs.evolve(CONFIG, num_ctx=400))
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
        assert session.ensure_prefix(PREFIX * 5).reused == 0, "and to nowhere else"
        session.prefill_suffix(SUFFIX * 20)
        held = session.tokens
        with pytest.raises(errors.CancelledError):
            session.prefill_suffix(SUFFIX * 20, cancel=After(5))
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

    def test_bos_only_where_a_context_begins(self, model: Model) -> None:
        bos = model.tokenizer.bos_id
        session = PrefixSession(model, CONFIG)
        session.prefill_suffix(PREFIX)
        assert list(session.tokens) == model.encode(PREFIX)
        session.prefill_suffix(SUFFIX)
        assert session.tokens.count(bos) == 1
        without = PrefixSession(model, attrs.evolve(CONFIG, disable_bos=True))
        without.ensure_prefix(PREFIX)
        assert bos not in without.tokens


class TestRefusals:
    def test_overflow_changes_nothing(self, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        held = session.tokens
        for stage, call, resident in (
            ("prefix", session.ensure_prefix, 0),
            ("suffix", session.prefill_suffix, len(held)),
        ):
            with pytest.raises(errors.ContextOverflowError, match=stage) as raised:
                call("once upon " * 100)
            assert (raised.value.stage, raised.value.n_past, raised.value.seq_len) == (stage, resident, 128)
        assert session.tokens == held

    def test_there_must_be_something_to_decode_from_and_room(self, model: Model, session: PrefixSession) -> None:
        with pytest.raises(errors.ContextOverflowError, match="decode"):
            session.decode()
        small = PrefixSession(model, attrs.evolve(CONFIG, num_ctx=len(model.encode(PREFIX)) // 2 * 2 + 4))
        small.ensure_prefix(PREFIX)
        assert 0 < len(list(small.decode(DecodeConfig(temperature=0.0)))) <= 5, "a full context ends quietly"
        with pytest.raises(errors.ContextOverflowError, match="decode"):
            small.decode()

    @pytest.mark.parametrize("stage", ["prefix", "suffix"])
    def test_cancelling_rolls_back(self, stage: str, model: Model, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        n_common = len(model.encode("once upon"))
        held = session.tokens
        call, text = {
            "prefix": (session.ensure_prefix, "once upon" + " me" * 20),
            "suffix": (session.prefill_suffix, SUFFIX * 5),
        }[stage]
        with pytest.raises(errors.CancelledError):
            call(text, cancel=After(2))
        assert session.tokens == (held[:n_common] if stage == "prefix" else held)
        session.ensure_prefix(PREFIX)
        assert text_of(session) == cold(model, PREFIX)[0]

    def test_cancelling_a_stream(self, session: PrefixSession) -> None:
        cancel = threading.Event()
        session.ensure_prefix(PREFIX)
        chunks = []
        for chunk in session.decode(GREEDY, cancel=cancel):
            chunks.append(chunk)
            if len(chunks) == 3:
                cancel.set()
        assert isinstance(chunks[-1].error, errors.CancelledError)
        assert len(chunks) == 4

    def test_what_cannot_be_asked_poisons_nothing(self, session: PrefixSession) -> None:
        for call in (
            lambda: session.ensure_prefix(PREFIX, cancel=5),
            lambda: session.prefill_suffix(SUFFIX, cancel=5),
            lambda: session.decode(cancel=5),
        ):
            with pytest.raises(errors.InvalidRequestError, match="cancel has no is_set: 5"):
                call()
        session.ensure_prefix(PREFIX)
        assert text_of(session) == cold(session.model, PREFIX)[0]

    def test_a_failure_poisons(self, session: PrefixSession, monkeypatch: pytest.MonkeyPatch) -> None:
        session.ensure_prefix(PREFIX)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the first cause")

        monkeypatch.setattr("llamacli.session.evaluate", fail)
        with pytest.raises(errors.SessionFatalError, match="first cause"):
            session.prefill_suffix(SUFFIX)
        monkeypatch.undo()
        for call in (lambda: session.ensure_prefix(PREFIX), lambda: session.decode(), session.explain_context):
            with pytest.raises(errors.SessionFatalError, match="first cause"):
                call()

    def test_closed(self, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX)
        n = len(session.tokens)
        session.close()
        session.close()
        for call in (lambda: session.ensure_prefix(PREFIX), lambda: session.prefill_suffix("a"), session.decode):
            with pytest.raises(errors.SessionClosedError):
                call()
        report = session.explain_context()
        assert (report.closed, report.resident, report.prefix) == (True, n, n)

    def test_what_is_left_out(self, model: Model) -> None:
        for options in ({"num_gpu_layers": 1}, {"tensor_split": (0.5,)}):
            with pytest.raises(errors.UnsupportedFeatureError, match="GPU"):
                PrefixConfig(**options)
        with pytest.raises(errors.UnsupportedFeatureError, match="'smoke signals'"):
            PrefixSession(model, PrefixConfig(prompt_format="smoke signals"))
        with pytest.raises(errors.InvalidRequestError, match="kv_type"):
            PrefixSession(model, PrefixConfig(kv_cache_type="q9"))
        PrefixSession(model, PrefixConfig(kv_cache_type="q8_0", prompt_format="chatml"))

    @pytest.mark.parametrize("name", ["num_ctx", "num_batch", "num_threads"])
    def test_numbers_are_integers(self, name: str) -> None:
        for wrong in (None, "8", 1.5, float("nan"), True):
            with pytest.raises(errors.InvalidRequestError, match=r"integer"):
                PrefixConfig(**{name: wrong})
        for wrong in (1, 1 << 40):
            with pytest.raises(errors.InvalidRequestError, match="num_ctx must be 0 or from 2"):
                PrefixConfig(num_ctx=wrong)
        with pytest.raises(errors.InvalidRequestError, match="stands for 256"):
            DecodeConfig(max_tokens=1.5)

    def test_defaults(self) -> None:
        config = PrefixConfig(num_ctx=-1, num_batch=0)
        assert (config.num_ctx, config.num_batch, PrefixConfig(num_ctx=129).num_ctx) == (8192, 512, 128)
        params = DecodeConfig().params()
        assert (params.temp, params.top_p, params.top_k, params.min_p) == (0.8, 0.9, 40, 0.05)
        assert (DecodeConfig(temperature=0.0, top_k=0).params().temp, DecodeConfig(top_k=0).params().top_k) == (0, 0)
        assert DecodeConfig(max_tokens=0).max_tokens == 256


class TestManifests:
    IDENTITY = ContextManifest(profile_id="p", model_digest="m", add_bos=True)

    def manifest(self, session: PrefixSession, text: str = PREFIX, **changes: object) -> ContextManifest:
        identity = attrs.evolve(self.IDENTITY, **changes)
        return build_manifest([("system", True, text)], session.tokenize, identity)

    def test_building_one(self, session: PrefixSession) -> None:
        pieces = [("system", True, "once upon"), ("rules", True, " a time"), ("user", False, SUFFIX)]
        manifest = build_manifest(pieces, session.tokenize, self.IDENTITY)
        whole = session.tokenize(PREFIX + SUFFIX, True)
        stable = session.tokenize(PREFIX, True)
        assert [segment.kind for segment in manifest.segments] == ["system", "rules", "user"]
        assert manifest.segments[-1].token_end == len(whole)
        assert (manifest.stable_bytes, manifest.total_bytes) == (len(PREFIX), len(PREFIX + SUFFIX))
        assert manifest.stable_byte_hash == hash_bytes(PREFIX)
        assert manifest.stable_token_hash == hash_token_ids(stable)
        assert manifest.volatile_token_hash == hash_token_ids(whole[len(stable) :])
        assert (ContextManifest().digest, len(manifest.digest)) == ("", 64)
        assert attrs.evolve(manifest, profile_id="q").digest != manifest.digest

    def test_segments_must_fit_the_text(self, session: PrefixSession) -> None:
        pieces = [("system", True, "once upon"), ("user", False, " a time")]
        manifest = build_manifest(pieces, session.tokenize, self.IDENTITY)
        one, other = manifest.segments
        wrong: list[tuple[tuple[ManifestSegment, ...], str]] = [
            ((one,), "do not cover"),
            ((other,), "does not begin where"),
            ((attrs.evolve(one, byte_hash="x"), other), "another content"),
            ((attrs.evolve(one, stable=False), attrs.evolve(other, stable=True)), "comes after"),
            ((attrs.evolve(one, byte_end=6), attrs.evolve(other, byte_start=6)), "within a token|another content"),
        ]
        for segments, reason in wrong:
            with pytest.raises(errors.ManifestMismatchError, match=reason):
                attrs.evolve(manifest, segments=segments).check(PREFIX, session.tokenize)

    def test_a_session_says_who_it_is(self, model: Model, session: PrefixSession, load_tiny: LoadTiny) -> None:
        manifest = build_manifest([("system", True, PREFIX)], session.tokenize, session.identity("p"))
        assert session.ensure_prefix(PREFIX, manifest).manifest_digest == manifest.digest
        assert (manifest.backend, manifest.model_digest, manifest.add_bos) == ("llamacli", model.identity, True)
        others = {
            "prompt_format": PrefixSession(model, attrs.evolve(CONFIG, prompt_format="chatml")),
            "runtime_digest": PrefixSession(model, attrs.evolve(CONFIG, kv_cache_type="q8_0")),
            "add_bos": PrefixSession(model, attrs.evolve(CONFIG, disable_bos=True)),
            "model_digest": PrefixSession(load_tiny("mha", tokenizer="spm"), CONFIG),
        }
        for name, other in others.items():
            assert manifest.difference(other.identity("p")) == name
        assert manifest.difference(PrefixSession(model, CONFIG).identity("p")) == ""

    def test_another_identity_starts_anew(self, session: PrefixSession) -> None:
        first = session.ensure_prefix(PREFIX, self.manifest(session))
        assert first.manifest_digest == self.manifest(session).digest
        assert session.ensure_prefix(PREFIX, self.manifest(session)).reused == first.prefix
        assert session.ensure_prefix(PREFIX, self.manifest(session, model_digest="n")).reused == 0
        assert session.ensure_prefix(PREFIX).reused == first.prefix, "no manifest fits any"

    def test_other_stable_bytes_share_what_they_begin_with(self, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX, self.manifest(session))
        assert session.ensure_prefix(OTHER, self.manifest(session, OTHER)).reused > 0

    def test_mismatches(self, session: PrefixSession) -> None:
        with pytest.raises(errors.ManifestMismatchError, match="another text"):
            session.ensure_prefix(OTHER, self.manifest(session))
        session.ensure_prefix(PREFIX, self.manifest(session))
        held = session.tokens
        for manifest, reason in (
            (self.manifest(session, profile_id="q"), "profile_id"),
            (self.manifest(session, OTHER), "stable_byte_hash"),
        ):
            with pytest.raises(errors.ManifestMismatchError, match=reason):
                session.prefill_suffix(SUFFIX, manifest)
        assert session.tokens == held
        session.prefill_suffix(SUFFIX, self.manifest(session))

    def test_the_report(self, session: PrefixSession) -> None:
        manifest = self.manifest(session)
        status = session.ensure_prefix(PREFIX, manifest)
        report = session.explain_context()
        assert (report.manifest, report.manifest_digest) == (manifest, manifest.digest)
        assert (report.resident, report.num_ctx, report.available) == (status.resident, 128, 128 - status.resident)
        assert (report.byte_hash, report.token_hash, report.closed) == (status.byte_hash, status.token_hash, False)


def test_hashing_ids() -> None:
    assert hash_token_ids([1, 258]) == hashlib.sha256(bytes([1, *[0] * 7, 2, 1, *[0] * 6])).hexdigest()
    assert hash_token_ids([]) == hashlib.sha256(b"").hexdigest()


def test_errors_name_what_they_mean() -> None:
    nested = errors.ManifestMismatchError(str(errors.ManifestMismatchError("because")))
    assert (str(nested), nested.reason) == ("manifest mismatch: because", "because")
    assert (str(errors.UnsupportedFeatureError()), errors.UnsupportedFeatureError("tools").feature) == (
        "unsupported feature", "tools",
    )  # fmt: skip


class TestRegistry:
    @pytest.fixture(autouse=True)
    def restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import llamacli.prefix.registry as registry

        for name in ("_factory", "_embedder"):
            monkeypatch.setattr(registry, name, list(getattr(registry, name)))

    def test_sessions(self, model: Model) -> None:
        assert session_available()
        set_session_factory(lambda path, config: PrefixSession(model, config))
        assert new_session("any", CONFIG).config is CONFIG
        set_session_factory(None)
        assert not session_available()
        with pytest.raises(errors.SessionUnavailableError, match="factory"):
            new_session("any")

    def test_embeddings(self) -> None:
        assert embed_available()
        set_embed_function(lambda path, config, text: [len(text)])
        assert embed("any", "abc") == [3]
        set_embed_function(None)
        assert not embed_available()
        with pytest.raises(errors.SessionUnavailableError, match="embedding"):
            embed("any", "abc")
