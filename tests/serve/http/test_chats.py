"""Chat requests with templates of real models, answered by the demo model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamacli import Model, load_model
from llamacli.chat.messages import Piece, ToolCall
from llamacli.hub.demo import demo_path
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.chats import Prompt, as_dicts, chat_prompt, tool_use
from llamacli.serve.http.constraints import chain
from llamacli.serve.http.generation import sampling_params
from llamacli.serve.http.schemas.chat import ChatMessage, ChatRequest
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.requests import ModelInfo

pytest.importorskip("llguidance")

HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find the fox."}]
ANIMAL = {"enum": ["fox", "owl"]}
PARAMETERS = {"type": "object", "properties": {"animal": ANIMAL}, "required": ["animal"], "additionalProperties": False}
FIND = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": PARAMETERS}}

JSON_CALLS = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "openai-gpt-oss-120b",
]
"""Templates whose format is detected with the demo model's vocabulary, and whose calls are JSON."""

OWN_CALLS = ["google-gemma-4-31B-it", "mistralai-Mistral-Nemo-Instruct-2407"]
"""Templates whose calls have a notation of their own, which is derived from them or known."""

OTHERS = ["HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"]
"""Templates without tools, which have the generic notation."""


@pytest.fixture(scope="module")
def model(plugins) -> Model:
    with load_model(demo_path(), plugins=plugins) as model:
        yield model


@pytest.fixture
def prepare(model: Model, shared: Callable[[str], Path]) -> Callable[..., Prompt]:
    """Prepare a chat request with a template of `shared/templates`."""

    def make(template: str, **fields: Any) -> tuple[Prompt, ChatRequest]:
        source = shared(f"templates/{template}.jinja").read_text()
        request = convert({"messages": HI, **fields}, ChatRequest)
        info = ModelInfo(name="demo", path="", status="loaded", created=0, n_ctx=4096)
        return chat_prompt(request, model, info, HttpSettings(template=source)), request

    return make


def replied(model: Model, prompt: Prompt, request: ChatRequest, n: int = 400) -> tuple[str, list[ToolCall]]:
    """Text and tool calls of a generated reply."""
    sampler = chain(model, sampling_params(HttpSettings(), request, model, 4096, prompt.constraint))
    reader = prompt.reply.syntax.reader(prompt.reply.prompt, tools=prompt.reply.tools)
    events = []
    with model.create_session(n_ctx=4096, seed=1) as session:
        for token in session.generate(list(prompt.ids), sampler, max_tokens=n):
            if token.id in prompt.reply.end_ids:
                break
            events += reader.feed(token.piece or prompt.reply.markers.get(token.id, ""))
    events += reader.flush()
    text = "".join(event.text for event in events if isinstance(event, Piece) and not event.reasoning)
    return text, [event for event in events if isinstance(event, ToolCall)]


@pytest.mark.parametrize("template", [*JSON_CALLS, *OWN_CALLS, *OTHERS])
def test_required_calls(template: str, prepare, model: Model) -> None:
    options = {"tools": [FIND], "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": False}
    prompt, request = prepare(template, **options)
    _, calls = replied(model, prompt, request)
    assert calls
    assert {call.name for call in calls} == {"find"}
    assert all(call.arguments["animal"] in ANIMAL["enum"] for call in calls)


@pytest.mark.parametrize(
    "template", [*JSON_CALLS[:-1], *OWN_CALLS, *OTHERS]
)  # the last one may think for as long as it likes
def test_schemas(template: str, prepare, model: Model) -> None:
    prompt, request = prepare(template, json_schema=PARAMETERS, enable_thinking=False)
    text, _ = replied(model, prompt, request)
    assert json.loads(text)["animal"] in ANIMAL["enum"]


@pytest.mark.parametrize("template", [*JSON_CALLS, "google-gemma-4-31B-it"])
def test_history_of_calls_is_rendered(template: str, prepare) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": '{"animal": "fox"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "under the tree"},
    ]
    prompt, _ = prepare(template, messages=messages, tools=[FIND])
    assert "under the tree" in prompt.text
    assert "fox" in prompt.text


