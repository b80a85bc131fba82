import pytest

from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import ToolUse, reply_constraint
from llamacli.chat.formats import choose
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.template import ChatTemplate
from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata
from llamacli.sampling import SamplingParams, build_chain
from llamacli.testing.vocabularies import CONTROL, USER_DEFINED, byte_level, scored
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_llama.chat import FORMATS

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TAGS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def found(tokens=(), *, name: str = "A model", pieces: bool = True, template: str | None = None, architecture="llama"):
    """The format of a file, and its template."""
    kinds = dict.fromkeys(tokens, CONTROL)
    values = scored({"▁": 0}, kinds) if pieces else byte_level([], kinds, bos_token_id=256)
    values |= {"general.architecture": architecture, "general.name": name}
    if template is not None:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values)
    tokenizer = tokenizer_from_metadata(metadata)
    fmt = choose(metadata, tokenizer, FORMATS)
    assert fmt.template is not None
    return fmt, ChatTemplate(fmt.template, tokenizer)


def test_headers() -> None:
    fmt, template = found(TAGS, pieces=False)
    assert fmt.name == "llama-3"
    assert template.render(TALK, add_generation_prompt=True).text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("name", ["Llama 2 7B Chat", "LLaMA v2", "llama-2-13b", "Mistral-7B-Instruct-v0.1", "Mixtral"])
def test_instructions(name: str) -> None:
    fmt, template = found(name=name) if name != "LLaMA v2" else found(["[INST]"], name=name)
    assert fmt.name == "llama-2"
    assert template.render(TALK, add_generation_prompt=True).text == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"
    )
    assert template.render(TALK[1:2]).text == "<s>[INST] Hi [/INST]"


def test_zephyr() -> None:
    fmt, template = found()
    assert fmt.name == "zephyr"
    assert template.render(TALK[:2], add_generation_prompt=True).text == (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    )


def test_other_formats_are_not_detected() -> None:
    assert found(["<|im_start|>", "<|im_end|>"])[0].name == "chatml"
    assert found(template="{{ messages }}")[0].name == "plain"
    assert found(TAGS, template="<|start_header_id|><|eot_id|>", architecture="other")[0].name == "plain"


def test_calls_are_json_after_a_tag_or_alone() -> None:
    fmt, _ = found(TAGS, pieces=False, template="<|start_header_id|> <|eot_id|>")
    for text in ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', '{"name": "f", "parameters": {"x": 1}}'):
        reader = fmt.syntax.reader("", tools=True)
        assert reader.feed(text) + reader.flush() == [ToolCall("f", {"x": 1})]


def test_calls_are_a_list_after_a_tag() -> None:
    fmt, _ = found(["[INST]"], template="[INST][TOOL_CALLS]")
    reader = fmt.syntax.reader("", tools=True)
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]'
    assert reader.feed(text) + reader.flush() == [ToolCall("f", {"x": 1})]


MISTRAL = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")


def test_system_prompts() -> None:
    fmt, template = found(MISTRAL, architecture="mistral3")
    assert fmt.name == "mistral-v7"
    assert template.render(TALK, add_generation_prompt=True).text == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello.</s>[INST]Bye[/INST]"
    )


@pytest.mark.parametrize(
    "text",
    [
        'f[ARGS]{"x": {"y": 1}}[TOOL_CALLS]g[ARGS]{}',
        'f{"x": {"y": 1}}[TOOL_CALLS] g {}',
        '[{"name": "f", "arguments": {"x": {"y": 1}}}, {"name": "g", "arguments": {}}]',
    ],
)
def test_calls_are_a_name_and_its_arguments(text: str) -> None:
    fmt, _ = found(MISTRAL, architecture="mistral3")
    for pieces in ([f"[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]{text}"], f"[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]{text}"):
        reader = fmt.syntax.reader("", tools=True)
        events = [event for piece in pieces for event in reader.feed(piece)] + reader.flush()
        assert events[-2:] == [ToolCall("f", {"x": {"y": 1}}), ToolCall("g", {})]
        assert "".join(event.text for event in events[:-2] if event.reasoning) == "Hm."
        assert "".join(event.text for event in events[:-2] if not event.reasoning) == "Yes."


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED], ids=["control", "text"])
def test_forced_calls_by_name(kind: int) -> None:
    pytest.importorskip("llguidance")
    marks = dict.fromkeys(["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"], kind)
    kinds = {"</s>": CONTROL, **dict.fromkeys(MISTRAL, CONTROL), **marks}
    metadata = Metadata({**byte_level([], kinds, eos_token_id=256), "general.architecture": "mistral3"})
    codec = ChatCodec(tokenizer_from_metadata(metadata), metadata, FORMATS)
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}}
    made = reply_constraint(codec, "", None, None, ToolUse([tool, {"function": {"name": "g"}}], required=True))

    def allows(text: str) -> bool:
        chain = build_chain(SamplingParams(grammar=made.grammar), codec.tokenizer)
        try:
            for token in [*codec.tokenizer.encode(text, add_special=False, parse_special=True), codec.tokenizer.eos_id]:
                chain.accept(token)
        except InvalidRequestError:
            return False
        return True

    call = '[TOOL_CALLS]f[ARGS]{"x": 1}'
    for good in (call, f"{call}[TOOL_CALLS]g[ARGS]{{}}", f"[THINK]Hm.[/THINK]{call}"):
        assert allows(good), good
    for bad in ("Hi.", '[TOOL_CALLS]f{"x": 1}', "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}", f"{call} and more"):
        assert not allows(bad), bad


@pytest.mark.parametrize("text", ["f", "f[ARGS]x", "[ARGS]{}", 'f{"x": 1} and more', 'f{"x": 1}[TOOL_CALLS]', "f[1]"])
def test_what_is_not_a_call_is_text(text: str) -> None:
    fmt, _ = found(MISTRAL, architecture="mistral3")
    reader = fmt.syntax.reader("", tools=True)
    events = reader.feed(f"[TOOL_CALLS]{text}") + reader.flush()
    assert "".join(event.text for event in events) == f"[TOOL_CALLS]{text}"


def test_seed_oss_reasoning_and_calls() -> None:
    fmt, _ = found(template="{# <seed:think> <seed:tool_call> #}", architecture="seed_oss")
    assert fmt.name == "seed-oss"
    reader = fmt.syntax.reader("", tools=True)
    text = (
        "<seed:think>\nHm.\n</seed:think>So:\n<seed:tool_call>\n<function=f>\n<parameter=a>two\nlines</parameter>\n"
        "<parameter=b>True</parameter>\n<parameter=c>3</parameter>\n</function>\n<function=g>\n</function>\n</seed:tool_call>"
    )
    calls = [ToolCall("f", {"a": "two\nlines", "b": True, "c": 3}), ToolCall("g")]
    assert [*reader.feed(text), *reader.flush()] == [Piece("Hm.", reasoning=True), Piece("So:"), *calls]
