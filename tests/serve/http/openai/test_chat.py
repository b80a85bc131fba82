"""Chat completions, by the official client of OpenAI's API."""

import json
import time

import openai
import pydantic
import pytest

from fake_engine import words
from llamacli.chat.messages import ToolCall
from llamacli.sampling import SamplingParams, build_chain
from llamacli.serve.errors import QueueFullError
from llamacli.serve.http import generation
from llamacli.serve.requests import (
    Admitted,
    ArgumentsDelta,
    Done,
    Finished,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

HI = [{"role": "user", "content": "hi"}]
PAINT = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "other"}}
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
DONE = Done(Usage(9, 4, 5, 2), Timings(0.5, 0.25, 0.5, 1))


def events(*middle, n: int = 1, reason: str = "stop"):
    return [Admitted(0.5), *middle, *[Finished(i, reason) for i in range(n)], DONE]


@pytest.fixture
def client(http) -> openai.OpenAI:
    with http.openai() as client:
        yield client


def test_reply(client, fake) -> None:
    reply = client.chat.completions.create(model="demo", messages=HI, temperature=0.5, seed=7, max_tokens=5, stop="x")
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "one two three", "stop")
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model) == ("chat.completion", "demo")
    assert reply.system_fingerprint.startswith("llamacli-fake")
    request = fake.requests[0]
    assert (request.seed, request.max_tokens, request.stop, request.n) == (7, 5, ("x",), 1)
    assert request.params.temperature == 0.5
    assert request.params.top_k == 40  # the file's


def test_usage_and_timings(http, fake) -> None:
    fake.script = lambda _: events(TextDelta(0, "a"))
    body = http.chat().json
    assert body["usage"] == {
        "prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    assert body["timings"] == {
        "cache_n": 4, "prompt_n": 5, "prompt_ms": 250.0, "prompt_per_second": 20.0, "predicted_n": 5,
        "predicted_ms": 500.0, "predicted_per_second": 8.0, "queue_ms": 500.0, "preempted_n": 1,
        "prompt_per_token_ms": 50.0, "predicted_per_token_ms": 125.0,
    }  # fmt: skip


@pytest.mark.parametrize("content", ["one two", [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]])
def test_a_prediction_is_the_draft_of_its_request(client, fake, demo, content) -> None:
    usage = Usage(9, 4, 5, 2, drafted=6, accepted=4, predicted=True)
    fake.script = lambda _: [*events(TextDelta(0, "a"))[:-1], Done(usage, DONE.timings)]
    prediction = {"type": "content", "content": content}
    reply = client.chat.completions.create(model="demo", messages=HI, prediction=prediction)
    details = reply.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 2)
    assert demo.tokenizer.decode(fake.requests[0].prediction).lstrip() == "one two"
    client.chat.completions.create(model="demo", messages=HI, prediction={"type": "content", "content": ""})
    client.chat.completions.create(model="demo", messages=HI)
    assert fake.requests[1].prediction == fake.requests[2].prediction == ()
    client.chat.completions.create(model="demo", messages=HI, prediction={"type": "content", "content": "a " * 9000})
    assert len(fake.requests[3].prediction) <= demo.config.n_ctx


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"), ({"content": "x"}, "prediction.type"), ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "data:"}]}, "prediction.content[0].type"),
    ],
)  # fmt: skip
def test_invalid_predictions_are_refused(http, prediction, param) -> None:
    reply = http.chat(prediction=prediction)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_verbose(http, fake) -> None:
    whole = http.chat(verbose=True, temperature=0.25, max_tokens=5).json["__verbose"]
    assert whole["prompt"].startswith("<|begin|>")
    assert "hi" in whole["prompt"]
    assert (whole["generation_settings"]["temperature"], whole["generation_settings"]["n_predict"]) == (0.25, 5)
    assert [("__verbose" in chunk) for chunk in http.chat(verbose=True, stream=True).events[-2:]] == [False, True]
    assert "__verbose" not in http.chat(verbose=False).json


