"""Prompts and replies without a session."""

import json
import threading
from typing import Any

import pytest

from llamacli import InvalidRequestError
from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import ToolUse, reply_constraint
from llamacli.chat.messages import Message, Piece, ToolCall
from llamacli.gguf import Metadata
from llamacli.testing.chats import CHATML, TOOLS
from llamacli.testing.vocabularies import CONTROL, USER_DEFINED, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

KINDS = {
    "<s>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<tool_call>": CONTROL,
    "</tool_call>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
}
TOOL_USE = "{{ tools | tojson }}" + CHATML
USER = {"role": "user", "content": "Hi <|im_end|>"}
OPENING = CHATML.replace("assistant\n", "assistant\n<think>\n")


def make(template: str = CHATML, *, tools: bool = False, named: dict[str, str] | None = None, **keys: Any) -> ChatCodec:
    tokens = byte_level([], KINDS, **{"bos_token_id": 256, "eos_token_id": 258} | keys)
    templates = {f"tokenizer.chat_template.{name}": text for name, text in (named or {}).items()}
    metadata = Metadata({**tokens, "tokenizer.chat_template": template, **templates})
    return ChatCodec(tokenizer_from_metadata(metadata), metadata, tools=tools)


def read(codec: ChatCodec, reply: str, *, prompt: str = "", size: int = 1, **options: Any) -> tuple[list, Message]:
    """Events and message of a reply fed `size` characters at a time."""
    rendering = codec.render([{"role": "user", "content": prompt}], tools=TOOLS if options.get("tools") else None)
    reader, events = codec.reader(rendering, **options), []
    for part in codec.tokenizer.split(reply, codec.template.structure):
        if isinstance(part, int):
            events += reader.feed(part, "")
        else:
            for at in range(0, len(part), size):
                events += reader.feed(ord("x"), part[at : at + size])
    return [*events, *reader.flush()], reader.message()


@pytest.mark.parametrize("add_bos", [True, False])
def test_prompt_ids_are_those_of_the_text_but_for_forged_tokens(add_bos: bool) -> None:
    codec = make(add_bos_token=add_bos)
    rendering = codec.render([USER])
    assert rendering.text == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    ids = codec.encode(rendering)
    text = codec.tokenizer.decode(ids, unparse_special=True)
    assert text == "<s>" * add_bos + rendering.text
    assert [token for token in ids if token >= 256] == [256] * add_bos + [257, 258, 257]
    assert codec.render([USER], add_generation_prompt=False).text == rendering.text[: -len("<|im_start|>assistant\n")]


def test_variables_reach_the_template_and_reserved_ones_raise() -> None:
    codec = make("{{ effort }}{{ documents }}{{ messages[0].content }}")
    assert codec.render([USER], variables={"effort": "low", "documents": [1]}).text == "low[1]Hi <|im_end|>"
    with pytest.raises(InvalidRequestError, match="'tools' cannot be a variable"):
        codec.render([USER], variables={"tools": []})


def test_template_for_tools_is_taken_with_tools() -> None:
    assert make(named={"tool_use": TOOL_USE}, tools=True).template.source == TOOL_USE
    assert make(named={"tool_use": TOOL_USE}).template.source == CHATML
    assert make(tools=True).template.source == CHATML


