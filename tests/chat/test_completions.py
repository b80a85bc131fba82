"""Chat completions and completions in the shapes of llama-cpp-python."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from llamacli import ChatTemplateError, ContextOverflowError, InvalidRequestError, Model, PromptLookup, SamplingParams
from llamacli.errors import TokenizerError
from llamacli.testing.chats import CHATML

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "roll", "arguments": {"n": 2}}\n</tool_call>'
WITH_TOOLS = f"{{% if tools %}}<tool_call></tool_call>{{{{ tools }}}}{{% endif %}}{CHATML}"


def joined(chunks: list[dict[str, Any]], field: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(field, "") for chunk in chunks)


class TestChat:
    def test_shape_of_the_whole_result(self, talker, script) -> None:
        model = talker()
        script(model, "Hello there.")
        result = model.create_chat_completion(MESSAGES, model="mine")
        n_prompt = len(model.create_chat_codec().encode(model.create_chat_codec().render(MESSAGES)))
        n_reply = len(model.encode("Hello there.", False))
        assert result.pop("id").startswith("chatcmpl-")
        assert isinstance(result.pop("created"), int)
        assert result == {
            "model": "mine",
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello there."},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_reply,
                "total_tokens": n_prompt + n_reply,
            },
        }

    def test_chunks_join_to_the_result(self, talker) -> None:
        model = talker()
        options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 20}
        result = model.create_chat_completion(MESSAGES, **options)
        chunks = list(model.create_chat_completion(MESSAGES, stream=True, **options))
        assert joined(chunks, "content") == result["choices"][0]["message"]["content"]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert finishes == [None] * (len(chunks) - 1) + ["length"]
        assert result["choices"][0]["finish_reason"] == "length"
        assert result["usage"]["completion_tokens"] == 20
        json.dumps([result, chunks])

    def test_drafters_do_not_change_the_reply(self, talker) -> None:
        model = talker()
        options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 20}
        expected = model.create_chat_completion(MESSAGES, **options)
        drafter = PromptLookup(min_ngram=1)
        assert model.create_chat_completion(MESSAGES, speculate=drafter, **options)["choices"] == expected["choices"]
        assert len(drafter._tokens) > expected["usage"]["prompt_tokens"]
        text = model.create_completion("a b a b a", speculate=PromptLookup(min_ngram=1), **options)
        assert text["choices"] == model.create_completion("a b a b a", **options)["choices"]

    def test_draws_differ_without_a_seed(self, talker) -> None:
        model = talker()
        replies = [
            model.create_chat_completion(MESSAGES, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=12)
            for _ in range(3)
        ]
        assert len({reply["choices"][0]["message"]["content"] for reply in replies}) > 1

    def test_reasoning_and_calls(self, talker, script) -> None:
        model = talker(WITH_TOOLS)
        script(model, f"<think>dice</think>Rolling.{CALL}")
        result = model.create_chat_completion(MESSAGES, tools=TOOLS, tool_choice="auto")
        choice = result["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "dice"
        assert choice["message"]["content"] == "Rolling."
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "roll")
        assert json.loads(call["function"]["arguments"]) == {"n": 2}

        script(model, CALL)
        chunks = list(model.create_chat_completion(MESSAGES, tools=TOOLS, stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        begun, *rest = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert begun == {"index": 0, **call, "id": begun["id"], "function": {"name": "roll", "arguments": ""}}
        assert "".join(each["function"]["arguments"] for each in rest) == call["function"]["arguments"]
        assert len(rest) > 3

    @pytest.mark.parametrize("budget", [None, 0, 3])
    def test_reasoning_budget(self, talker, budget: int | None) -> None:
        model = talker(CHATML.replace("assistant\n", "assistant\n<think>"))
        options = {"temperature": 0.0, "max_tokens": 12, "reasoning_budget_message": "ok"}
        reply = model.create_chat_completion(MESSAGES, reasoning_budget=budget, **options)
        message = reply["choices"][0]["message"]
        if budget is None:
            assert "ok" not in message["reasoning_content"]
            return
        assert message["reasoning_content"].endswith("ok")
        assert (message["reasoning_content"] == "ok") == (budget == 0)
        with model.create_chat("Be brief.", max_tokens=12) as chat:
            chat.add_user(MESSAGES[-1]["content"])
            pieces = list(chat.respond(SamplingParams(reasoning_budget=budget, reasoning_budget_message="ok")))
        assert "".join(piece.text for piece in pieces if piece.reasoning) == message["reasoning_content"]

    def test_call_that_is_cut(self, talker, script) -> None:
        model = talker(WITH_TOOLS)
        script(model, CALL)
        n = len(model.tokenizer.encode(CALL[:-16], add_special=False))
        choice = model.create_chat_completion(MESSAGES, tools=TOOLS, max_tokens=n)["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert call["function"] == {"name": "roll", "arguments": '{"n": '}

    def test_result_of_a_call_can_be_sent_back(self, talker, script) -> None:
        model = talker(WITH_TOOLS)
        script(model, CALL, "Two.")
        message = model.create_chat_completion(MESSAGES, tools=TOOLS)["choices"][0]["message"]
        assert message["content"] is None
        call = message["tool_calls"][0]
        more = [*MESSAGES, message, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
        reply = model.create_chat_completion(more, tools=TOOLS)
        assert reply["choices"][0]["message"]["content"] == "Two."

    def test_required_call_follows_its_schema(self, talker) -> None:
        pytest.importorskip("llguidance")
        kinds = {"type": "object", "properties": {"n": {"enum": [2]}}, "required": ["n"], "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "roll", "parameters": kinds}}]
        choice = {"type": "function", "function": {"name": "roll"}}
        model = talker(WITH_TOOLS.replace("assistant\n", "assistant\n<think></think>"))
        result = model.create_chat_completion(MESSAGES, tools=tools, tool_choice=choice)
        (call,) = result["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("roll", {"n": 2})
        assert result["choices"][0]["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(
        "response_format",
        [
            {"type": "json_object", "schema": {"enum": ["red"]}},
            {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["red"]}}},
        ],
    )
    def test_response_format(self, talker, response_format: dict[str, Any]) -> None:
        pytest.importorskip("llguidance")
        template = CHATML.replace("assistant\n", "assistant\n<think></think>")
        result = talker(template).create_chat_completion(MESSAGES, response_format=response_format)
        assert result["choices"][0]["message"]["content"] == '"red"'

    def test_stop_strings(self, talker, script) -> None:
        model = talker()
        script(model, "One. Two. Three.")
        choice = model.create_chat_completion(MESSAGES, stop=[" Two"])["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("One.", "stop")

    def test_logprobs(self, talker) -> None:
        model = talker()
        # With other seeds a marker within the text may be drawn, of which white space is left and no bytes.
        arguments = {"logprobs": True, "top_logprobs": 3, "max_tokens": 5, "seed": 1}
        choice = model.create_chat_completion(MESSAGES, **arguments)["choices"][0]
        content = choice["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in content)
        text = bytes(byte for entry in content for byte in entry["bytes"]).decode("utf-8", "replace")
        assert choice["message"]["content"].strip() in text

    def test_logprobs_are_those_of_the_content(self, talker, script) -> None:
        """Scores of reasoning, markers, white space and calls are left out."""
        model = talker(WITH_TOOLS)
        script(model, f"<think>dice</think>\n\nshé {CALL}", f"<think>dice</think>\n\nshé {CALL}")
        arguments = {"tools": TOOLS, "tool_choice": "auto", "logprobs": True}
        choice = model.create_chat_completion(MESSAGES, **arguments)["choices"][0]
        chunks = list(model.create_chat_completion(MESSAGES, **arguments, stream=True))
        shapes = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert [entry for shape in shapes for entry in shape["content"]] == choice["logprobs"]["content"]
        joined = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]).decode()
        assert joined == choice["message"]["content"] == "shé"

    def test_content_may_be_parts(self, talker, script) -> None:
        model = talker()
        script(model, "Yes.", "Yes.")
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        usages = [
            model.create_chat_completion([{"role": "user", "content": content}])["usage"] for content in (parts, "a\nb")
        ]
        assert usages[0] == usages[1]

    def test_common_prefix_is_not_evaluated_again(self, talker) -> None:
        model = talker()
        model.create_chat_completion(MESSAGES, max_tokens=1, seed=0)
        with model.create_session() as session:
            assert session.reuse(model.create_chat_codec().encode(model.create_chat_codec().render(MESSAGES))) > 0

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"tool_choice": "required"}, "required needs tools"),
            ({"tool_choice": "maybe"}, "'maybe'; it must be none, auto, required"),
            ({"tools": TOOLS, "tool_choice": {"function": {"name": "no"}}}, "there is no tool 'no'"),
            ({"response_format": {"type": "xml"}}, "'xml'; it must be text, json_object or json_schema"),
            ({"response_format": {"type": "json_schema"}}, r"response_format.json_schema: it is required"),
            ({"response_format": {"type": "json_object", "schema": 1}}, "must be an object or a boolean"),
            ({"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"}, "exclude each other"),
            ({"top_logprobs": 2}, "needs logprobs=True"),
            ({"max_tokens": 1.5}, "max_tokens must be an integer or None, not 1.5"),
            ({"top_p": 2}, "top_p"),
            ({"seed": -2}, "seed"),
        ],
    )
    def test_invalid_arguments_raise_at_once(self, talker, options: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidRequestError, match=said):
            talker().create_chat_completion(MESSAGES, stream=True, **options)

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ([], "at least one is needed"),
            (["Hi."], r"messages\[0\] must be .*not Hi\."),
            (
                [{"role": "user", "content": [{"type": "image_url"}]}],
                r"messages\[0\]\.content\[0\]: parts of type 'image_url'",
            ),
            (
                [{"role": "user", "content": ["a"]}],
                r"messages\[0\]\.content\[0\]: parts of type 'str' are not supported",
            ),
            ([{"role": "user", "content": 3}], r"messages\[0\].content must be a text, not 3"),
            ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], r"messages\[0\].tool_calls: not a call"),
        ],
    )
    def test_invalid_messages_raise_at_once(self, talker, messages: list[Any], said: str) -> None:
        with pytest.raises(InvalidRequestError, match=said):
            talker().create_chat_completion(messages)

    def test_other_errors(self, talker) -> None:
        with pytest.raises(TypeError, match="mirostat_alpha"):
            talker().create_chat_completion(MESSAGES, mirostat_alpha=3)
        with pytest.raises(ContextOverflowError):
            talker(context_length=16).create_chat_completion([{"role": "user", "content": "word " * 40}])
        with pytest.raises(ChatTemplateError):
            talker(template=None).create_chat_completion(MESSAGES, template="{{ raise_exception('no') }}")


class TestText:
    def test_shape(self, talker: Any) -> None:
        model: Model = talker()
        result = model.create_completion("a b", temperature=0, max_tokens=6, echo=True, model="mine")
        with model.create_session() as session:
            text = "".join(token.piece for token in session.generate("a b", max_tokens=6))
        n_prompt = len(model.tokenizer.encode_prompt("a b"))
        assert result.pop("id").startswith("cmpl-")
        assert isinstance(result.pop("created"), int)
        assert result == {
            "model": "mine",
            "object": "text_completion",
            "choices": [{"index": 0, "text": "a b" + text, "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": 6, "total_tokens": n_prompt + 6},
        }

    def test_chunks_join_to_the_result(self, talker: Any) -> None:
        model: Model = talker()
        options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 10, "logprobs": 2}
        result = model.create_completion("a b", **options)["choices"][0]
        choices = [chunk["choices"][0] for chunk in model.create_completion("a b", stream=True, **options)]
        assert "".join(choice["text"] for choice in choices) == result["text"]
        assert choices[-1]["finish_reason"] == result["finish_reason"]
        shapes = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [name for shape in shapes for name in shape["tokens"]] == result["logprobs"]["tokens"]

    def test_suffix(self, talker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model: Model = talker()
        with pytest.raises(TokenizerError, match="fill-in-the-middle"):
            model.create_completion("a", suffix="b")
        monkeypatch.setattr(model.tokenizer, "infill_ids", (4, 5, 6))
        infilled = model.create_completion("a", suffix="b", temperature=0, echo=True)
        same = model.create_completion(model.tokenizer.encode_infill("a", "b"), temperature=0)
        text = infilled["choices"][0]["text"]
        assert text == "a" + same["choices"][0]["text"]
        assert infilled["usage"] == same["usage"]

    def test_no_limit_is_the_context(self, talker: Any) -> None:
        for limit in (None, 0, -1):
            model = talker(context_length=24)
            result = model.create_completion(
                [5, 6], max_tokens=limit, logit_bias=dict.fromkeys(model.tokenizer.eog_ids, -1e9)
            )
            assert result["choices"][0]["finish_reason"] == "length"
            assert result["usage"]["total_tokens"] == 24

    def test_invalid_arguments(self, talker: Any) -> None:
        with pytest.raises(InvalidRequestError, match="logprobs must be an integer of at least 0, not -1"):
            talker().create_completion("a", logprobs=-1)
        with pytest.raises(InvalidRequestError, match="token 100000 at index 0"):
            talker().create_completion([100000])


class Answer:
    """Stand-in for a Pydantic model."""

    def __init__(self, n: int):
        self.n = n

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    @classmethod
    def model_validate_json(cls, text: str) -> "Answer":
        return cls(**json.loads(text))


def test_pydantic_model_as_response_format(talker, script) -> None:
    pytest.importorskip("llguidance")
    model = talker()
    script(model, '{"n": 7}')
    result = model.create_chat_completion(MESSAGES, response_format=Answer)
    assert result["choices"][0]["message"]["parsed"].n == 7
    script(model, '{"n": 7}')
    cut = model.create_chat_completion(MESSAGES, response_format=Answer, max_tokens=2)["choices"][0]
    assert (cut["finish_reason"], cut["message"]["parsed"]) == ("length", None)
    assert SamplingParams(json_schema=Answer).json_schema == json.dumps(Answer.model_json_schema())
    with pytest.raises(InvalidRequestError, match="response_format must be an object or a Pydantic model"):
        model.create_chat_completion(MESSAGES, response_format="json")


def test_functions_describe_themselves_as_tools(talker, script) -> None:
    def roll(n: int) -> int:
        """Roll a number."""
        return n

    model = talker(WITH_TOOLS)
    script(model, CALL)
    message = model.create_chat_completion(MESSAGES, tools=[roll])["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "roll", "arguments": '{"n": 2}'}


def test_processors_of_logits_and_criteria_of_the_end(talker) -> None:
    model = talker()
    seen: list[tuple[int, int]] = []

    def only(token: int) -> Any:
        def process(ids: Any, logits: Any) -> Any:
            seen.append((len(ids), len(logits)))
            return np.where(np.arange(len(logits)) == token, 0, -np.inf)

        return process

    (a,) = model.encode("a", False)
    prompt = model.encode_prompt("once")
    result = model.create_completion("once", logits_processor=only(a), max_tokens=3)
    assert result["choices"][0]["text"] == "aaa"
    assert seen == [(len(prompt) + i, model.config.n_vocab) for i in range(3)]

    def ends(ids: Any, logits: Any) -> bool:
        assert logits.shape == (model.config.n_vocab,)
        return bool(list(ids[len(prompt) :]) == [a, a])

    result = model.create_completion("once", logits_processor=[only(a)], stopping_criteria=ends, max_tokens=9)
    assert (result["choices"][0]["text"], result["choices"][0]["finish_reason"]) == ("aa", "stop")
    with pytest.raises(InvalidRequestError, match="logits_processor must be a function or several, not 3"):
        model.create_completion("once", logits_processor=3)
    with pytest.raises(InvalidRequestError, match=r"logits_processor: its logits have the shape \[1\]"):
        model.create_completion("once", logits_processor=lambda ids, logits: logits[:1])
    with pytest.raises(InvalidRequestError, match="logits_processor returned None: it must return the logits"):
        model.create_completion("once", logits_processor=lambda ids, logits: None)


async def replies(model: Model, options: dict[str, Any]) -> tuple[Any, list[Any], str]:
    whole = await model.create_chat_completion_async(MESSAGES, **options)
    chunks = [chunk async for chunk in await model.create_chat_completion_async(MESSAGES, stream=True, **options)]
    with model.create_chat("Be brief.", max_tokens=20, seed=7) as chat:
        chat.add_user("Hi.")
        text = "".join([piece.text async for piece in chat.respond_async(SamplingParams(temperature=1.5, min_p=0.05))])
    return whole, chunks, text


def test_completions_and_chats_in_asyncio(talker) -> None:
    model = talker()
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 20}
    whole, chunks, text = asyncio.run(replies(model, options))
    expected = model.create_chat_completion(MESSAGES, **options)["choices"][0]["message"]["content"]
    assert whole["choices"][0]["message"]["content"] == joined(chunks, "content") == expected
    with model.create_chat("Be brief.", max_tokens=20, seed=7) as chat:
        chat.add_user("Hi.")
        assert text == "".join(p.text for p in chat.respond(SamplingParams(temperature=1.5, min_p=0.05)))
        assert repr(chat) == f"<ChatSession of {model.name!r}: 2 messages, {chat.session.n_past} of 512 tokens>"
    options = {"seed": 3, "max_tokens": 4}
    result = asyncio.run(model.create_completion_async("once", **options))
    assert result["choices"] == model.create_completion("once", **options)["choices"]
