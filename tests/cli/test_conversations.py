import stat
from pathlib import Path

import attrs
import pytest

from llamacli import InvalidRequestError
from llamacli.chat.messages import Message, ToolCall
from llamacli.cli.conversations import Conversation, ConversationLog

TALK = Conversation(
    "model.gguf", "be brief", {"enable_thinking": True},
    [
        Message("user", "once\nupon"),
        Message("assistant", "100% sure", "because", (ToolCall("f", {"a": 1}, "call1"),)),
        Message("tool", "2", name="f", tool_call_id="call1"),
    ],
)  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> ConversationLog:
    return ConversationLog(tmp_path / "state" / "conversations.db")


def test_conversation_is_read_as_it_was_saved(log: ConversationLog) -> None:
    number = log.save(TALK)
    found = log.load(number)
    assert attrs.evolve(found, updated=0.0) == attrs.evolve(TALK, id=number)
    assert found.title == "once"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_saving_again_replaces_the_conversation(log: ConversationLog) -> None:
    number = log.save(TALK)
    longer = attrs.evolve(TALK, id=number, messages=[*TALK.messages, Message("user", "more")])
    assert log.save(longer) == number
    assert [len(found.messages) for found in log.search()] == [4]


def test_latest_comes_first(log: ConversationLog) -> None:
    numbers = [log.save(TALK) for _ in range(3)]
    log.save(attrs.evolve(TALK, id=numbers[0]))
    assert [found.id for found in log.search()] == [numbers[0], numbers[2], numbers[1]]
    assert [found.id for found in log.search(limit=1)] == [numbers[0]]
    assert log.load().id == numbers[0]


@pytest.mark.parametrize(("text", "n"), [("100%", 1), ("UPON", 1), ("%", 1), ("_", 0), ("dog", 0), ("", 1)])
def test_search_finds_text_of_messages(text: str, n: int, log: ConversationLog) -> None:
    log.save(TALK)
    assert len(log.search(text)) == n


def test_removed_conversation_is_gone(log: ConversationLog) -> None:
    number = log.save(TALK)
    log.remove(number)
    assert log.search() == []
    with pytest.raises(InvalidRequestError, match="has no conversations"):
        log.remove(number)


def test_unknown_number(log: ConversationLog) -> None:
    with pytest.raises(InvalidRequestError, match="has no conversations: /set log on"):
        log.load()
    log.save(TALK)
    with pytest.raises(InvalidRequestError, match="there is no conversation 7 in the log; llamacli logs lists them"):
        log.load(7)


def test_damaged_log(log: ConversationLog) -> None:
    log.path.parent.mkdir()
    log.path.write_bytes(b"not a database" * 100)
    with pytest.raises(InvalidRequestError, match="the log cannot be used"):
        log.search()
