"""Saved states: restored bit for bit, or refused."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from conftest import LoadTiny
from kv_helpers import ONE, fill, new_sequence
from llamacli import Model, OutOfMemoryError, SamplingParams, StateError
from llamacli.kv import FileData, KVLayout, KVPool, KVSequence, KVSpec, snapshot
from llamacli.session import Session
from suite import slow_but

LONG = np.random.RandomState(7).randint(0, 128, 100).tolist()
RANDOM = SamplingParams(temperature=1.0, top_k=40)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


def started(model: Model, n: int = 40, **options: object) -> Session:
    session = model.create_session(reuse=False, **options)
    session.eval(LONG[:n])
    return session


def draw(session: Session) -> list[int]:
    return [token.id for token in session.generate([], RANDOM, max_tokens=12)]


@pytest.mark.parametrize("kv_type", slow_but(["f32", "f16"], ["f32", "f16", ("q8_0", "q4_1")]), ids=str)
def test_restored_session_generates_the_same_bits(kv_type: object, model: Model, tmp_path: Path) -> None:
    session = started(model, kv_type=kv_type)
    draw(session)
    n_bytes = session.save(tmp_path / "s", note={"a": [1]})
    assert n_bytes == (tmp_path / "s").stat().st_size
    assert session.state_size() == len(session.save_state())
    other = started(model, 9, kv_type=kv_type)
    assert other.load(tmp_path / "s") == {"note": {"a": [1]}}
    assert other.tokens == session.tokens
    np.testing.assert_array_equal(other.logits, session.logits)
    assert draw(other) == draw(session)
    np.testing.assert_array_equal(other.logits, session.logits)
    assert list(tmp_path.iterdir()) == [tmp_path / "s"]


def test_session_without_cached_tokens_is_restored(model: Model) -> None:
    session = started(model, strategy="disabled")
    other = model.create_session(reuse=False)
    other.load_state(session.save_state())
    assert draw(other) == draw(session)


def test_sliding_windows_are_restored() -> None:
    pool = KVPool(KVLayout.of([KVSpec(1, 4), KVSpec(1, 4, window=20)], "f32"), "me")
    one, other = KVSequence(pool, 200), KVSequence(pool, 120)
    for start in range(0, 100, 20):
        one.reserve(start, 20)
        for layer in range(2):
            x = np.random.RandomState(start + layer).normal(size=(20, 1, 4)).astype(np.float32)
            one.write(layer, start, x, -x)
        one.tokens += range(start, start + 20)
        one.evict(start + 20)
    snapshot.load(snapshot.dump({3: one}), pool).restore({3: other})
    assert (other.tokens, other.first_cells) == (one.tokens, one.first_cells)
    for layer in range(2):
        for mine, theirs in zip(other.read(layer, 100), one.read(layer, 100), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not other.can_truncate(60)
    with pytest.raises(StateError, match="100 tokens, and the context is 64"):
        snapshot.load(snapshot.dump({3: one}), pool).restore({3: KVSequence(pool, 64)})


class TestKVCache:
    def test_global_state_keeps_shared_pages_shared(self, model: Model) -> None:
        with model.kv_cache(3, n_ctx_seq=128) as cache, model.kv_cache(3, n_ctx_seq=128) as other:
            Session(model, sequence=cache.sequence(0), reuse=False).eval(LONG[:48])
            cache.seq_cp(0, 2)
            Session(model, sequence=cache.sequence(2), reuse=False).eval(LONG[48:60])
            n_used = model.kv_pool().n_used_bytes
            data = cache.global_state_save()
            assert cache.global_state_size() == len(data)
            other.global_state_load(data)
            assert model.kv_pool().n_used_bytes == 2 * n_used
            assert [other.pos_max(seq) for seq in range(3)] == [47, -1, 59]
            logits = []
            for one in (cache, other):
                session = Session(model, sequence=one.sequence(2), reuse=False)
                session.eval([1])
                logits.append(session.logits)
            np.testing.assert_array_equal(*logits)
            with (
                model.kv_cache(2, n_ctx_seq=128) as small,
                pytest.raises(StateError, match="has 3 sequences, and the cache 2"),
            ):
                small.global_state_load(data)

    def test_sequence_is_written_to_a_file_and_read(self, model: Model, tmp_path: Path) -> None:
        with model.kv_cache(2, n_ctx_seq=128) as cache:
            assert (cache.state_size(0), cache.state_save(0)) == (0, b"")
            Session(model, sequence=cache.sequence(0), reuse=False).eval(LONG[:48])
            n_bytes = cache.write_file(0, tmp_path / "s")
            assert n_bytes == cache.state_size(0) == len(cache.state_save(0)) == (tmp_path / "s").stat().st_size
            assert cache.read_file(1, tmp_path / "s") == FileData(LONG[:48], n_bytes)
            assert (cache.state_size(1), cache.pos_max(1)) == (cache.state_size(0), 47)
            state = cache.state_save(0)
            cache.clear_all()
            cache.state_load(1, state)
            assert (cache.pos_max(0), list(cache.sequence(1).tokens), cache.state_save(1)) == (-1, LONG[:48], state)
            with pytest.raises(StateError, match="damaged"):
                cache.state_load(0, state[:-1])
            cache.state_load(1, cache.state_save(0))
            assert cache.pos_max(1) == 47, "the state of an empty sequence changes nothing"
            assert (cache.state_size(0), cache.state_save(0)) == (0, b"")
            with pytest.raises(ValueError, match="sequence 0 is empty"):
                cache.write_file(0, tmp_path / "s")
            for call in (cache.write_file, cache.read_file):
                with pytest.raises(ValueError, match="the path of the state file is empty"):
                    call(1, "")
            with pytest.raises(OSError, match="none"):
                cache.read_file(0, tmp_path / "none")


def signed(data: bytes) -> bytes:
    """Replace the checksum by the correct one."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def with_header(data: bytes, **changes: object) -> bytes:
    n = struct.unpack_from("<I", data, 16)[0]
    header = json.dumps(json.loads(data[20 : 20 + n]) | changes).encode()
    return signed(data[:16] + struct.pack("<I", len(header)) + header + data[20 + n :])


