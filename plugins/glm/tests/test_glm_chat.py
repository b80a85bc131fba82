"""Tool calls of GLM-4.5."""

import pytest

from llamacli.chat.codec import ChatCodec
from llamacli.chat.messages import Message, ToolCall
from llamacli.gguf import Metadata
from llamacli.testing.chats import TOOLS
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_glm.chat import FORMAT

TEMPLATE = "{{ messages[0].content }}{{ tools | tojson if tools else '' }}<|assistant|>{# <tool_call> <arg_key> #}"
REPLY = (
    "\n<think>I look.</think>\nWait.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo 1</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>roll</tool_call>"
)
TAGS = ["<|assistant|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


def codec(tags: list[str], template: str = TEMPLATE, architecture: str = "glm4moe") -> ChatCodec:
    keys = byte_level([], dict.fromkeys(["</s>", *tags], CONTROL), eos_token_id=256)
    metadata = Metadata({**keys, "general.architecture": architecture, "tokenizer.chat_template": template})
    return ChatCodec(tokenizer_from_metadata(metadata), metadata, [FORMAT])


@pytest.mark.parametrize("tags", [["<|assistant|>"], TAGS])
def test_reply_with_two_calls(tags: list[str]) -> None:
    chat = codec(tags)
    assert chat.format.name == "glm-4.5"
    reader = chat.reader(chat.render([{"role": "user", "content": "Hi"}], tools=TOOLS), tools=True)
    for token in chat.tokenizer.encode(REPLY, add_special=False, parse_special=True):
        reader.feed(token, chat.tokenizer.piece(token))
    reader.flush()
    calls = ToolCall("get_weather", {"city": "Oslo 1", "days": [1, 2]}, "call00001"), ToolCall("roll", {}, "call00002")
    assert reader.message() == Message("assistant", "Wait.", "I look.", calls)


def test_other_files_have_other_formats() -> None:
    assert codec(TAGS, architecture="other").format.name == "hermes"
    assert codec(TAGS, TEMPLATE.replace("<arg_key>", "")).format.name == "hermes"
