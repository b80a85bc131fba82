"""Fields of requests: honoured, refused by name, without effect, unknown."""

import datetime
import json
import math

import pytest

from llamacli.serve.http.chats import default_variables
from llamacli.serve.http.routes import ROUTES, loaded
from llamacli.serve.http.schemas.chat import Function, Tool
from llamacli.serve.http.schemas.foreign import Refused
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.requests import Admitted, Done, Finished, TextDelta, Timings, TokenLogprob, Usage

HI = [{"role": "user", "content": "hi"}]
TEXT, CHAT = ("/v1/completions", {"prompt": "a b c"}), ("/v1/chat/completions", {"messages": HI})


def params(request):
    return getattr(request.params, "params", None) or request.params


@pytest.mark.parametrize(("path", "body"), [TEXT, CHAT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"n_cmpl": 3}, {"n": 3}),
        ({"stop_token_ids": [5, 6]}, {"end_ids": (5, 6)}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"skip_special_tokens": False}, {"special_tokens": True}),
        ({"t_max_predict_ms": 1500}, {"max_seconds": 1.5}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"bad_words": ["x"]}, {"bad_words": ("x",)}),
        ({"allowed_token_ids": [8, 7]}, {"allowed_token_ids": (7, 8)}),
        ({"logit_bias": [[5, 2.5], [6, False]]}, {"logit_bias": ((5, 2.5), (6, -math.inf))}),
        ({"logit_bias": {"5": False}}, {"logit_bias": ((5, -math.inf),)}),
        ({"n_probs": 3}, {"n_probs": 3}),
    ],
)
def test_fields_of_other_servers_are_honoured(path: str, body: dict, fields: dict, expected: dict, http, fake) -> None:
    reply = http.send(path, {**body, **fields})
    assert (reply.status, reply.headers.get("warning")) == (200, None)
    (request,) = fake.requests
    found = {name: getattr(request, name, None) or getattr(params(request), name, None) for name in expected}
    assert found == expected


def test_a_minimum_holds_for_all_ends(http, fake) -> None:
    http.chat(min_tokens=4, stop_token_ids=[9])
    assert {9} < {*params(fake.requests[0]).end_token_ids} == {9, *fake.requests[0].reply.end_ids}


def test_parameters_of_the_server_are_defaults(serve, fake) -> None:
    http = serve(sampling={"temperature": 0.25, "top_k": 3}, seed=7, max_tokens=5)
    for path, body in (TEXT, CHAT, ("/completion", {"prompt": "a"})):
        http.send(path, body)
        http.send(path, {**body, "top_k": 9, "seed": 8, "max_tokens": 6})
    found = [(params(one).temperature, params(one).top_k, one.seed, one.max_tokens) for one in fake.requests]
    assert found == [(0.25, 3, 7, 5), (0.25, 9, 8, 6)] * 3


def test_biases_of_texts(http, fake) -> None:
    tokens = fake._model.tokenizer.encode_run(" fox", continues=True)
    for biases in ([[" fox", 3]], {" fox": 3}):
        http.send("/v1/completions", {"prompt": "a", "logit_bias": biases})
        assert dict(params(fake.requests.pop()).logit_bias) == dict.fromkeys(tokens, 3.0)


@pytest.mark.parametrize(("path", "body"), [TEXT, CHAT])
@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"guided_regex": r"a/b\/"}, "grammar", "%llguidance {}\nstart: /a\\/b\\//"),
        ({"structured_outputs": {"regex": "[ab]"}}, "grammar", "%llguidance {}\nstart: /[ab]/"),
        ({"guided_choice": ['a"', "b"]}, "grammar", '%llguidance {}\nstart: "a\\"" | "b"'),
        ({"guided_grammar": "root ::= [a]"}, "grammar", "root ::= [a]"),
    ],
)
def test_structured_outputs(path: str, body: dict, fields: dict, field: str, expected: str, http, fake) -> None:
    pytest.importorskip("llguidance")
    reply = http.send(path, {**body, **fields})
    assert (reply.status, reply.headers.get("warning")) == (200, None)
    assert getattr(params(fake.requests[0]), field) == expected


