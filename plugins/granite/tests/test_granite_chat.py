"""Tool calls and reasoning of Granite."""

from llamacli.chat.formats import ChatFormat, choose
from llamacli.chat.messages import Piece, ToolCall
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_granite.chat import FORMAT

OLDER, NEWER = "{# <|tool_call|> <think> #}{{ messages }}", "{# <tool_call> #}{{ messages }}"


def found(template: str, architecture: str = "granite") -> ChatFormat:
    keys = byte_level([], dict.fromkeys(["<|end_of_text|>", "<|tool_call|>"], CONTROL), eos_token_id=256)
    metadata = Metadata({**keys, "general.architecture": architecture, "tokenizer.chat_template": template})
    return choose(metadata, tokenizer_from_metadata(metadata), [FORMAT])


def test_calls_are_a_list_in_json() -> None:
    reader = found(OLDER).syntax.reader("", tools=True)
    text = '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
    events = [*reader.feed(text), *reader.flush()]
    assert [event for event in events if isinstance(event, ToolCall)] == [ToolCall("f", {"x": 1}), ToolCall("g")]


def test_tags_of_reasoning_and_response_are_not_shown() -> None:
    for size in (1, 5, 100):
        reader = found(OLDER).syntax.reader("", tools=False)
        text = "<think>A sum.</think>\n<response>\nIt is 2 < 3.\n</response>"
        events = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]
        events += reader.flush()
        joined = {flag: "".join(piece.text for piece in events if piece.reasoning is flag) for flag in (True, False)}
        assert joined == {True: "A sum.", False: "It is 2 < 3."}
        assert all(isinstance(piece, Piece) for piece in events)


def test_detection() -> None:
    assert [found(OLDER).name, found(NEWER).name, found(OLDER, "other").name] == ["granite-3", "derived", "derived"]
