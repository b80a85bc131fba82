import json
from pathlib import Path

import pytest

from llamacli.chat.messages import Message
from llamacli.cli.conversations import Conversation, conversation_log
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def record(*texts: str) -> int:
    messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    return conversation_log().save(Conversation("dir/m.gguf", "", {}, messages))


def test_list_search_show_and_delete(invoke) -> None:
    assert invoke("logs").stderr == "no conversations; llamacli run --log records them\n"
    record("once upon", "the dog")
    number = record("x" * 80, "she saw")
    listed = invoke("logs").stdout
    assert listed.index("x" * 47 + "...") < listed.index("once upon")
    assert "m.gguf" in listed
    assert "once" not in invoke("logs", "saw").stdout
    assert invoke("logs", "nothing").stderr == "no conversation has this text\n"
    assert invoke("logs", "--show", str(number)).stdout == f"user: {'x' * 80}\n\nassistant: she saw\n"
    assert json.loads(invoke("logs", "--json").stdout)[0]["messages"][1]["content"] == "she saw"
    assert invoke("logs", "--rm", str(number)).stderr == f"conversation {number} deleted\n"
    assert "she saw" not in invoke("logs").stdout
    assert invoke("logs", "--path").stdout.strip().endswith("conversations.db")
    assert invoke("logs", "--show", "99").exit_code == 1
    assert invoke("logs", "--show", "1", "--path").exit_code == 2


def test_one_reply_is_recorded_and_continued(invoke, tiny_gguf) -> None:
    model = tiny_gguf("gqa", tokenizer="spm", context_length=512, metadata=chat_keys(CHATML))
    invoke("run", model, "once", "-n", "2")
    assert conversation_log().search() == []
    invoke("run", model, "once", "-n", "2", "--log")
    invoke("run", model, "and", "-n", "2", "--resume", "0")
    (conversation,) = conversation_log().search()
    assert [message.content for message in conversation.messages if message.role == "user"] == ["once", "and"]
    assert invoke("run", model, "and", "--resume", "7").exit_code == 1
