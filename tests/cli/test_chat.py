import json
from pathlib import Path

import click.testing
import pytest

from llamacli import Session, load_model
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys

GREEDY = ("--temp", "0", "--mode", "fp32", "-n", "8")
THINKING = CHATML + "{{ '<think>' if enable_thinking }}{{ effort }}"


@pytest.fixture
def talker(tiny_gguf) -> Path:
    """A model with a chat template and a context of 256 tokens."""
    return tiny_gguf("gqa", tokenizer="spm", context_length=256, metadata=chat_keys(THINKING))


@pytest.fixture
def script(talker, plugins, monkeypatch):
    """Script the model's replies."""

    def set_replies(*replies: str) -> None:
        with load_model(talker, "fp32", plugins=plugins) as model:
            ids = iter(
                token for reply in replies for token in model.encode(f"{reply}<|im_end|>", False, parse_special=True)
            )
        monkeypatch.setattr(Session, "draw", lambda _self, _params: next(ids))

    return set_replies


def reply_to(path: Path, plugins, text: str, system: str = "", **variables) -> str:
    with load_model(path, "fp32", plugins=plugins) as model, model.create_chat(system, 8, **variables) as chat:
        chat.add_user(text)
        return "".join(piece.text for piece in chat.respond())


def stdout(result: click.testing.Result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_model_with_a_template_replies(invoke, talker, plugins) -> None:
    expected = reply_to(talker, plugins, "once")
    assert stdout(invoke("run", talker, "once", *GREEDY)).removesuffix("\n") == expected.removesuffix("\n")
    assert stdout(invoke("run", talker, *GREEDY, input="once\n")).removesuffix("\n") == expected.removesuffix("\n")


def test_raw_continues_the_prompt(invoke, talker) -> None:
    for flag in ("--raw", "--no-chat"):
        assert stdout(invoke("run", talker, "once", flag, *GREEDY)).startswith("once")


def test_system_prompt(invoke, talker, plugins) -> None:
    expected = reply_to(talker, plugins, "once", "a big dog")
    assert expected != reply_to(talker, plugins, "once")
    for flag in ("-sys", "--system-prompt"):
        out = stdout(invoke("run", talker, "once", flag, "a big dog", *GREEDY))
        assert out.removesuffix("\n") == expected.removesuffix("\n")


def test_reasoning_goes_to_stderr(invoke, talker, script) -> None:
    script("a ball</think>the dog")
    result = invoke("run", talker, "once", "--think", *GREEDY, "-n", "-1")
    assert (stdout(result), result.stderr) == ("the dog\n", "a ball")


def test_json(invoke, talker, script) -> None:
    script("a ball</think>the dog")
    answer = json.loads(stdout(invoke("run", talker, "once", "--think", "--json", *GREEDY, "-n", "-1")))
    assert (answer["prompt"], answer["text"], answer["reasoning_content"]) == ("once", "the dog", "a ball")
    assert (answer["stop"], answer["stats"]["n_gen"]) == ("eos", len(answer["tokens"]))


def test_logprobs(invoke, talker) -> None:
    answer = json.loads(stdout(invoke("run", talker, "once", "--json", "--logprobs", "2", *GREEDY)))
    assert [entry["id"] for entry in answer["logprobs"]] == answer["tokens"] != []


def test_templates_by_name_and_from_a_file(invoke, talker, model, tmp_path, script) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    script("the dog", "the dog", "the dog")
    source = "{{ messages[0].content }}"
    for option, value in (("", "zephyr"), ("-file", tmp_path / "mine.jinja"), ("", source)):
        assert stdout(invoke("run", talker, "once", f"--chat-template{option}", value)) == "the dog\n"
    result = invoke("run", talker, "once", "--chat-template", "nonsense")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "chat template 'nonsense' is not one of bailing, " in result.stderr
    both = ("--chat-template", "zephyr", "--chat-template-file", "x")
    assert invoke("run", talker, "once", *both).exit_code == 2


def test_broken_template_is_one_line(invoke, talker) -> None:
    result = invoke("run", talker, "once", "--chat-template", "a\n{% if %}")
    expected = "llamacli: error: the chat template cannot be compiled, line 2: Expected an expression"
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1


def test_model_without_a_template_warns_and_continues(invoke, model) -> None:
    result = invoke("run", model, "once", "-sys", "x", *GREEDY)
    assert stdout(result).startswith("once")
    assert "has no chat template, so it continues the prompt" in result.stderr
    assert not stdout(invoke("run", model, "once", "--chat-template", "zephyr", *GREEDY)).startswith("once")


def test_options_that_exclude_chat(invoke, talker) -> None:
    assert invoke("run", talker, "once", "--ignore-eos").exit_code == 2
    result = invoke("run", talker)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no prompt to reply to" in result.stderr


def test_prompt_too_long(invoke, talker) -> None:
    result = invoke("run", talker, "once upon a time " * 100)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tokens and the context only 256: shorten it or raise -c" in result.stderr
