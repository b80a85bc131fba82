import hashlib

import attrs
import pytest

from conftest import LoadTiny
from llamacli import Model
from llamacli.prefix import (
    ContextManifest,
    ManifestMismatchError,
    ManifestSegment,
    PrefixSession,
    build_manifest,
    hash_bytes,
    hash_token_ids,
)
from prefix_helpers import CONFIG, OTHER, PREFIX, SUFFIX


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa", tokenizer="spm")


@pytest.fixture
def session(model: Model) -> PrefixSession:
    return PrefixSession(model, CONFIG)


class TestManifests:
    IDENTITY = ContextManifest(profile_id="p", model_digest="m", add_bos=True)

    def manifest(self, session: PrefixSession, text: str = PREFIX, **changes: object) -> ContextManifest:
        identity = attrs.evolve(self.IDENTITY, **changes)
        return build_manifest([("system", True, text)], session.tokenize, identity)

    def test_build_manifest_covers_the_whole_text(self, session: PrefixSession) -> None:
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

    def test_check_refuses_segments_that_do_not_match_the_text(self, session: PrefixSession) -> None:
        pieces = [("system", True, "once upon"), ("user", False, " a time")]
        manifest = build_manifest(pieces, session.tokenize, self.IDENTITY)
        one, other = manifest.segments
        wrong: list[tuple[tuple[ManifestSegment, ...], str]] = [
            ((one,), "do not cover"),
            ((other,), "does not begin at the end"),
            ((attrs.evolve(one, byte_hash="x"), other), "does not match its hashes"),
            ((attrs.evolve(one, stable=False), attrs.evolve(other, stable=True)), "comes after"),
            ((attrs.evolve(one, byte_end=6), attrs.evolve(other, byte_start=6)), "within a token|does not match"),
        ]
        for segments, reason in wrong:
            with pytest.raises(ManifestMismatchError, match=reason):
                attrs.evolve(manifest, segments=segments).check(PREFIX, session.tokenize)

    def test_identity_of_model_and_config(self, model: Model, session: PrefixSession, load_tiny: LoadTiny) -> None:
        manifest = build_manifest([("system", True, PREFIX)], session.tokenize, session.identity("p"))
        assert session.ensure_prefix(PREFIX, manifest).manifest_digest == manifest.digest
        assert (manifest.backend, manifest.model_digest, manifest.add_bos) == ("llamacli", model.identity, True)
        others = {
            "prompt_format": PrefixSession(model, attrs.evolve(CONFIG, prompt_format="chatml")),
            "runtime_digest": PrefixSession(model, attrs.evolve(CONFIG, kv_type="q8_0")),
            "add_bos": PrefixSession(model, attrs.evolve(CONFIG, disable_bos=True)),
            "model_digest": PrefixSession(load_tiny("mha", tokenizer="spm"), CONFIG),
        }
        for name, other in others.items():
            assert manifest.difference(other.identity("p")) == name
        assert manifest.difference(PrefixSession(model, CONFIG).identity("p")) == ""

    def test_another_identity_drops_the_context(self, session: PrefixSession) -> None:
        first = session.ensure_prefix(PREFIX, self.manifest(session))
        assert first.manifest_digest == self.manifest(session).digest
        assert session.ensure_prefix(PREFIX, self.manifest(session)).reused == first.prefix
        assert session.ensure_prefix(PREFIX, self.manifest(session, model_digest="n")).reused == 0
        assert session.ensure_prefix(PREFIX).reused == first.prefix, "the zero manifest is compatible with any"

    def test_another_text_reuses_the_common_prefix(self, session: PrefixSession) -> None:
        session.ensure_prefix(PREFIX, self.manifest(session))
        assert session.ensure_prefix(OTHER, self.manifest(session, OTHER)).reused > 0

    def test_mismatched_manifest_is_refused_and_changes_nothing(self, session: PrefixSession) -> None:
        with pytest.raises(ManifestMismatchError, match="stable_byte_hash"):
            session.ensure_prefix(OTHER, self.manifest(session))
        session.ensure_prefix(PREFIX, self.manifest(session))
        held = session.tokens
        for manifest, reason in (
            (self.manifest(session, profile_id="q"), "profile_id"),
            (self.manifest(session, OTHER), "stable_byte_hash"),
        ):
            with pytest.raises(ManifestMismatchError, match=reason):
                session.prefill_suffix(SUFFIX, manifest)
        assert session.tokens == held
        session.prefill_suffix(SUFFIX, self.manifest(session))

    def test_explain_context_reports_the_manifest(self, session: PrefixSession) -> None:
        manifest = self.manifest(session)
        status = session.ensure_prefix(PREFIX, manifest)
        report = session.explain_context()
        assert (report.manifest, report.manifest_digest) == (manifest, manifest.digest)
        assert (report.resident, report.n_ctx, report.available) == (status.resident, 128, 128 - status.resident)
        assert (report.byte_hash, report.token_hash, report.closed) == (status.byte_hash, status.token_hash, False)


def test_hash_token_ids_is_sha256_of_int64() -> None:
    assert hash_token_ids([1, 258]) == hashlib.sha256(bytes([1, *[0] * 7, 2, 1, *[0] * 6])).hexdigest()
    assert hash_token_ids([]) == hashlib.sha256(b"").hexdigest()
