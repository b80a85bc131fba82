"""Plugin for llm, on the demo model."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from llamacli.hub.demo import demo_path

llm = pytest.importorskip("llm")

from llamacli.compat.llm import ChatModel, TextEmbedder, register_embedding_models, register_models  # noqa: E402


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "HF_HOME", "LLM_USER_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model() -> Iterator[ChatModel]:
    model = ChatModel("demo")
    yield model
    assert model._model is not None
    model._model.close()


def test_names(folders: Path) -> None:
    (folders / "llamacli").mkdir()
    (folders / "llamacli" / "aliases.toml").write_text(f'mine = "{demo_path()}"\n')
    found: list[Any] = []
    register_models(found.append)
    register_embedding_models(found.append)
    assert [model.model_id for model in found][:2] == ["llamacli/demo", "llamacli/mine"]
    assert {type(model) for model in found} == {ChatModel, TextEmbedder}
    (folders / "llamacli" / "aliases.toml").write_text("=")
    register_models(found.append)
    assert found[-1].model_id != "llamacli/mine"
    project = tomllib.loads((Path(__file__).parents[2] / "core" / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["llm"]["llamacli"] == ChatModel.__module__


def test_a_conversation(model: ChatModel) -> None:
    conversation = model.conversation()
    story = conversation.prompt("Tell me a story about an owl named Ada.", temperature=0)
    assert len(list(story)) > 20
    assert "Ada" in story.text()
    assert "Ada" in conversation.prompt("Who is the story about?", temperature=0).text()
    usage = conversation.responses[-1].usage()
    assert usage.input > story.usage().output > 20


def test_schemas(model: ChatModel) -> None:
    schema = {"type": "object", "properties": {"hero": {"enum": ["fox", "owl"]}}, "required": ["hero"]}
    reply = model.prompt("Who?", schema=schema, temperature=0, max_tokens=60, system="Answer.")
    assert '"hero"' in reply.text()


def test_tools(model: ChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def boat(colour: Literal["green", "blue"]) -> str:
        """Find a boat."""
        return f"The {colour} boat is out at sea."

    model.prompt("Hello", max_tokens=1).text()
    assert model._model is not None
    given, seen = model._model.create_chat_completion, []

    def first_calls(messages: Any, **options: Any) -> Any:
        seen.append(messages)
        if len(seen) == 1:
            options["tool_choice"] = {"type": "function", "function": {"name": "boat"}}
        return given(messages, **options)

    monkeypatch.setattr(model._model, "create_chat_completion", first_calls)
    tool = llm.Tool(
        name="boat", description="Find a boat.", implementation=boat,
        input_schema={"type": "object", "properties": {"colour": {"enum": ["green", "blue"]}}, "required": ["colour"]},
    )  # fmt: skip
    text = model.chain("Where is the boat?", tools=[tool], options={"temperature": 0, "max_tokens": 100}).text()
    assert text
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "tool"]
    assert "boat is out at sea" in seen[1][-1]["content"]


def test_errors_are_llms(model: ChatModel) -> None:
    with pytest.raises(llm.ModelError, match="no such file"):
        ChatModel("missing.gguf").prompt("Hello").text()
    with pytest.raises(llm.ModelError):
        model.prompt("word " * 5000).text()


def test_embeddings() -> None:
    embedder = TextEmbedder("demo")
    one, two = embedder.embed_multi(["a fox", "an owl"])
    assert one == embedder.embed("a fox") != two
