"""Grammars of replies, walked through with texts."""

import json
from collections.abc import Callable

import pytest

import tiny_chat
from llamacli import Model, load_model
from llamacli.chat.calls import json_calls
from llamacli.chat.channels import HARMONY
from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import FREE, Constraint, ToolUse, reply_constraint
from llamacli.chat.formats import ChatFormat
from llamacli.chat.syntax import HERMES, PLAIN, THINKING, Calls, Span, Spans
from llamacli.engine import ReferenceEngine
from llamacli.errors import InvalidRequestError
from llamacli.sampling import SamplingParams, build_chain

pytest.importorskip("llguidance")

COLOUR = {"enum": ["red", "blue"]}
PARAMETERS = {"type": "object", "properties": {"c": COLOUR}, "required": ["c"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '{"name": "paint", "arguments": {"c": "red"}}'


@pytest.fixture(scope="module")
def chat_model(tiny_gguf, plugins) -> Model:
    """A tiny model whose special tokens are those of `tiny_chat`."""
    keys = tiny_chat.chat_keys("{{ messages }}{{ tools }}")
    path = tiny_gguf("gqa", tokenizer="spm", metadata=keys)
    return load_model(path, plugins=plugins, engine=ReferenceEngine())


@pytest.fixture(scope="module")
def allows(chat_model: Model) -> Callable[[Constraint, str], bool]:
    """Check if a constraint allows a whole reply."""

    def check(constraint: Constraint, text: str) -> bool:
        params = SamplingParams(
            grammar=constraint.grammar,
            json_schema=constraint.json_schema,
            grammar_triggers=constraint.triggers,
            grammar_after=constraint.after,
        )
        sampler = build_chain(params, chat_model.tokenizer)
        ids = chat_model.tokenizer.encode(text, add_special=False, parse_special=True)
        try:
            for token in [*ids, min(chat_model.tokenizer.eog_ids)]:
                sampler.accept(token)
        except InvalidRequestError:
            return False
        return True

    return check


@pytest.fixture(scope="module")
def codec_with(chat_model: Model) -> Callable[..., ChatCodec]:
    """A codec with this syntax."""

    def make(syntax) -> ChatCodec:
        fmt = ChatFormat(name="test", matches=lambda info: True, syntax=syntax)
        return ChatCodec(chat_model.tokenizer, chat_model.metadata, [fmt])

    return make


def test_schema_alone(codec_with, allows) -> None:
    made = reply_constraint(codec_with(PLAIN), "", COLOUR, None, None)
    assert made == Constraint(json_schema=json.dumps(COLOUR))
    assert allows(made, '"red"')
    assert not allows(made, '"green"')


@pytest.mark.parametrize("syntax", [THINKING, Spans(Span("<|im_start|>", "<|im_end|>"))], ids=["text", "control"])
def test_schema_after_reasoning(syntax, codec_with, allows, chat_model) -> None:
    span = syntax.reasoning
    made = reply_constraint(codec_with(syntax), "", COLOUR, None, None)
    is_open = reply_constraint(codec_with(syntax), f"assistant{span.opens}\n", COLOUR, None, None)

    thought = "the sky {is} blue </tag>\n"
    assert allows(made, f'{span.opens}{thought}{span.closes}\n\n"blue"')
    assert allows(is_open, f'{thought}{span.closes}"red"')
    assert not allows(is_open, '"red"')
    assert not allows(made, f'{thought}{span.closes}"red"')
    assert not allows(made, f'{span.opens}{thought}{span.closes}"green"')
    assert allows(made, '"red"')
    assert not allows(made, '"green"')


def test_no_reasoning_where_the_model_has_none(codec_with, allows) -> None:
    off = reply_constraint(codec_with(THINKING), "assistant<think>\n\n</think>\n\n", COLOUR, None, None)
    unknown = reply_constraint(codec_with(Spans(Span("<muse>", "</muse>"))), "", COLOUR, None, None)
    assert off == unknown == Constraint(json_schema=json.dumps(COLOUR))


def test_grammar_after_reasoning(codec_with, allows) -> None:
    grammar = 'root ::= "red" | "blue"'
    made = reply_constraint(codec_with(THINKING), "", None, grammar, None)
    is_open = reply_constraint(codec_with(THINKING), "assistant<think>\n", None, grammar, None)
    assert allows(made, "red")
    assert allows(made, "<think>hm</think>blue")
    assert allows(is_open, "hm</think>blue")
    assert not allows(made, "<think>hm</think>green")
    assert reply_constraint(codec_with(PLAIN), "", None, grammar, None) == Constraint(grammar)


def test_required_calls(codec_with, allows) -> None:
    made = reply_constraint(codec_with(HERMES), "", None, None, ToolUse(TOOLS, required=True))
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    assert allows(made, call)
    assert allows(made, f"<think>which one?</think>\n{call}\n{call}")
    assert allows(made, '<tool_call>{"name": "stop", "parameters": {"any": 1}}</tool_call>')
    other = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    for wrong in ("hello", "", other, call.replace("red", "pink")):
        assert not allows(made, wrong), wrong
    single = reply_constraint(codec_with(HERMES), "", None, None, ToolUse(TOOLS, required=True, parallel=False))
    assert allows(single, call)
    assert not allows(single, f"{call}\n{call}")


@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"c": COLOUR}, "type": "object", "properties": {"c": {"$ref": "#/$defs/c"}}, "required": ["c"]},
        {"definitions": {"c": COLOUR}, "properties": {"c": {"$ref": "#/definitions/c"}}, "required": ["c"]},
        {"type": "object", "properties": {"c": COLOUR, "next": {"$ref": "#"}}, "required": ["c"]},
    ],
)
def test_references_in_schemas_of_tools(parameters: dict, codec_with, allows) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": parameters}}
    made = reply_constraint(codec_with(HERMES), "", None, None, ToolUse([tool], required=True))
    assert allows(made, f"<tool_call>{CALL}</tool_call>")
    assert not allows(made, f"<tool_call>{CALL.replace('red', 'pink')}</tool_call>")
    if "next" in parameters["properties"]:
        nested = '{"name": "paint", "arguments": {"c": "red", "next": {"c": "%s"}}}'
        assert allows(made, f"<tool_call>{nested % 'blue'}</tool_call>")
        assert not allows(made, f"<tool_call>{nested % 'pink'}</tool_call>")