def test_two_constraints_are_refused(http) -> None:
    reply = http.send("/v1/completions", {"prompt": "a", "guided_regex": "a", "structured_outputs": {"choice": ["b"]}})
    assert (reply.status, reply.json["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_fields_of_chats_are_refused_or_listed_for_texts(path: str, http) -> None:
    for field, value in (("documents", ["x"]), ("tools", [{}]), ("chat_template_kwargs", {"a": 1})):
        reply = http.send(path, {"prompt": "a", field: value})
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert "it is for chats" in reply.json["error"]["message"]
    reply = http.send(path, {"prompt": "a", "add_generation_prompt": True, "tools": [], "documents": None})
    assert (reply.status, reply.headers.get("warning")) == (200, None)


def test_truncated_prompts(http, fake) -> None:
    prompt = [*range(5, 15)]
    for limit, kept in ((3, [12, 13, 14]), (-1, prompt), (99, prompt)):
        http.send("/v1/completions", {"prompt": prompt, "truncate_prompt_tokens": limit})
        assert fake.requests.pop().prompts == (tuple(kept),)
    n_ctx = fake._model.config.n_ctx
    http.send("/v1/completions", {"prompt": [5] * 2 * n_ctx, "truncate_prompt_tokens": -1})
    assert len(fake.requests.pop().prompts[0]) == n_ctx - 1
    http.send("/v1/completions", {"prompt": "ab", "add_special_tokens": False})
    assert fake.requests.pop().prompts[0] == tuple(fake._model.tokenizer.encode("ab", add_special=False))


def test_ids_of_tokens(http, fake) -> None:
    token = TokenLogprob(7, b"!", -0.5)
    done = Done(Usage(3, 0, 1), Timings(0.0, 0.1, 0.1))
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "!", tokens=(token,)), Finished(0, "stop"), done]
    body = {"prompt": [5, 6], "return_token_ids": True}
    choice = http.send("/v1/completions", body).json["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["logprobs"]) == ([7], [5, 6], None)
    chunks = http.send("/v1/completions", {**body, "stream": True}).events
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [[7], None]


def test_reasoning_that_is_left_out(http, fake) -> None:
    done = Done(Usage(3, 0, 1), Timings(0.0, 0.1, 0.1))
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "hm", True), TextDelta(0, "!"), Finished(0, "stop"), done]
    message = http.chat(include_reasoning=False).json["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("!", None)
    assert b"hm" not in http.chat(include_reasoning=False, stream=True).body


def test_formats_of_reasoning(http) -> None:
    for name, status in (("auto", 200), ("none", 400)):
        assert http.chat(reasoning_format=name).status == status


def test_variables_of_templates(serve) -> None:
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ date_string }}|{{ datetime }}|{{ functions }}"
    for reasoning in (True, False):
        http = serve(template=template, reasoning=reasoning)
        reply = http.send("/apply-template", {"messages": HI}).json
        text, thinks, day, same_day, functions = reply["prompt"].split("|")
        assert (text, thinks, functions) == ("hi", str(reasoning), "")
        assert datetime.datetime.strptime(day, "%d %b %Y") == datetime.datetime.strptime(same_day, "%b %d %Y")
        given = {"messages": HI, "chat_template_kwargs": {"enable_thinking": not reasoning, "date_string": "1 Jan"}}
        assert http.send("/apply-template", given).json["prompt"].split("|")[1:3] == [str(not reasoning), "1 Jan"]
        assert http.send("/tokenize", {"messages": HI}).json["count"] == reply["n_tokens"]
    tools = [Tool(function=Function(name="paint"))]
    assert json.loads(default_variables(HttpSettings(), tools)["functions"])[0]["function"]["name"] == "paint"


def test_generation_prompt_and_documents(serve) -> None:
    template = "{{ messages[0].content }}{{ documents }}{% if add_generation_prompt %}<assistant>{% endif %}"
    http = serve(template=template)
    body = {"messages": HI, "documents": [{"a": 1}]}
    assert http.send("/apply-template", body).json["prompt"] == "hi[{'a': 1}]<assistant>"
    assert http.send("/apply-template", {**body, "add_generation_prompt": False}).json["prompt"] == "hi[{'a': 1}]"
    both = {"add_generation_prompt": True, "continue_final_message": True}
    messages = [*HI, {"role": "assistant", "content": "x"}]
    reply = http.send("/apply-template", {"messages": messages, **both})
    assert (reply.status, reply.json["error"]["param"]) == (400, "add_generation_prompt")


BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/completion": {"prompt": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/responses": {"input": "a"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"messages": HI},
    "/api/chat": {"model": "demo", "messages": HI},
    "/api/generate": {"model": "demo", "prompt": "a"},
}


@pytest.mark.parametrize(
    "path", [route.paths[0] for route in ROUTES if route.streams and route.queued and loaded(route.handler)[1]]
)
def test_refused_fields_are_named_with_the_reason(path: str, http, fake, monkeypatch) -> None:
    monkeypatch.setattr(fake._model.tokenizer, "infill_ids", (4, 5, 6))
    kind = loaded(next(route.handler for route in ROUTES if path in route.paths))[1]
    foreign = {name: why for name, why in kind.foreign.items() if name not in kind.__struct_encode_fields__}
    refused = {name: why for name, why in foreign.items() if isinstance(why, Refused)}
    assert refused
    for name, why in refused.items():
        reply = http.send(path, {**BODIES[path], name: "something"})
        text = str(reply.json["error"])
        assert (reply.status, name in text, why.reason in text) == (400, True, True)
    assert not fake.requests
    neutral = {name: why.neutral[0] if why.neutral else False for name, why in refused.items()}
    effectless = dict.fromkeys(foreign.keys() - refused, "something")
    reply = http.send(path, {**BODIES[path], **neutral, **effectless})
    assert (reply.status, reply.headers.get("warning")) == (200, None)


def test_unknown_fields_are_named_in_a_header_and_the_log(serve, caplog: pytest.LogCaptureFixture) -> None:
    http = serve()  # of its own: a server logs a limited number of fields
    message = {"role": "user", "content": [{"type": "text", "text": "a", "colour\n\u20ac": 1}]}
    body = {"messages": [message], "temperatur": 0.5, "user": "me", "quite-other": 1}
    for stream in (False, True):
        reply = http.send("/v1/chat/completions", {**body, "stream": stream})
        assert (reply.status, reply.headers["warning"][:14]) == (200, '299 llamacli "')
        assert "'temperatur' (is it 'temperature'?), 'quite-other'" in reply.headers["warning"]
        assert r"messages[0].content[0].colour\n\u20ac" in reply.headers["warning"]
        assert "user" not in reply.headers["warning"]
    assert caplog.text.count("unknown fields without effect") == 1


def test_unknown_fields_are_refused_by_strict_servers(serve, fake) -> None:
    http = serve(strict=True)
    reply = http.chat(temperatur=0.5)
    assert (reply.status, reply.json["error"]["code"]) == (400, "unknown_parameter")
    assert reply.json["error"]["param"] == "temperatur"
    assert "'temperature'" in reply.json["error"]["message"]
    assert http.chat(user="me", temperature=0.5).status == 200
    assert len(fake.requests) == 1
