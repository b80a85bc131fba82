import asyncio
import json
import threading
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from llamacli import ChatSession, InvalidRequestError, Message, SamplingParams, load_model
from llamacli.chat.functions import call, describe, described, shortened
from llamacli.chat.messages import ToolCall
from llamacli.hub.demo import demo_path
from llamacli.sampling import Draw, SamplerChain


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Forecast for a city,
    in one line.

    More that is not shown.
    """
    return f"{city} {days} {unit} {tags}"


def test_description_from_signature_and_docstring() -> None:
    assert describe(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast for a city, in one line.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }


def test_types_without_a_schema_are_errors() -> None:
    def untyped(a) -> str: ...
    def foreign(a: Path) -> str: ...
    def many(*a: str) -> str: ...
    def optional(a: Optional[float]) -> str: ...  # noqa: UP045 - the older spelling works too

    with pytest.raises(InvalidRequestError, match="untyped: the parameter a needs a type, such as str"):
        describe(untyped)
    with pytest.raises(InvalidRequestError, match="foreign: the type of a is not one of str, int, float, bool"):
        describe(foreign)
    with pytest.raises(InvalidRequestError, match="many: a tool cannot have the parameter"):
        describe(many)
    assert describe(optional)["function"]["parameters"]["properties"] == {"a": {"type": "number"}}


def test_calls_return_results_or_errors() -> None:
    functions = {"weather": weather, "bad": lambda: object()}
    assert call(functions, ToolCall("weather", {"city": "Bonn", "days": 2})) == "Bonn 2 C None"
    assert "TypeError" in call(functions, ToolCall("weather", {"town": "Bonn"}))["error"]
    assert "not JSON serializable" in call(functions, ToolCall("bad", {}))["error"]
    assert call(functions, ToolCall("time", {})) == {"error": "there is no function time; known are weather, bad"}


def test_shortened_results() -> None:
    assert shortened({"a": "é"}) == '{"a": "é"}'
    assert shortened("x" * 80) == "x" * 80
    assert shortened("x" * 81) == "x" * 77 + "..."


class City:
    """Stand-in for a Pydantic model."""

    def __init__(self, name: str):
        self.name = name

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"name": {"type": "string"}}}

    @classmethod
    def model_validate(cls, value: dict[str, str]) -> "City":
        return cls(**value)


def test_parameters_of_pydantic_models_are_instances() -> None:
    def mayor(city: City) -> str:
        return city.name

    assert describe(mayor)["function"]["parameters"]["properties"] == {"city": City.model_json_schema()}
    assert call({"mayor": mayor}, ToolCall("mayor", {"city": {"name": "Bonn"}})) == "Bonn"
    assert "TypeError" in call({"mayor": mayor}, ToolCall("mayor", {"city": {"town": "Bonn"}}))["error"]


def test_functions_and_descriptions_are_tools() -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    assert described([weather, other]) == ((describe(weather), other), {"weather": weather})
    assert described(None) == (None, {})
    assert described([]) == ((), {})
    with pytest.raises(InvalidRequestError, match="there are two tools 'weather'"):
        described([weather, weather])
    with pytest.raises(InvalidRequestError, match="a tool is"):
        described([3])  # type: ignore[list-item]


def test_chat_calls_functions_until_a_reply_calls_none() -> None:
    """Replies are given, not generated."""
    asked: list[tuple[str, Any]] = []
    with load_model(demo_path()) as model, model.create_chat(tools=[weather]) as chat:
        replies = iter(
            [
                Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Bonn"}, id="c1"),)),
                Message("assistant", "", tool_calls=(ToolCall("nothing", {}, id="c2"),)),
                Message("assistant", "Fine."),
            ]
        )

        def respond(*_: object, **__: object) -> Any:
            chat.history.append(next(replies))
            yield from ()

        chat.respond = respond  # type: ignore[method-assign]
        chat.add_user("How is the weather?")
        assert list(chat.run_tools(report=lambda wanted, result: asked.append((wanted.name, result)))) == []
        known = {"error": "there is no function nothing; known are weather"}
        assert asked == [("weather", "Bonn 1 C None"), ("nothing", known)]
        results = [message for message in chat.history if message.role == "tool"]
        assert [(message.tool_call_id, message.content) for message in results] == [
            ("c1", "Bonn 1 C None"),
            ("c2", json.dumps(known)),
        ]
        assert not chat.answer_calls()


def test_tool_choice_makes_a_reply_call() -> None:
    boats: list[str] = []

    def boat(colour: Literal["green", "blue"]) -> str:
        boats.append(colour)
        return "It lies at the pier."

    named = {"type": "function", "function": {"name": "boat"}}
    with load_model(demo_path()) as model, model.create_chat(tools=[boat], max_tokens=200) as chat:
        chat.add_user("Tell me a story.")
        text = "".join(piece.text for piece in chat.run_tools(tool_choice=named))
        assert [message.role for message in chat.history] == ["user", "assistant", "tool", "assistant"]
        assert text == chat.history[-1].content != ""
        assert boats == [chat.history[1].tool_calls[0].arguments["colour"]]
        before = len(chat.history)
        chat.add_user("Again.")
        for choice, params, said in (
            ("none", None, "use_tools"),
            ("always", None, "tool_choice is 'always'"),
            ("required", SamplingParams(grammar='root ::= "a"'), "without another"),
            ("required", SamplerChain([Draw()]), "SamplingParams"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                chat.respond(params, tool_choice=choice)
        assert len(chat.history) == before + 1
        chat.use_tools(None)
        with pytest.raises(InvalidRequestError, match="required needs tools"):
            chat.respond(tool_choice="required")


def test_functions_are_called_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def boat(colour: Literal["green", "blue"]) -> str:
        threads.append(threading.current_thread())
        return "It lies at the pier."

    async def reply(chat: ChatSession) -> str:
        named = {"type": "function", "function": {"name": "boat"}}
        return "".join([piece.text async for piece in chat.run_tools_async(tool_choice=named, max_rounds=1)])

    with load_model(demo_path()) as model, model.create_chat(tools=[boat], max_tokens=200) as chat:
        chat.add_user("Tell me a story.")
        text = asyncio.run(reply(chat))
        assert [message.role for message in chat.history] == ["user", "assistant", "tool", "assistant"]
        assert text == chat.history[-1].content != ""
        assert threads
        assert threading.main_thread() not in threads


def test_tools_are_a_list_of_functions_that_return() -> None:
    async def later(city: str) -> str:
        return city

    with pytest.raises(InvalidRequestError, match="tools is a list: put a single one into a list"):
        described(weather)  # type: ignore[arg-type]
    with load_model(demo_path()) as model, pytest.raises(InvalidRequestError, match="tool later is a coroutine"):
        model.create_chat(tools=[later])
