import pytest

from llamacli import InvalidRequestError
from llamacli.chat.messages import Message, ToolCall


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "a"),
        Message("assistant", "", "why", (ToolCall("f", {"x": [1]}, "call00001"),)),
        Message("tool", "1", name="f", tool_call_id="call00001"),
    ],
)
def test_dictionaries_round_trip(message: Message) -> None:
    assert Message.from_dict(message.as_dict()) == message


@pytest.mark.parametrize(
    "message",
    [1, {}, {"role": "user"}, {"role": "x", "content": ""}, {"role": "user", "content": 1}]
    + [{"role": "assistant", "content": "", "tool_calls": calls} for calls in (1, [1], [{"function": {}}])],
)
def test_invalid_dictionaries_raise(message) -> None:
    with pytest.raises(InvalidRequestError, match="not a message"):
        Message.from_dict(message)
