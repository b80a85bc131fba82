"""Session creation: context length, cache types, seeds and closing."""

import gc
import weakref

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    ClosedError,
    InvalidRequestError,
    Model,
    SamplingParams,
    Session,
)
from sessions import LONG, PROMPT


def test_seq_len_is_read_at_creation(model: Model) -> None:
    before = model.create_session()
    model.config.n_ctx = 32
    assert (before.n_ctx, model.create_session().n_ctx) == (256, 32)
    assert model.create_session(n_ctx=48).n_ctx == 48


def test_lower_seq_len_takes_less_memory_and_changes_no_token(model: Model) -> None:
    whole, capped = model.create_session(), model.create_session(n_ctx=32)
    assert capped.cache.n_bytes * 8 == whole.cache.n_bytes
    generated = [[token.id for token in session.generate(PROMPT, max_tokens=20)] for session in (whole, capped)]
    assert generated[0] == generated[1]


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "head_dim"])
@pytest.mark.parametrize(("kv_type", "size"), [("f32", 4), ("f16", 2), ("bf16", 2)])
def test_cache_size_formula(variant: str, kv_type: str, size: int, load_tiny: LoadTiny) -> None:
    config = (model := load_tiny(variant)).config
    for n_ctx in (64, 1024):
        session = model.create_session(n_ctx=n_ctx, kv_type=kv_type)
        kv_dim = config.n_head_kv * config.head_dim
        assert session.cache.n_bytes == 2 * config.n_layer * n_ctx * kv_dim * size


def test_default_cache_type_by_mode(load_tiny: LoadTiny) -> None:
    types = [load_tiny("gqa", mode).create_session().cache.kv_type.k for mode in ("fp32", "auto", "q8", "q4")]
    assert types == ["f32", "f16", "f16", "f16"]


@pytest.mark.parametrize("n_ctx", [0, -1, 1 << 31, 10**30, True, 3.5, "64"])
def test_invalid_n_ctx_raises(n_ctx: object, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="n_ctx"):
        model.create_session(n_ctx=n_ctx)
    with pytest.raises(InvalidRequestError, match="n_ctx"):
        model.config.n_ctx = n_ctx


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
def test_numpy_integers_are_accepted(kind: type[np.integer], model: Model) -> None:
    model.config.n_ctx = kind(127)
    session = model.create_session(n_ctx=kind(100))
    assert (type(model.config.n_ctx), session.n_ctx) == (int, 100)
    session.set_seed(kind(7))
    assert len(list(session.generate(PROMPT, max_tokens=kind(127)))) == 100 - len(PROMPT)
    session.rewind(kind(1))
    assert session.n_past == 1


def test_unknown_cache_type(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=r"kv_type 'f8' is not one of f32, f16"):
        model.create_session(kv_type="f8")


def test_seeds(model: Model) -> None:
    def draws(**options: int) -> list[int]:
        session = model.create_session(**options)
        return [token.id for token in session.generate(PROMPT, SamplingParams(temperature=2.0), max_tokens=20)]

    assert draws() == draws(seed=1234)
    assert draws() != draws(seed=7)


def test_a_closed_session(session: Session) -> None:
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


def test_context_managers(model: Model) -> None:
    with model, model.create_session() as session:
        session.eval(PROMPT)
    with pytest.raises(ClosedError, match="model is closed"):
        model.create_session()
    with pytest.raises(ClosedError):
        session.eval([1])


def test_a_closed_model(model: Model, session: Session) -> None:
    session.eval(PROMPT)
    model.close()
    model.close()
    with pytest.raises(ClosedError, match="model is closed"):
        session.eval([1])
    assert session.n_past == len(PROMPT)


def test_closing_frees_the_cache(session: Session) -> None:
    cache = weakref.ref(session.cache)
    session.eval(PROMPT)
    session.close()
    gc.collect()
    assert cache() is None


def test_closing_the_cache_closes_its_sessions(model: Model) -> None:
    cache = model.kv_cache(2, n_ctx_seq=128)
    session = Session(model, sequence=cache.sequence(0))
    session.eval(LONG[:40])
    cache.close()
    for use in (lambda: session.eval([5]), lambda: session.cache, session.save_state):
        with pytest.raises(ClosedError):
            use()


def test_closed_sequences_are_not_shared(model: Model) -> None:
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


def test_closing_the_model_frees_the_cache(model: Model) -> None:
    pool = model.kv_pool()
    kept, late = model.create_session(), model.create_session()
    for session in (kept, late):
        session.eval(LONG[:40])
    kept.close()
    model.close()
    late.close()
    assert (pool.n_used_bytes, pool.n_bytes) == (0, 0)


def test_random_seeds(model: Model) -> None:
    def draws(seed: int | None) -> list[int]:
        with model.create_session(seed=seed) as session:
            return [token.id for token in session.generate(PROMPT, SamplingParams(temperature=2.0), max_tokens=20)]

    assert len({tuple(draws(seed)) for seed in (None, -1, None, -1)}) > 1
    session = model.create_session()
    assert session.set_seed(7) == 7
    assert session.set_seed(None) >= 0
    with pytest.raises(InvalidRequestError, match="at least 0, or None or -1 for a random one, not -2"):
        session.set_seed(-2)
