"""Random replies over HTTP: streams of all APIs equal responses without one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from fake_engine import FakeEngine
from http_server import TEMPLATE, Served
from llamacli import Model
from llamacli.chat.logprobs import token_logprob
from llamacli.sampling import LogProbs
from llamacli.serve.requests import Admitted, Done, Event, GenerationRequest, PromptLogprobs, Timings, Usage
from llamacli.serve.texts import ChoiceText
from suite import examples

CALL = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'
HEADERS = ("<|start|>assistant<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>")
PARTS = ("<think>", "</think>", CALL, CALL[:30], " to=functions.f<|message|>{}", *HEADERS, "<|end|>", "stop", "st", " ")
PARTS_OR_TOKENS = st.sampled_from(PARTS) | st.tuples(st.sampled_from(["any", "broken", "silent"]), st.integers(0, 2047))
FORMATS = {"plain": "", "hermes": "{# <tool_call> #}", "harmony": "{# <|start|> <|channel|> <|message|> #}"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
HI = [{"role": "user", "content": "hi"}]


def spelled(model: Model, parts: Sequence[Any]) -> list[int]:
    """Tokens of texts, and numbered tokens of a kind.

    Those that are `broken` have parts of characters, `silent` ones no text.
    """
    pieces = {token: model.tokenizer.piece_bytes(token) for token in range(model.tokenizer.n_vocab)}
    kinds = {
        "any": [*pieces],
        "broken": [token for token, piece in pieces.items() if "\ufffd" in piece.decode(errors="replace")],
        "silent": [token for token, piece in pieces.items() if not piece],
    }
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, str):
            tokens += model.tokenizer.encode_run(part, continues=True)
        else:
            tokens.append(kinds[part[0]][part[1] % len(kinds[part[0]])])
    return tokens


def script(model: Model, parts: Sequence[Any]) -> Callable[[Any], list[Any]]:
    """Script of the fake engine: events of tokens, each choice without some."""
    tokens = spelled(model, parts)

    def events(request: GenerationRequest) -> list[Any]:
        choices: list[list[list[Event]]] = []
        n_tokens = n_reasoning = 0
        for k in range(request.n * len(request.prompts)):
            text = ChoiceText(request, k, model.tokenizer, request.prompts[k // request.n], request.max_tokens or 100)
            steps: list[list[Event]] = []
            for token in tokens[k:]:
                if text.finished is None:
                    steps.append(text.take(token, LogProbs(-1.0, ((token, -1.0), (5, -2.0)))))
            if text.finished is None:
                steps.append(text.finish("length"))
            choices.append(steps)
            n_tokens, n_reasoning = n_tokens + text.n_tokens, n_reasoning + text.n_reasoning
        in_turn = [event for steps in itertools.zip_longest(*choices, fillvalue=[]) for step in steps for event in step]
        n_prompt = sum(map(len, request.prompts))
        if request.prompt_logprobs is not None and tokens:  # else the time is over within the prompts
            scored = [[token_logprob(model.tokenizer, token, None) for token in ids] for ids in request.prompts]
            in_turn[:0] = [PromptLogprobs(i, tuple(found)) for i, found in enumerate(scored)]
        return [Admitted(0), *in_turn, Done(Usage(n_prompt, 0, n_tokens, n_reasoning), Timings(0, 0, 0))]

    return events


def whole(server: Served, path: str, body: dict[str, Any]) -> Any:
    """Response without a stream."""
    reply = server.send(path, {**body, "stream": False}, {"x-request-id": "a"})
    assert reply.status == 200, reply.body
    return reply.json


def streamed(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """Objects of a stream."""
    reply = server.send(path, {**body, "stream": True}, {"x-request-id": "a"})
    assert reply.status == 200, reply.body
    lines = reply.body.decode().split("\n")
    if path.startswith("/v1/"):
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line not in ("", "[DONE]")]


def folded(chunks: Sequence[Any], n: int) -> tuple[list[Any], Any]:
    """Choices and usage of the chunks of OpenAI's streams."""
    choices: list[dict[str, Any]] = [{} for _ in range(n)]
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            for name, value in {**part.pop("delta", {}), **part}.items():
                if name == "tool_calls":
                    for call in value:
                        if "id" in call:
                            choice.setdefault(name, []).append(call)
                        else:
                            choice[name][-1]["function"]["arguments"] += call["function"]["arguments"]
                elif name in ("content", "reasoning_content", "text"):
                    choice[name] = choice.get(name, "") + (value or "")
                elif name == "logprobs" and value is not None:
                    for key, items in value.items():
                        choice.setdefault(name, {}).setdefault(key, []).extend(items or ())
                elif value is not None:
                    choice[name] = value
    return choices, usage


