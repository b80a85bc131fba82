"""Parser and grammar of Gemma 4's tool calls."""

import random
import string
from collections.abc import Callable
from typing import Any

import pytest

from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import Constraint, ToolUse, reply_constraint
from llamacli.chat.messages import ToolCall
from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata
from llamacli.sampling import SamplingParams, build_chain
from llamacli.testing.vocabularies import CONTROL, USER_DEFINED, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_gemma.chat import CALLS, FORMATS

TEXTS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
Q = '<|"|>'
PARAMETERS = {
    "type": "object",
    "properties": {
        "town": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["town"],
}


@pytest.fixture(scope="module", params=[USER_DEFINED, CONTROL], ids=["text", "control"])
def codec(request: pytest.FixtureRequest) -> ChatCodec:
    kinds = {"<eos>": CONTROL, "<|turn>": CONTROL, "<turn|>": CONTROL, **dict.fromkeys(TEXTS, request.param)}
    values: dict[str, Any] = byte_level([], kinds, eos_token_id=256)
    metadata = Metadata({**values, "general.architecture": "gemma4"})
    return ChatCodec(tokenizer_from_metadata(metadata), metadata, FORMATS)


def constraint_of(codec: ChatCodec, schema: Any, **options: Any) -> Constraint:
    tool = {"type": "function", "function": {"name": "go.to-1", "parameters": schema}}
    return reply_constraint(codec, "", None, None, ToolUse([tool], **{"required": True, **options}))


@pytest.fixture
def allows(codec: ChatCodec) -> Callable[..., bool]:
    """Check if a forced call may have these arguments."""
    pytest.importorskip("llguidance")

    def check(schema: Any, arguments: str, *, reply: str = "<|tool_call>call:go.to-1%s<tool_call|>") -> bool:
        made = constraint_of(codec, schema)
        chain = build_chain(SamplingParams(grammar=made.grammar), codec.tokenizer)
        ids = codec.tokenizer.encode(reply.replace("%s", arguments), add_special=False, parse_special=True)
        try:
            for token in [*ids, min(codec.tokenizer.eog_ids)]:
                chain.accept(token)
        except InvalidRequestError:
            return False
        return True

    return check


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ('{a:<|"|><|"|>,b:<|"|>x:"y",\\{<|"|>}', {"a": "", "b": 'x:"y",\\{'}),
        ("{a:[1,-2.5,1e3],b:[],c:{d:{}}}", {"a": [1, -2.5, 1000.0], "b": [], "c": {"d": {}}}),
        ("{a: true, b:false, c:None,d:null}", {"a": True, "b": False, "c": None, "d": None}),
        ('{<|"|>a b<|"|>:1, "c":"d\\n",true:blue sky}', {"a b": 1, "c": "d\n", "true": "blue sky"}),
        ('{a:[<|"|>x<|"|>,{b:<|"|>\n<|"|>}]}', {"a": ["x", {"b": "\n"}]}),
    ],
)
def test_calls(written: str, arguments: dict[str, Any]) -> None:
    assert CALLS(f"call:some_tool-1.x{written}") == [ToolCall("some_tool-1.x", arguments)]


@pytest.mark.parametrize(
    "text", ["", "call:", "call:f", "call:f{", "call:f{a}", "call:f{a:}", 'call:f{a:<|"|>x}', "call:f{}x"]
)
def test_malformed_calls_are_ignored(text: str) -> None:
    with pytest.raises(ValueError):
        CALLS(text)


@pytest.mark.parametrize(
    "arguments",
    [
        f"{{town:{Q}Bern, {{CH}}: <b>{Q}}}",
        f"{{days:7,tags:[{Q}a{Q},{Q}{Q}],town:{Q}{Q},unit:{Q}C{Q}}}",
        f"{{tags:[{Q}a{Q}],town:{Q}x\ny{Q}}}",
    ],
)
def test_forced_calls_follow_the_schema(arguments: str, allows: Callable[..., bool]) -> None:
    assert allows(PARAMETERS, arguments)
    (call,) = CALLS(f"call:go.to-1{arguments}")
    assert set(call.arguments) <= set(PARAMETERS["properties"])


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        f"{{town:{Q}x{Q},}}",
        f"{{,town:{Q}x{Q}}}",
        f"{{days:8,town:{Q}x{Q}}}",
        f"{{days:1.5,town:{Q}x{Q}}}",
        f"{{town:{Q}x{Q},unit:{Q}K{Q}}}",
        f"{{tags:[],town:{Q}x{Q}}}",
        f"{{tags:[{Q}a{Q},{Q}b{Q},{Q}c{Q}],town:{Q}x{Q}}}",
        f"{{other:1,town:{Q}x{Q}}}",
        "{town:1}",
        f'{{town:{Q}x}}',
    ],
)  # fmt: skip
def test_other_calls_are_forbidden(arguments: str, allows: Callable[..., bool]) -> None:
    assert not allows(PARAMETERS, arguments)


