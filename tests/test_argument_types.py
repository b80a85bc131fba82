"""Arguments of a wrong type: each is a LlamaCliError that names it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TinyGguf
from llamacli import LlamaCliError, Model, SamplingParams, Session, load_model
from llamacli.plugins import Plugins

BAD = ["2", 5, 5.5, None, [1], {"a": 1}, b"x", object()]


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    with load_model(tiny_gguf(), plugins=plugins) as model:
        yield model


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with model.create_session() as session:
        yield session


def expect_typed(call: Callable[[Any], object], values: list[Any]) -> None:
    """Try values, which are taken or refused by a LlamaCliError."""
    for value in values:
        try:
            call(value)
        except LlamaCliError:
            pass
        except OSError:
            assert isinstance(value, str)


@pytest.mark.parametrize(
    "name", ["threads", "mode", "lora_path", "lora_scale", "load", "prompts", "overrides", "plugins"]
)
def test_load_model(name: str, tiny_gguf: TinyGguf) -> None:
    if name != "lora_scale":  # of no adapter
        with pytest.raises(LlamaCliError):
            load_model(tiny_gguf(), **{name: object()})
    expect_typed(lambda value: load_model(tiny_gguf(), **{name: value}).close(), BAD)


def test_paths(model: Model, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (load_model, model.load_adapter, session.save, session.load):
        expect_typed(call, BAD)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_texts_and_tokens(model: Model, session: Session) -> None:
    tokenizer = model.tokenizer
    for call in (
        tokenizer.encode,
        tokenizer.encode_run,
        lambda text: tokenizer.split(text, ()),
        tokenizer.decode,
        tokenizer.piece,
        tokenizer.token_text,
        session.encode,
        session.fork,
    ):
        expect_typed(call, BAD)
    for name in ("messages", "tools", "variables"):
        given = {"messages": [{"role": "user", "content": "Hi"}], "template": "x", "max_tokens": 1}
        expect_typed(lambda value, name=name, given=given: model.create_chat_completion(**given | {name: value}), BAD)
    expect_typed(lambda value: model.create_completion(value, max_tokens=1), BAD)
    expect_typed(lambda value: model.create_chat(template=value).close(), BAD)
    for message in ({"content": [{"type": []}]}, {"content": "x", "tool_calls": 5}):
        with pytest.raises(LlamaCliError):
            model.create_chat_completion([{"role": "assistant", **message}], template="x")
    for call in (session.eval, session.accept, lambda value: list(session.generate(value, max_tokens=1))):
        expect_typed(call, BAD)
    for value in BAD:
        expect_typed(lambda adapters: model.create_session(adapters=adapters).close(), [value, [value], [(value, 1)]])


@pytest.mark.parametrize("name", [field.name for field in SamplingParams.__attrs_attrs__])  # type: ignore[attr-defined]
def test_sampling_params(name: str) -> None:
    if name != "options":  # whose values are for plugins
        with pytest.raises(LlamaCliError):
            SamplingParams(**{name: object()})
    expect_typed(lambda value: SamplingParams(**{name: value}), BAD)