def chats_are_the_same(server: Served, fields: dict[str, Any]) -> None:
    path, tools = "/v1/chat/completions", [{"type": "function", "function": FUNCTION}]
    body = {"messages": HI, "seed": 1, "logprobs": True, "top_logprobs": 2, "n": 2, "tools": tools, **fields}
    if fields["echo"]:
        body |= {"messages": [*HI, {"role": "assistant", "content": "So"}], "continue_final_message": True}
    reply = whole(server, path, body)
    choices, usage = folded(streamed(server, path, {**body, "stream_options": {"include_usage": True}}), 2)
    assert usage == reply["usage"]
    for choice, expected in zip(choices, reply["choices"], strict=True):
        message = expected["message"]
        calls = [{key: value for key, value in call.items() if key != "index"} for call in choice.get("tool_calls", ())]
        assert choice["content"] == (message["content"] or "")
        assert choice.get("reasoning_content", "") == message.get("reasoning_content", "")
        assert calls == message.get("tool_calls", [])
        assert choice.get("logprobs", {}).get("content", []) == expected["logprobs"]["content"]
        assert choice["finish_reason"] == expected["finish_reason"]
        whole_calls = calls[:-1] if choice["finish_reason"] == "length" else calls  # the last may be cut
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in whole_calls)


def completions_are_the_same(server: Served, fields: dict[str, Any]) -> None:
    path, body = "/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "n": 2, **fields}
    reply = whole(server, path, body)
    choices, usage = folded(streamed(server, path, {**body, "stream_options": {"include_usage": True}}), 4)
    for choice, expected in zip(choices, reply["choices"], strict=True):
        choice.setdefault("logprobs", {name: [] for name in expected["logprobs"]})
    assert (choices, usage) == (reply["choices"], reply["usage"])


def without_ids(value: Any) -> Any:
    """Drop ids and times of creation, new for each response, from JSON."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in ("id", "created_at")}
    return value


def responses_are_the_same(server: Served, fields: dict[str, Any]) -> None:
    limit, tools = fields["max_tokens"], [{"type": "function", "function": FUNCTION}]
    path, body = "/v1/responses", {"input": "hi", "seed": 1, "max_output_tokens": limit}
    body["tools"] = [{"type": "function", **FUNCTION}]
    chat = {"messages": HI, "seed": 1, "max_tokens": limit, "tools": tools}
    reply, events = whole(server, path, body), streamed(server, path, body)
    assert without_ids(events[-1]["response"]) == without_ids(reply)
    texts = [""] * len(reply["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    given = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in reply["output"]]
    assert texts == given
    message = whole(server, "/v1/chat/completions", chat)["choices"][0]["message"]
    for kind, name in ("message", "content"), ("reasoning", "reasoning_content"):
        found = [text for item, text in zip(reply["output"], texts, strict=True) if item["type"] == kind]
        assert "".join(found) == (message.get(name) or "")


def messages_are_the_same(server: Served, fields: dict[str, Any]) -> None:
    options = {"seed": 1, "num_predict": fields["max_tokens"], "stop": fields["stop"]}
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"model": "demo", "messages": HI, "logprobs": True, "tools": tools, "options": options}
    reply, lines = whole(server, "/api/chat", body), streamed(server, "/api/chat", body)
    message, logprobs = {"content": "", "thinking": "", "tool_calls": []}, []
    for line in lines:
        logprobs += line.get("logprobs", [])
        for name, value in line["message"].items():
            if name in message:
                message[name] += value
    assert {"role": "assistant", **{name: value for name, value in message.items() if value or name == "content"}} == (
        reply["message"]
    )
    assert logprobs == reply["logprobs"]
    assert [lines[-1][name] for name in ("done_reason", "eval_count")] == [reply["done_reason"], reply["eval_count"]]


SAME = {
    "chat": chats_are_the_same,
    "completions": completions_are_the_same,
    "responses": responses_are_the_same,
    "ollama": messages_are_the_same,
}


@pytest.mark.parametrize("syntax", FORMATS)
@given(
    parts=st.lists(PARTS_OR_TOKENS, max_size=10),
    max_tokens=st.integers(1, 60),
    stop=st.sampled_from([["stop"], ["st", "op"], ["\ufffd"]]),
    echo=st.booleans(),
)
@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_give_what_responses_without_them_give(
    syntax: str,
    parts: list[Any],
    max_tokens: int,
    stop: list[str],
    echo: bool,
    servers: dict[str, Served],
    fake: FakeEngine,
) -> None:
    fake.script = script(fake._model, parts)
    for same in SAME.values():
        same(servers[syntax], {"max_tokens": max_tokens, "stop": stop, "echo": echo})


@pytest.fixture
def servers(serve: Callable[..., Served]) -> dict[str, Served]:
    """A server for each of the formats."""
    return {syntax: serve(template=TEMPLATE + comment) for syntax, comment in FORMATS.items()}