@pytest.mark.parametrize("reasoning", ["Look under the tree.", None])
@pytest.mark.parametrize("template", [*JSON_CALLS, *OWN_CALLS, *OTHERS])
def test_continued_texts(template: str, reasoning: str | None, prepare) -> None:
    """The reply goes on with the text after the reasoning."""
    message = {"role": "assistant", "content": "The fox is ", "reasoning_content": reasoning}
    prompt, _ = prepare(template, messages=[*HI[1:], message], continue_final_message=True)
    assert prompt.text.endswith("The fox is ")
    if reasoning and template in ("Qwen-Qwen3-0.6B", "openai-gpt-oss-120b"):
        assert prompt.text.index(reasoning) < prompt.text.index("The fox is ")
    reader = prompt.reply.syntax.reader(prompt.reply.prompt, tools=False)
    pieces = [*reader.feed("red."), *reader.flush()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece) and not piece.reasoning) == "red."


@pytest.mark.parametrize(("template", "opens", "closes"), [
    ("Qwen-Qwen3-0.6B", "<think>\n", "</think>"),
    ("HuggingFaceTB-SmolLM3-3B", "<think>", "</think>"),
    ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>",
     "<|end|><|start|>assistant<|channel|>final<|message|>"),
])  # fmt: skip
@pytest.mark.parametrize("content", ["", "The fox is "])
def test_continued_reasoning(template: str, opens: str, closes: str, content: str, prepare) -> None:
    message = {"role": "assistant", "content": content, "reasoning_content": "Look under <think>"}
    continues = "reasoning_content" if content else True
    prompt, _ = prepare(template, messages=[*HI[1:], message], continue_final_message=continues)
    assert prompt.text.endswith("Look under <think>")
    assert prompt.reply.prompt.rstrip().endswith(opens.rstrip())
    assert prompt.constraint.markers[0] == ""
    reader = prompt.reply.syntax.reader(prompt.reply.prompt, tools=False)
    reader.begin(prompt.reply.begun)
    pieces = [*reader.feed(f" the tree.{closes}Red."), *reader.flush()]
    for reasoning, text in ((True, " the tree."), (False, "Red.")):
        assert "".join(piece.text for piece in pieces if piece.reasoning is reasoning) == text


def test_reasoning_that_a_template_does_not_have(prepare) -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    with pytest.raises(BadRequestError, match="have no reasoning to continue"):
        prepare("google-gemma-2-2b-it", messages=[*HI[1:], message], continue_final_message=True)


def test_parts_of_contents_are_joined() -> None:
    request = convert(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        ChatRequest,
    )
    assert as_dicts(request.messages) == [{"role": "user", "content": "a\nb"}]


def test_names_and_reasoning_of_messages() -> None:
    message = ChatMessage(role="assistant", content="x", reasoning="hm", name="me")
    assert as_dicts([message]) == [{"role": "assistant", "content": "x", "reasoning_content": "hm", "name": "me"}]


def test_large_schemas_of_tools_are_refused() -> None:
    parameters = {"type": "object", "description": "x" * (1 << 19)}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("a", "b")]
    with pytest.raises(BadRequestError, match="1048576 are allowed") as error:
        tool_use(convert({"messages": HI, "tools": tools}, ChatRequest))
    assert (error.value.param, error.value.code) == ("tools", "invalid_schema")
    assert tool_use(convert({"messages": HI, "tools": tools[:1]}, ChatRequest)) is not None


def test_schemas_of_tools_that_are_nested_too_deeply_are_refused(prepare) -> None:
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(120)}
    function = {"name": "find", "parameters": {"$defs": {**links, "d120": {}}, "$ref": "#/$defs/d0"}}
    with pytest.raises(BadRequestError, match="nested too deeply") as error:
        prepare("Qwen-Qwen3-0.6B", tools=[{"type": "function", "function": function}])
    assert (error.value.param, error.value.code) == ("tools", "invalid_schema")