def test_free_calls_are_constrained_from_their_marker_on(codec_with, allows) -> None:
    made = reply_constraint(codec_with(HERMES), "", None, None, ToolUse(TOOLS))
    assert made.triggers == ("<tool_call>",)
    assert allows(made, "hello, <tool> is a word")
    assert allows(made, f"let me see <tool_call>{CALL}</tool_call>")
    assert not allows(made, '<tool_call>{"name": "other", "arguments": {}}</tool_call>')


def test_calls_without_markers(codec_with, allows) -> None:
    syntax = Spans(calls=Calls("[CALLS]", "", json_calls))
    made = reply_constraint(codec_with(syntax), "", None, None, ToolUse(TOOLS, required=True))
    assert allows(made, f"[CALLS]{CALL}")
    assert allows(made, f"[CALLS][{CALL}]")


def test_schema_or_calls(codec_with, allows) -> None:
    made = reply_constraint(codec_with(HERMES), "", COLOUR, None, ToolUse(TOOLS))
    assert allows(made, '"red"')
    assert allows(made, f"<tool_call>{CALL}</tool_call>")
    assert not allows(made, "hello")


def test_channels(codec_with, allows) -> None:
    prompt = "<|start|>assistant"
    made = reply_constraint(codec_with(HARMONY), prompt, COLOUR, None, None)
    final = '<|channel|>final<|message|>"red"'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert allows(made, final)
    assert allows(made, thought + final)
    assert not allows(made, thought + final.replace("red", "pink"))
    calls = reply_constraint(codec_with(HARMONY), prompt, None, None, ToolUse(TOOLS, required=True))
    assert allows(calls, thought + ' to=functions.paint<|channel|>commentary<|message|>{"c": "red"}')
    assert allows(calls, '<|channel|>commentary to=functions.paint<|message|>{"c": "red"}')
    assert not allows(calls, thought + final)


def test_syntax_without_a_grammar_of_calls(codec_with) -> None:
    syntax = Spans(calls=Calls("<a>", "</a>", lambda text: []))
    assert reply_constraint(codec_with(syntax), "", None, None, ToolUse(TOOLS)) == FREE
    with pytest.raises(InvalidRequestError, match="cannot be made to call tools"):
        reply_constraint(codec_with(syntax), "", None, None, ToolUse(TOOLS, required=True))