def test_other_tools_and_texts_are_forbidden(allows: Callable[..., bool]) -> None:
    good = f"{{town:{Q}x{Q}}}"
    call = f"<|tool_call>call:go.to-1{good}<tool_call|>"
    assert allows(PARAMETERS, good, reply=f"<|channel>thought\nhm<channel|>{call}{call}")
    for reply in ("", "hello", f"<|tool_call>call:other{good}<tool_call|>", call.removesuffix("<tool_call|>")):
        assert not allows(PARAMETERS, good, reply=reply)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ["{}", f"{{a:[1,true,null,{{b_1:{Q}x{Q}}}]}}"], ["{a}", "{a:x}", "[]"]),
        ({"type": "object", "additionalProperties": False}, ["{}"], ["{a:1}"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{a:1,b:2}"], ["{a:true}"]),
        ({"required": ["b"], "properties": {"a": True}}, ["{a:1,b:null}", "{b:2}"], ["{a:1}", "{}"]),
        ({"properties": {"a b": {"const": 1}}}, [f"{{{Q}a b{Q}:1}}", "{}"], [f"{{{Q}a b{Q}:2}}", "{a b:1}"]),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, ["{a:1}", "{a:null}"], [f"{{a:{Q}x{Q}}}"]),
        ({"properties": {"a": {"type": "boolean", "nullable": True}}}, ["{a:true}", "{a:null}"], ["{a:1}"]),
        ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}},
         ["{a:1}", f"{{a:{Q}x{Q}}}"], ["{a:true}"]),
        ({"properties": {"a": {"enum": [1, None, [True], {"b": ""}]}}},
         ["{a:1}", "{a:null}", "{a:[true]}", f"{{a:{{b:{Q}{Q}}}}}"], ["{a:2}", "{a:[]}"]),
        ({"properties": {"a": {"items": {"type": "integer"}, "maxItems": 0}}}, ["{a:[]}"], ["{a:[1]}"]),
        ({"properties": {"next": {"$ref": "#"}, "v": {"allOf": [{"$ref": "#/$defs/v"}]}},
          "$defs": {"v": {"type": "integer"}}}, ["{next:{next:{v:1}},v:2}"], ["{next:1}", "{v:true}"]),
    ],
)  # fmt: skip
def test_schemas(schema: Any, good: list[str], bad: list[str], allows: Callable[..., bool]) -> None:
    assert [text for text in good if not allows(schema, text)] == []
    assert [text for text in bad if allows(schema, text)] == []
    for text in good:
        CALLS(f"call:go.to-1{text}")


def test_reference_to_nothing(codec: ChatCodec) -> None:
    with pytest.raises(InvalidRequestError, match="refers to '#/defs/x', which it does not have"):
        constraint_of(codec, {"properties": {"a": {"$ref": "#/defs/x"}}})


def test_free_calls_begin_at_their_marker(codec: ChatCodec) -> None:
    made = constraint_of(codec, PARAMETERS, required=False)
    assert made.triggers == ("<|tool_call>",)
    assert made.grammar


def test_calls_as_the_template_writes_them_are_allowed(codec: ChatCodec, allows: Callable[..., bool]) -> None:
    draw = random.Random(0)
    for _ in range(20):
        schema, arguments = _object(draw, 2)
        calls = [{"type": "function", "function": {"name": "go.to-1", "arguments": arguments}}]
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        text = (
            codec.template.render(messages).text.partition("<|tool_call>call:go.to-1")[2].partition("<tool_call|>")[0]
        )
        assert allows(schema, text), (schema, text)
        assert CALLS(f"call:go.to-1{text}") == [ToolCall("go.to-1", arguments)]


def _value(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    """Random schema and a value of it."""
    kind = draw.choice(["integer", "boolean", "string", "array", "object"][: 5 if depth else 3])
    if kind == "integer":
        return {"type": kind}, draw.randint(-999, 999)
    if kind == "boolean":
        return {"type": kind}, draw.random() < 0.5
    if kind == "string":
        return {"type": kind}, "".join(draw.choices(string.printable + "é\U0001f600", k=draw.randrange(6)))
    if kind == "object":
        return _object(draw, depth - 1)
    item, value = _value(draw, depth - 1)
    return {"type": kind, "items": item}, [value] * draw.randrange(3)


def _object(draw: random.Random, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    found = {draw.choice("aBcDe_") + str(i): _value(draw, depth) for i in range(draw.randrange(4))}
    required = [name for name in found if draw.random() < 0.5]
    kept = {name: value for name, (_, value) in found.items() if name in required or draw.random() < 0.5}
    if not found:
        return {"type": "object"}, {}
    return {"type": "object", "properties": {name: one for name, (one, _) in found.items()}, "required": required}, kept