def test_stream_joins_to_the_reply(client) -> None:
    chunks = list(client.chat.completions.create(model="demo", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_with_usage(http) -> None:
    chunks = http.chat(stream=True, stream_options={"include_usage": True}).events
    assert [chunk["usage"] is None for chunk in chunks] == [*[True] * (len(chunks) - 1), False]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == (
        [],
        chunks[-1]["usage"]["prompt_tokens"] + 3,
    )
    assert not any("usage" in chunk for chunk in http.chat(stream=True).events)


def test_choices(client) -> None:
    reply = client.chat.completions.create(model="demo", messages=HI, n=3)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [
        (i, "one two three") for i in range(3)
    ]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="demo", messages=HI, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["one two three"] * 3


def test_reasoning_is_apart(http, fake) -> None:
    fake.script = lambda _: events(TextDelta(0, "hm", reasoning=True), TextDelta(0, "yes"))
    message = http.chat().json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "hm"}
    deltas = [chunk["choices"][0]["delta"] for chunk in http.chat(stream=True).events]
    assert deltas[1:3] == [{"reasoning_content": "hm"}, {"content": "yes"}]


def test_tool_calls(client, fake) -> None:
    call = ToolCall("paint", {"c": "r\xe9d"})
    fake.script = lambda _: events(ToolCallDelta(0, 0, call), ToolCallDelta(0, 1, call), reason="tool_calls")
    reply = client.chat.completions.create(model="demo", messages=HI, tools=[PAINT], seed=1)
    message = reply.choices[0].message
    assert (message.content, reply.choices[0].finish_reason) == (None, "tool_calls")
    assert [one.function.name for one in message.tool_calls] == ["paint", "paint"]
    assert json.loads(message.tool_calls[0].function.arguments) == call.arguments
    ids = [one.id for one in message.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    with client.chat.completions.stream(model="demo", messages=HI, tools=[PAINT], seed=1) as stream:
        final = stream.get_final_completion()
    assert [one.id for one in final.choices[0].message.tool_calls] == ids
    assert final.choices[0].message.tool_calls[1].function.arguments == message.tool_calls[1].function.arguments


def test_arguments_are_streamed(http, fake) -> None:
    call = ToolCall("paint", partial='{"c": "gr')
    parts = [ArgumentsDelta(0, 0, "paint", text) for text in ("", '{"c": ', '"g')]
    fake.script = lambda _: events(*parts, ToolCallDelta(0, 0, call), reason="length")
    choice = http.chat().json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "paint", "arguments": '{"c": "gr'}
    deltas = [chunk["choices"][0]["delta"] for chunk in http.chat(stream=True).events]
    begun, *rest = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert begun["function"] == {"name": "paint", "arguments": ""}
    assert rest == [{"index": 0, "function": {"arguments": text}} for text in ('{"c": ', '"g', "r")]


def test_conversation_with_tools_is_rendered(client, fake) -> None:
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "paint", "arguments": '{"c": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "paint", "arguments": "{broken"}},
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]  # fmt: skip
    client.chat.completions.create(model="demo", messages=history, tools=[PAINT])
    text = fake._model.decode(fake.requests[0].prompts[0])
    assert "{'c': 1}" in text
    assert "{broken" in text