class TestRefusals:
    def assert_refused(self, model: Model, session: Session, data: bytes, match: str) -> None:
        logits, tokens = session.logits.copy(), session.tokens
        with pytest.raises(StateError, match=match):
            session.load_state(data)
        assert session.tokens == tokens == tuple(session.cache.tokens)
        np.testing.assert_array_equal(session.logits, logits)

    def test_random_changes_of_the_bytes_are_refused(self, model: Model) -> None:
        data = started(model, 20).save_state()
        session = started(model, 9)
        random = np.random.default_rng(5)
        for _ in range(10_000):
            mutant = bytearray(data)
            match random.integers(4):
                case 0:
                    mutant[random.integers(len(data))] ^= 1 << random.integers(8)
                case 1:
                    del mutant[random.integers(len(data)) :]
                case 2:
                    start = random.integers(len(data))
                    del mutant[start : start + random.integers(1, 100)]
                case 3:
                    start = random.integers(len(data) + 1)
                    mutant[start:start] = random.bytes(random.integers(1, 100))
            with pytest.raises(StateError):
                snapshot.load(bytes(mutant), session.cache.pool)
        session.eval(LONG[9:12])
        np.testing.assert_array_equal(session.logits, started(model, 12).logits)

    @pytest.mark.parametrize(
        "changes",
        [
            {"n_pages": [10**9]}, {"n_pages": [-1]}, {"n_pages": []}, {"n_pages": None}, {"sequences": []},
            {"sequences": [{}]}, {"sequences": 7}, {"arrays": {"logits": [1 << 39, 1 << 39]}}, {"arrays": {"x": [0]}},
            {"arrays": []}, {"extra": []}, {"extra": {}}, {"identity": None}, {"k": "q9"}, {"states": []},
            {"extra": {"tokens": [500] * 20, "sampler": {}, "owner": {}}},
            {"extra": {"tokens": LONG[:20], "sampler": {"random": 7, "history": []}, "owner": {}}},
        ],
        ids=str,
    )  # fmt: skip
    def test_invalid_headers_with_a_right_checksum_are_refused(self, changes: dict[str, object], model: Model) -> None:
        data = started(model, 20).save_state()
        self.assert_refused(model, started(model, 9), with_header(data, **changes), ".")

    def test_page_numbers_that_do_not_match_the_tokens_are_refused(self, model: Model) -> None:
        data = started(model, 40).save_state()
        for pages, first in (([[0, 1, 3]], [0]), ([[0, 1]], [0]), ([[0, 1, 2]], [1]), ([[1, 2]], [16]), ([[]], [90])):
            n = struct.unpack_from("<I", data, 16)[0]
            saved = json.loads(data[20 : 20 + n])["sequences"][0] | {"pages": pages, "first_cells": first}
            self.assert_refused(model, started(model, 9), with_header(data, sequences=[saved]), "pages do not match")

    def test_the_error_names_what_differs(self, model: Model, load_tiny: LoadTiny) -> None:
        data = started(model, 20).save_state()
        session = started(model, 9)
        self.assert_refused(model, session, b"", "too few")
        self.assert_refused(model, session, b"x" + data[1:], "not a saved state")
        self.assert_refused(
            model, session, data[:12] + b"\1" + data[13:], "version 1 is not supported, only versions 3"
        )
        self.assert_refused(model, session, data[:-1] + bytes([data[-1] ^ 1]), "damaged")
        other = load_tiny("mha")
        self.assert_refused(other, started(other, 9), data, "another model")
        other = load_tiny("gqa", "q8")
        self.assert_refused(other, started(other, 9, kv_type="f32"), data, "another mode")
        self.assert_refused(model, started(model, 9, kv_type="f16"), data, "f32/f32, and the target's f16/f16")
        self.assert_refused(model, started(model, 9, n_ctx=16), data, "20 tokens")
        codes = started(model, 9, kv_type="q8_0")
        before = with_header(started(model, 20, kv_type="q8_0").save_state(), codes=None)
        self.assert_refused(model, codes, before, "q8_0/q8_0 as another version of llamacli orders them")

    def test_failed_allocation_empties_the_target_only(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        data = started(model, 90).save_state()
        session, other = started(model, 9), started(model, 30)
        allocated = []
        pages = session.cache.pool.groups[0]
        allocate = pages.allocate

        def refuse(table: np.ndarray, i: int) -> None:
            if len(allocated) == 3:
                raise OutOfMemoryError(1, 0)
            allocated.append(i)
            allocate(table, i)

        monkeypatch.setattr(pages, "allocate", refuse)
        with pytest.raises(OutOfMemoryError):
            session.load_state(data)
        monkeypatch.undo()
        assert (session.tokens, session.cache.tokens) == ((), [])
        other.eval(LONG[30:33])
        np.testing.assert_array_equal(other.logits, started(model, 33).logits)
        session.load_state(data)
        assert session.n_past == 90

    def test_windows_without_the_cells_of_the_next_token_are_refused(self, load_tiny: LoadTiny) -> None:
        model = load_tiny("gemma3", context_length=400)
        data = started(model, 90).save_state()
        n = struct.unpack_from("<I", data, 16)[0]
        saved = json.loads(data[20 : 20 + n])["sequences"][0]
        assert saved["first_cells"] == [80, 0]
        for first_cells in ([82, 0], [96, 0], [80, 1]):
            changed = with_header(data, sequences=[saved | {"first_cells": first_cells}])
            self.assert_refused(model, started(model, 9), changed, "pages do not match")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs an endless file")
def test_file_of_another_kind_is_refused_before_it_is_read(model: Model, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(snapshot.MAGIC[:5])
    for path, reason in (("/dev/zero", "not a saved state"), (tmp_path / "short", "5 bytes are too few")):
        with pytest.raises(StateError, match=reason):
            model.create_session().load(path)


def test_other_sessions_run_while_a_state_is_being_written(model: Model) -> None:
    session, other = started(model), started(model)
    chunks = snapshot._chunks({0: session.cache}, {}, {})
    next(chunks)
    thread = threading.Thread(target=lambda: other.eval([1]))
    thread.start()
    thread.join(60)
    assert other.n_past == 41
    chunks.close()
    assert model.kv_pool().groups[0].n_used == 2 * 3


KILLS = """
import sys, itertools
from pathlib import Path
from kills import kill_writers
from llamacli.kv import KVLayout, KVPool, KVSequence, KVSpec, snapshot

pool = KVPool(KVLayout.of([KVSpec(4, 64)] * 4, "f32"), "me")
sequences = []
for n in (300, 500):
    sequence = KVSequence(pool, 512)
    sequence.reserve(0, n)
    sequence.tokens += range(n)
    sequences.append(sequence)
path, turns = Path(sys.argv[1]), itertools.cycle(sequences)

def write():
    snapshot.write(path, {0: next(turns)})

def check():
    assert len(snapshot.read(path, pool).sequences[0].tokens) in (300, 500)

write()
kill_writers(write, check, int(sys.argv[2]), seed=7, seconds=0.03)
"""


@pytest.mark.medium
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("n", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_writer_leaves_the_old_or_the_new_state(n: int, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLS, tmp_path / "s", str(n)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True, timeout=600,
    )  # fmt: skip
    assert len([name for name in os.listdir(tmp_path) if name != "s"]) <= 1, "the next save removes a leftover"


def test_a_restored_sequence_frees_its_pages() -> None:
    sequence = new_sequence([ONE], 100)
    fill(sequence, 0, 40)
    sequence.tokens += range(40)
    data, pool = snapshot.dump({0: sequence}), sequence.pool
    assert int.from_bytes(data[12:16], "little") == snapshot.VERSION, "token 0 needs no more bytes than others"
    other = KVSequence(pool, 100)
    snapshot.load(data, pool).restore({0: other})
    assert len(other.held_pages(0)) == 3
    for one in (sequence, other):
        one.close()
    assert pool.n_used_bytes == 0
