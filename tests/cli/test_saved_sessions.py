"""Saved sessions continue in another process without evaluating their tokens again."""

import json
from pathlib import Path

import pytest

from llamacli import load_model
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys

PROMPT = "once upon a time"
GREEDY = ("--temp", "0", "--ignore-eos")


@pytest.fixture
def talker(tiny_gguf) -> Path:
    return tiny_gguf("gqa", tokenizer="spm", context_length=256, metadata=chat_keys(CHATML))


def run(invoke, *args) -> dict:
    result = invoke("run", *args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_completion_continues_saved_session(invoke, model, tmp_path) -> None:
    saved = tmp_path / "s"
    whole = run(invoke, model, PROMPT, *GREEDY, "-n", "12")
    first = run(invoke, model, PROMPT, *GREEDY, "-n", "5", "--save-session", saved)
    second = run(invoke, model, *GREEDY, "-n", "4", "--load-session", saved, "--save-session", saved)
    third = run(invoke, model, *GREEDY, "-n", "3", "--load-session", saved)
    assert first["tokens"] + second["tokens"] + third["tokens"] == whole["tokens"]
    assert [part["stats"]["n_prompt"] for part in (second, third)] == [0, 0]
    more = run(invoke, model, "-p", "once", *GREEDY, "-n", "3", "--load-session", saved)
    assert 0 < more["stats"]["n_prompt"] < 5


def test_chat_continues_saved_session(invoke, talker, plugins, tmp_path) -> None:
    saved, options = tmp_path / "s", ("--temp", "0", "-n", "6", "--mode", "fp32")
    messages = ["once", "upon", "a time"]
    with load_model(talker, "fp32", plugins=plugins) as model, model.create_chat("", 6) as chat:
        expected, n_new = [], []
        for message in messages:
            chat.add_user(message)
            n_new.append(len(chat.render_turn()))
            expected.append("".join(piece.text for piece in chat.respond()))
    for i, message in enumerate(messages):
        load = ("--load-session", saved) if i else ()
        answer = run(invoke, talker, message, *options, *load, "--save-session", saved)
        assert answer["text"] == expected[i]
        assert answer["stats"]["n_prompt"] == n_new[i], "only what the message adds"


def test_invalid_session_files(invoke, model, talker, tmp_path) -> None:
    saved = tmp_path / "s"
    result = invoke("run", model, PROMPT, "--save-session", saved.parent / "none" / "x")
    assert (result.exit_code, result.stdout) == (1, ""), "before anything is generated"
    assert "No such file or directory" in result.stderr
    assert invoke("run", model, PROMPT, "-n", "2", "--save-session", saved).exit_code == 0
    for args, reason in (
        ((talker, "--raw", "-p", "a", "--load-session", saved), "another model"),
        ((model, "--load-session", saved, "--mode", "q8"), "another mode"),
        ((model, "--load-session", saved, "-ctk", "q8_0"), "q8_0/f16"),
        ((model, "--load-session", tmp_path / "none"), "none"),
        ((model, "--load-session", model), "not a saved state"),
    ):
        result = invoke("run", *args)
        assert result.exit_code == 1
        assert reason in result.stderr
    assert invoke("run", talker, "--raw", "-p", "a", "-n", "2", "--save-session", saved).exit_code == 0
    result = invoke("run", talker, "a", "--load-session", saved)
    assert (result.exit_code, "its conversation cannot be read" in result.stderr) == (1, True)