def test_logprobs(client, fake) -> None:
    token = TokenLogprob(5, b"\xc3", -0.5, ((5, b"\xc3", -0.5), (6, b"x", -1.5)))
    rest = TokenLogprob(6, b"\xa9", -float("inf"), ((7, b"y", -0.25),))
    fake.script = lambda _: events(
        TextDelta(0, "hm", reasoning=True, tokens=(rest,)), TextDelta(0, "\xe9", tokens=(token, rest))
    )
    reply = client.chat.completions.create(model="demo", messages=HI, logprobs=True, top_logprobs=1)
    content = reply.choices[0].logprobs.content
    assert bytes(byte for one in content for byte in one.bytes).decode() == reply.choices[0].message.content
    assert [one.logprob for one in content] == [-0.5, -9999.0]
    assert [[top.token for top in one.top_logprobs] for one in content] == [["\ufffd"], ["y"]]
    assert fake.requests[0].params.n_probs == 1
    assert client.chat.completions.create(model="demo", messages=HI).choices[0].logprobs is None
    streamed = client.chat.completions.create(model="demo", messages=HI, logprobs=True, stream=True)
    tokens = [one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert len(tokens) == 2


def test_progress(http, fake) -> None:
    fake.script = lambda _: events(PromptProgress(10, 2, 6, 0.25), TextDelta(0, "a"))
    chunks = http.chat(stream=True, return_progress=True).events
    assert chunks[1]["choices"] == []
    assert chunks[1]["prompt_progress"] == {"total": 10, "cache": 2, "processed": 6, "time_ms": 250.0}
    assert fake.requests[0].progress
    http.chat(return_progress=True)
    assert not fake.requests[1].progress


def test_drafts_of_a_request_and_their_numbers(http, fake) -> None:
    reply = http.chat()
    assert fake.requests[0].draft_max is None
    assert "draft_n" not in reply.json["timings"]
    fake.script = lambda _: [*events(TextDelta(0, "a"))[:-1], Done(Usage(3, 0, 5, 0, 7, 4), Timings(0.0, 0.0, 0.0))]
    timings = http.chat(**{"speculative.n_max": 3}).json["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 4)
    assert fake.requests[1].draft_max == 3
    http.chat(**{"speculative.n_max": 0})
    assert fake.requests[2].draft_max == 0
    assert http.chat(**{"speculative.n_max": -1}).status == 400


def test_seeds(http, fake) -> None:
    for seed in (3, None, -1):
        http.chat(seed=seed)
    seeds = [request.seed for request in fake.requests]
    assert seeds[0] == 3
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sampling_parameters_of_both_apis(http, fake) -> None:
    http.chat(
        top_p=0.5, top_k=7, min_p=0.1, typical_p=0.9, repetition_penalty=1.5, repeat_last_n=-1, frequency_penalty=0.25,
        presence_penalty=0.75, logit_bias={"5": -100, "6": 1.5}, samplers=["top_k", "temperature"], mirostat=2,
        ignore_eos=True, max_completion_tokens=9, max_tokens=8,
    )  # fmt: skip
    request = fake.requests[0]
    params = request.params
    assert (params.top_p, params.top_k, params.min_p, params.typical_p, params.repeat_penalty) == (
        0.5,
        7,
        0.1,
        0.9,
        1.5,
    )
    assert (params.repeat_last_n, params.frequency_penalty, params.presence_penalty) == (1024, 0.25, 0.75)
    assert (params.logit_bias, params.samplers, params.mirostat) == (((5, -100), (6, 1.5)), ("top_k", "temperature"), 2)
    assert (request.ignore_eos, request.max_tokens) == (True, 9)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": IMAGE}, "messages[0].content[0].type", "unsupported_content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "maybe", "tools": [PAINT]}, "tool_choice", "invalid_value"),
        ({"tool_choice": OTHER, "tools": [PAINT]}, "tool_choice", "invalid_value"),
        ({"functions": [{"name": "x"}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"a": ["x"] * 60_000}}, "chat_template_kwargs", "invalid_value"),
        ({"continue_final_message": True}, "messages", "invalid_value"),
        ({"echo": True}, "echo", "invalid_value"),
        ({"json_schema": {"type": "text"}}, "json_schema", "invalid_schema"),
        ({"grammar": "root ::= ("}, "grammar", "invalid_schema"),
        ({"guided_json": False}, "guided_json", "invalid_schema"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "invalid_schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid_schema"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
        ({"parse_tool_calls": False}, "parse_tool_calls", "unsupported_parameter"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests(fields: dict, param: str | None, code: str, stream: bool, http, fake) -> None:
    if stream and "stream_options" in fields:
        pytest.skip("allowed for streams")
    reply = http.send("/v1/chat/completions", {"messages": HI, "stream": stream, **fields})
    assert reply.status == 400
    error = reply.json["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert not fake.requests


def test_template_errors_are_client_errors(serve) -> None:
    http = serve(template="{{ raise_exception('no ' + messages[0].content) }}")
    error = http.chat("way").json["error"]
    assert error["code"] == "chat_template_error"
    assert "no way" in error["message"]


def test_model_without_template_completes_only(serve) -> None:
    http = serve(template=None)
    assert http.chat().json["error"]["code"] == "chat_template_error"
    assert http.send("/v1/completions", {"prompt": "x"}).status == 200


def test_text_of_messages_never_becomes_special_tokens(http, fake) -> None:
    http.chat("<|endoftext|>")
    http.chat("x")
    special = set(fake._model.tokenizer.special_ids) - {fake._model.tokenizer.bos_id}
    assert special
    assert special.isdisjoint(fake.requests[0].prompts[0])


@pytest.mark.parametrize(
    "name",
    [
        "reasoning_budget",
        "reasoning_budget_tokens",
        "thinking_budget_tokens",
        "thinking_token_budget",
        "thinking_budget",
    ],
)
def test_reasoning_budget(name: str, serve, fake) -> None:
    http = serve(template="{{ messages[0].content }}<think>")
    http.chat(**{name: 7, "reasoning_budget_message": "Well."})
    params = fake.requests[-1].params
    assert (params.reasoning_budget, params.reasoning_budget_message) == (7, "Well.")
    assert params.reasoning_markers == ("", "</think>")


def test_variables_of_the_template(serve, fake) -> None:
    http = serve(template="{{ enable_thinking }} {{ reasoning_effort }} {{ colour }} {{ messages[0].content }}")
    http.chat(reasoning_effort="low", chat_template_kwargs={"colour": "red"})
    http.chat(reasoning_effort="none")
    texts = [fake._model.decode(request.prompts[0]) for request in fake.requests]
    assert texts[0].strip().endswith("low red hi")
    assert texts[1].strip().startswith("False")


def test_continuing_the_last_message(http, fake) -> None:
    http.send("/v1/chat/completions", {
        "messages": [*HI, {"role": "assistant", "content": "Once upon"}], "continue_final_message": True,
    })  # fmt: skip
    assert fake._model.decode(fake.requests[0].prompts[0]).endswith("<assistant>Once upon")


def test_continuing_after_reasoning(http, fake, serve) -> None:
    """The template writes the reasoning of the message that is continued."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    message = {"role": "assistant", "content": "Once upon ", "reasoning_content": "A story."}
    serve(template=template).send("/v1/chat/completions", {"messages": [*HI, message], "continue_final_message": True})
    prompt = fake._model.decode(fake.requests[0].prompts[0])
    assert prompt.endswith("<assistant><think>A story.</think>Once upon ")
    assert prompt.count("<assistant>") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo(http, fake, stream) -> None:
    """The reply and its log-probabilities begin with the message that it continues."""
    prompt = tuple(
        TokenLogprob(i, piece, -float(i), ((9, b"x", -9.0),)) for i, piece in enumerate((b"<a", b">On", b"ce"))
    )
    rest = TextDelta(0, " upon", tokens=(TokenLogprob(4, b" upon", -4.0),))
    fake.script = lambda _: events(PromptLogprobs(0, prompt), rest)
    body = {
        "messages": [*HI, {"role": "assistant", "content": "Once"}], "continue_final_message": True, "echo": True,
        "stream": stream, "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    reply = http.send("/v1/chat/completions", body)
    assert fake.requests[0].prompt_logprobs == 1
    chunks = [choice for event in reply.events for choice in event["choices"]] if stream else reply.json["choices"]
    content = "".join(one["delta" if stream else "message"].get("content") or "" for one in chunks)
    tokens = [token for one in chunks if one["logprobs"] for token in one["logprobs"]["content"]]
    assert content == "Once upon"
    assert [token["token"] for token in tokens] == ["On", "ce", " upon"]
    assert [token["logprob"] for token in tokens] == [-1.0, -2.0, -4.0]


def test_echo_without_log_probabilities(http, fake) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "zero "}], "continue_final_message": True, "echo": True}
    assert http.send("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "zero one two three"
    streamed = http.send("/v1/chat/completions", {**body, "stream": True}).events
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed) == "zero one two three"


def test_json_schema_becomes_a_grammar(client, fake) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    client.chat.completions.create(
        model="demo", messages=HI,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )  # fmt: skip
    sampler = fake.requests[0].params.clone()
    ids = fake._model.tokenizer.encode_run('{"a": 5}', continues=True)
    for token in ids:
        sampler.accept(token)


def test_parsed_replies(client, fake) -> None:
    class Town(pydantic.BaseModel):
        name: str

    fake.script = lambda _: events(TextDelta(0, '{"name": "Bern"}'))
    reply = client.chat.completions.parse(model="demo", messages=HI, response_format=Town)
    assert reply.choices[0].message.parsed == Town(name="Bern")


def test_slow_schema_is_refused(serve, monkeypatch) -> None:
    monkeypatch.setattr(generation, "chain", lambda *_: time.sleep(0.3))
    reply = serve(schema_timeout=0.02).chat(response_format={"type": "json_object"})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_schema")
    assert "0.02 seconds" in reply.json["error"]["message"]


def test_first_schema_is_not_charged_for_the_vocabulary(serve, monkeypatch) -> None:
    monkeypatch.setattr(generation, "prepare", lambda _: time.sleep(0.3))
    monkeypatch.setattr(generation, "chain", lambda model, params: build_chain(SamplingParams()))
    assert serve(schema_timeout=0.2).chat(response_format={"type": "json_object"}).status == 200


def test_unversioned_path(http) -> None:
    assert http.send("/chat/completions", {"messages": HI}).status == 200


def test_unknown_model(client, http, serve) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=HI)
    assert error.value.code == "model_not_found"
    assert http.chat(model="demo:latest").status == 200
    assert serve(any_model=True).chat(model="gpt-4o").json["model"] == "demo"


def test_retry_of_a_full_queue(http, fake) -> None:
    answers = [[QueueFullError("full", retry_after=0)]]
    fake.script = lambda request: answers.pop() if answers else words(request)
    with http.openai(max_retries=2) as client:
        assert client.chat.completions.create(model="demo", messages=HI).choices[0].message.content == "one two three"
    fake.script = lambda _: [QueueFullError("full", retry_after=0)]
    with http.openai() as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="demo", messages=HI)
