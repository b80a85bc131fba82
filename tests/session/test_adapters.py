"""LoRA adapters in sessions, in batches and in saved states."""

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from adapters import write_adapter
from conftest import TinyGguf
from llamacli import ClosedError, InvalidRequestError, Model, Session, StateError, eval_batch, load_model
from llamacli.engine import compiled_model, default_engine
from llamacli.engine.adapters import Adapter
from llamacli.plugins import Plugins

PROMPT = [5, 9, 33, 64, 2, 7, 7, 81, 14, 3, 90, 11, 56, 23, 42, 100, 8, 17, 29]


@pytest.fixture(scope="module", params=["gqa", "lfm2", "gemma2", "qwen3moe"])
def model(request: pytest.FixtureRequest, tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    """Models with full attention, recurrent states, sliding windows and experts."""
    with load_model(tiny_gguf(request.param), "fp32", plugins=plugins, engine=default_engine()) as model:
        yield model


@pytest.fixture(scope="module")
def path(model: Model, tiny_gguf: TinyGguf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    return write_adapter(folder / "a.gguf", Path(model.metadata.source), chosen=chosen)


def chosen(name: str) -> bool:
    return "attn" in name or "ffn" in name


@pytest.fixture(scope="module")
def adapter(model: Model, path: Path) -> Adapter:
    return model.load_adapter(path)


def alone(model: Model, scale: float, adapter: Adapter, tokens: list[int] = PROMPT) -> np.ndarray:
    with model.create_session(adapters=[(adapter, scale)], reuse=False) as session:
        session.eval(tokens)
        return session.logits.copy()


def test_sessions_of_a_batch_are_as_alone(model: Model, adapter: Adapter) -> None:
    scales = [0.0, 1.0, 0.5, 1.0, 0.0]
    sessions = [model.create_session(adapters=[(adapter, scale)]) for scale in scales]
    eval_batch((session, PROMPT[: 10 + i]) for i, session in enumerate(sessions))
    for i, (session, scale) in enumerate(zip(sessions, scales, strict=True)):
        np.testing.assert_array_equal(session.logits, alone(model, scale, adapter, PROMPT[: 10 + i]))
        session.close()
    assert not np.array_equal(alone(model, 0.0, adapter), alone(model, 1.0, adapter))


def test_one_program_serves_all_scales(model: Model, adapter: Adapter) -> None:
    programs = {model.program_with(((adapter, scale),)) for scale in (0.25, 1.0, -3.0)}
    assert len(programs) == 1
    assert programs != {model.program}


def test_programs_are_kept_while_their_sessions_are_open(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(model.metadata.source)
    files = [write_adapter(tmp_path / f"{i}.gguf", source, seed=str(i), chosen=chosen) for i in range(5)]
    adapters = [model.load_adapter(file) for file in files]
    sets = [[one for i, one in enumerate(adapters) if bits >> i & 1] for bits in range(1, 21)]
    sessions = [model.create_session(adapters=some, reuse=False) for some in sets]
    programs = [weakref.ref(session.program) for session in sessions]
    with monkeypatch.context() as patch:
        patch.setattr(compiled_model, "adapted_program", lambda *_: pytest.fail("a program is compiled again"))
        for session in sessions:
            session.eval(PROMPT[:3])
        last = weakref.ref(adapters[4])
        gc.disable()
        try:
            for session in sessions:
                session.close()
            assert [program() is None for program in programs] == [True] * 19 + [False]  # the last one used is kept
            del session, sessions, sets, adapters
            assert last() is None
            assert programs[-1]() is None
        finally:
            gc.enable()


def test_prefixes_are_shared_by_equal_adapters_only(model: Model, adapter: Adapter) -> None:
    for scale in (3.0, 0.25, -1.0):  # scales of no other test, whose prefixes may be kept
        expected = alone(model, scale, adapter)
        for turn in range(2):
            with model.create_session(adapters=[(adapter, scale)]) as session:
                session.eval(PROMPT)
                assert (session.n_reused > 0) == bool(turn)
                np.testing.assert_array_equal(session.logits, expected)


def test_tokens_one_by_one_are_as_a_prompt(model: Model, adapter: Adapter) -> None:
    with model.create_session(adapters=[adapter], reuse=False) as session:
        for token in PROMPT:
            session.eval([token])
        np.testing.assert_array_equal(session.logits, alone(model, 1.0, adapter))


def test_forks_and_copies_keep_the_adapters(model: Model, adapter: Adapter) -> None:
    with model.create_session(adapters=[(adapter, 0.5)]) as session:
        session.eval(PROMPT[:-1])
        for child in (session.fork(), copy.copy(session)):
            child.eval(PROMPT[-1:])
            np.testing.assert_array_equal(child.logits, alone(model, 0.5, adapter))
            child.close()


def test_saved_states_belong_to_their_adapters(model: Model, adapter: Adapter, path: Path) -> None:
    with model.create_session(adapters=[(adapter, 0.5)]) as session:
        session.eval(PROMPT)
        state = session.save_state()
    for scale in (0.0, 1.0):
        with model.create_session(adapters=[(adapter, scale)]) as other:
            with pytest.raises(StateError, match="other LoRA adapters or scales"):
                other.load_state(state)
            assert other.n_past == 0
    again = model.load_adapter(path)  # the same content, loaded another time
    with model.create_session(adapters=[(again, 0.5)]) as session:
        session.load_state(state)
        np.testing.assert_array_equal(session.logits, alone(model, 0.5, adapter))


def test_adapters_of_the_model_are_those_of_new_sessions(path: Path, adapter: Adapter, model: Model) -> None:
    with load_model(model.metadata.source, "fp32", lora_path=path, lora_scale=0.5) as other:
        (own, scale), *rest = other.adapters
        assert (own.digest, scale, rest) == (adapter.digest, 0.5, [])
        with other.create_session() as session:
            session.eval(PROMPT)
            np.testing.assert_array_equal(session.logits, alone(model, 0.5, adapter))
        with other.create_session(adapters=[]) as session:
            session.eval(PROMPT)
            np.testing.assert_array_equal(session.logits, alone(model, 0.0, adapter))
        with pytest.raises(InvalidRequestError, match="was loaded by another model"):
            other.create_session(adapters=[adapter])


def test_wrong_scales_of_load_model_are_refused(model: Model, path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="lora_scale has 2 numbers for 1 files"):
        load_model(model.metadata.source, lora_path=[path], lora_scale=[1.0, 2.0])
    with pytest.raises(InvalidRequestError, match=r"lora_scale of .*a\.gguf must be a finite number, not 'half'"):
        load_model(model.metadata.source, lora_path=path, lora_scale="half")  # type: ignore[arg-type]


def test_closing_the_model_frees_adapted_programs(path: Path, model: Model) -> None:
    other = load_model(model.metadata.source, "fp32", lora_path=path, engine=default_engine())
    session: Session = other.create_session()
    program = weakref.ref(session.program)
    gc.disable()
    try:
        other.close()
        assert program() is None
    finally:
        gc.enable()
    with pytest.raises(ClosedError):
        session.eval(PROMPT)