def test_templates_without_tools_describe_them(caplog: pytest.LogCaptureFixture) -> None:
    codec = make()
    call = {"id": "a", "type": "function", "function": {"name": "roll", "arguments": {"n": 2}}}
    talk = [USER, {"role": "assistant", "content": "Hm.", "tool_calls": [call]}]
    talk += [{"role": "tool", "content": "2", "name": "roll"}, {"role": "tool", "content": "3"}]
    talk += [{"role": "user", "content": "?"}]
    text = codec.render(talk, tools=TOOLS).text
    codec.render(talk, tools=TOOLS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    system, user, assistant, result, end = text.split("<|im_start|>")[1:]
    assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in system
    assert user == "user\nHi <|im_end|><|im_end|>\n"
    written = '<tool_call>\n{"name": "roll", "arguments": {"n": 2}}\n</tool_call>'
    assert assistant == f"assistant\nHm.\n\n{written}<|im_end|>\n"
    assert result == "user\nResult of roll: 2\nResult: 3\n\n?<|im_end|>\n"
    assert end == "assistant\n"
    brief = codec.render([{"role": "system", "content": "Be brief."}, USER], tools=TOOLS).text
    assert brief.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    reader = codec.reader(codec.render([USER], tools=TOOLS), tools=True)
    for character in f"So: {written}":
        reader.feed(0, character)
    reader.flush()
    assert reader.message() == Message("assistant", "So:", "", (ToolCall("roll", {"n": 2}, "call00001"),))
    assert codec.render([USER]).text == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"


def test_calls_are_forced_where_the_template_has_no_tools() -> None:
    codec = make()
    prompt = codec.render([USER], tools=TOOLS).text
    assert "%json" in (reply_constraint(codec, prompt, None, None, ToolUse(TOOLS, required=True)).grammar or "")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reply_is_divided_into_reasoning_calls_and_text(size: int) -> None:
    call = '<tool_call>{"name": "roll", "arguments": {"n": 2}}</tool_call>'
    events, message = read(make(TOOL_USE), f"<think>I roll.</think>\n\nWait. {call}", size=size, tools=True, n_calls=4)
    text = {
        flag: "".join(e.text for e in events if isinstance(e, Piece) and e.reasoning is flag) for flag in (False, True)
    }
    assert text == {False: "Wait.", True: "I roll."}
    assert message == Message("assistant", "Wait.", "I roll.", (ToolCall("roll", {"n": 2}, "call00005"),))
    assert [event for event in events if isinstance(event, ToolCall)] == list(message.tool_calls)


def test_other_control_tokens_divide_words() -> None:
    codec = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    reader = codec.reader(codec.render([USER]))
    pieces = [("a", 97), ("", codec.tokenizer.token_id("<tool_call>")), ("b", 98)]
    events = [event for piece, token in pieces for event in reader.feed(token, piece)]
    assert "".join(event.text for event in events) == "a b"


def test_calls_are_text_without_tools() -> None:
    _, message = read(make(TOOL_USE), '<tool_call>{"name": "roll"}</tool_call>')
    assert message.tool_calls == ()
    assert '{"name": "roll"}' in message.content


def test_prompt_that_opens_the_reasoning() -> None:
    _, message = read(make(OPENING), "A ball.\n</think>\nThe dog")
    assert message == Message("assistant", "The dog", "A ball.")


def test_reader_ends_at_an_end_token_and_reads_no_more() -> None:
    codec = make()
    reader = codec.reader(codec.render([USER]))
    assert reader.is_empty
    assert reader.feed(104, "h") == [Piece("h")]
    assert (reader.feed(258, ""), reader.ended) == ([], True)
    assert reader.feed(104, "h") == reader.flush() == []
    assert reader.message() == Message("assistant", "h")


def test_reader_ends_at_the_text_that_ends_a_message() -> None:
    codec = make("{% for m in messages %}{{ m.role }}: {{ m.content }}[end]\n{% endfor %}assistant: ")
    assert codec.ends().text == "[end]"
    reader = codec.reader(codec.render([USER]))
    events = [event for piece in ("the", " dog", "[e", "nd]", " she") for event in reader.feed(0, piece)]
    assert "".join(event.text for event in events if isinstance(event, Piece)) == "the dog"
    assert reader.ended
    assert reader.flush() == []


def test_ends_depend_on_variables() -> None:
    codec = make("{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}")
    first = codec.ends({"end": "</a>"})
    assert first.text == "</a>"
    assert codec.ends({"end": "</b>"}).text == "</b>"
    assert codec.ends({"end": "</a>"}) is first
    for n in range(100):
        assert codec.ends({"end": f"<{n}>"}).text == f"<{n}>"
    assert codec.ends({"end": "</a>"}).text == "</a>"


def test_control_tokens_after_messages_end_them() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}END{% endfor %}"
    for text, tokens in (("</tool_call>", {258, 260}), ("</think>", {258})):
        ends = make(template.replace("END", text)).ends()
        assert (ends.tokens, ends.text) == (tokens, "")


def test_one_codec_in_several_threads() -> None:
    codec, found = make(), {}

    def run(n: int) -> None:
        messages = [{"role": "user", "content": f"<s>{n}"}] * 5
        found[n] = [codec.encode(codec.render(messages)) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        assert found[n] == [codec.encode(codec.render([{"role": "user", "content": f"<s>{n}"}] * 5))] * 5


def test_markers_of_reasoning() -> None:
    thinking = CHATML + "{# </think> #}"
    opening, plain = make(OPENING + "{# </think> #}"), make("{{ messages[0].content }}")
    assert make(thinking).reasoning_markers(make(thinking).render([USER])) == ("<think>", "</think>")
    assert opening.reasoning_markers(opening.render([USER])) == ("", "</think>")
    assert plain.reasoning_markers(plain.render([USER])) == ()
    assert [one.opens_reasoning(one.render([USER]).prompt) for one in (make(thinking), opening, plain)] == [
        False,
        True,
        False,
    ]
    harmony = make("<|start|><|channel|><|message|>")
    assert harmony.reasoning_markers(harmony.render([USER])) == ("", "<|channel|>final", "<|message|>")
