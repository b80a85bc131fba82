"""Templates by llama.cpp's names; prompts recorded by tests/oracle/named_templates.py."""

import json

import pytest

from llamacli.chat.named import Turns, named_templates
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from oracle.named_templates import CONVERSATIONS, GOLDEN

EXPECTED = json.loads(GOLDEN.read_text())
WITHOUT_SYSTEM = ("orion", "yandex")
"""Here a message of the system becomes part of the user's, as for all templates that refuse it; in llama.cpp Yandex'
leaves it out."""


def prompt(turns: Turns, conversation: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in conversation]
    tokenizer = tokenizer_from_metadata(Metadata(byte_level([])))
    return ChatTemplate(turns.template(), tokenizer).render(messages, add_generation_prompt=True).text


@pytest.mark.parametrize("name", named_templates())
def test_same_prompts_as_llama_cpp(name: str) -> None:
    assert {*EXPECTED} == {*named_templates()}
    turns = named_templates()[name]
    for conversation, expected in zip(CONVERSATIONS, EXPECTED[name], strict=True):
        found = prompt(turns, conversation)
        if conversation[0][0] == "system" and name in WITHOUT_SYSTEM:
            assert found.index("Be brief.") < found.index("Hi")
        else:
            assert found == expected
