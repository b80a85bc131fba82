"""Chat at a terminal, driven through a pseudo-terminal."""

import base64
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from llamacli.testing.chats import CHATML
from mcp_files import write_mcp_file, write_sdk_file
from suite import slow_but
from tiny_chat import chat_keys

TIMEOUT_S = 20
READY = b"\x1b[?2004h"  # pasting is bracketed where something can be typed
ESCAPES = re.compile(rb"\x1b\][^\x07]*\x07|\x1b[\[(][0-9;?]*[ -/]*[@-~]|\x1b[=>]")

TALKS = """
from llamacli import Session, hookimpl
LLAMACLI_API = 1
REPLIES = iter(%r)

@hookimpl
def model_loaded(model):
    def ids():
        for reply in REPLIES:
            yield from model.encode(reply + "<|im_end|>", False, parse_special=True)
        while True:
            yield model.tokenizer.token_id("a")
    drawn = ids()
    Session.draw = lambda session, params: next(drawn)
"""


def plain(shown: bytes) -> str:
    return ESCAPES.sub(b"", shown).decode(errors="replace").replace("\r", "")


class Terminal:
    """A pseudo-terminal with the program in it."""

    def __init__(self, start, *args: str | Path, env: dict[str, str]):
        self._user, tty = pty.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.process: subprocess.Popen[bytes] = start(
            "run", *args, stdin=tty, stdout=tty, stderr=tty, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(tty, termios.TIOCSCTTY, 0),
            env={"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
        )  # fmt: skip
        os.close(tty)
        self._shown = b""

    def wait(self, wanted: str | bytes) -> str:
        """Read the output until a text, or raw bytes, have come."""
        deadline = time.monotonic() + TIMEOUT_S
        while wanted not in (self._shown if isinstance(wanted, bytes) else plain(self._shown)):
            ready = select.select([self._user], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"{wanted!r} did not come after {plain(self._shown)!r}"
            self._shown += os.read(self._user, 65536)
        if isinstance(wanted, bytes):
            before, _, self._shown = self._shown.partition(wanted)
            return plain(before)
        shown, self._shown = plain(self._shown), b""
        return shown

    def ready(self) -> str:
        """Read the output until the program waits for input."""
        return self.wait(READY)

    def press(self, keys: str | bytes) -> None:
        os.write(self._user, keys.encode() if isinstance(keys, str) else keys)

    def say(self, line: str) -> str:
        """Type a line and read the output until the next prompt."""
        self.press(f"{line}\r")
        return self.ready()

    def exit(self) -> int:
        self.press("\x04")
        code = self.process.wait(TIMEOUT_S)
        os.close(self._user)
        return code


@pytest.fixture
def talk(start, site: Path, install, tiny_gguf, tmp_path: Path):
    """Start a chat with scripted replies: `talk("one reply", "another", args=[...])`."""

    def begin(
        *replies: str, args: tuple[str, ...] = (), context_length: int = 512, env: dict[str, str] | None = None
    ) -> Terminal:
        keys = chat_keys(CHATML.replace("assistant\n", "assistant\n{{ '<think>' if enable_thinking }}"))
        path = tiny_gguf("gqa", tokenizer="spm", context_length=context_length, metadata=keys)
        install(site, "llamacli-talks", "[llamacli]\ntalks = talks_plugin\n", talks_plugin=TALKS % (replies,))
        home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
        terminal = Terminal(start, path, *args, env=home | (env or {}))
        assert "/help lists the commands." in terminal.ready()
        return terminal

    return begin


def test_chat_at_a_terminal(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", "she saw")
    assert "the dog\n" in terminal.say("once upon")
    assert "she saw\n" in terminal.say("and?")
    assert "messages" in terminal.say("/show")
    assert terminal.exit() == 0
    assert "+once upon" in (tmp_path / "state" / "llamacli" / "history").read_text()


def test_history_is_saved(talk) -> None:
    terminal = talk("the dog", "she saw")
    terminal.say("once upon")
    terminal.press("\x1b[A")
    terminal.wait("once upon")
    assert "she saw\n" in terminal.say(" a time")
    assert terminal.exit() == 0


def test_history_without_a_home(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", env={"HOME": "nowhere", "XDG_STATE_HOME": ""})
    assert "the dog\n" in terminal.say("once upon")
    terminal.press("\x1b[A")
    terminal.wait("once upon")
    terminal.press("\x03")
    terminal.ready()
    assert terminal.exit() == 0
    assert not list(tmp_path.rglob("history"))


def test_locale_without_utf8_keeps_text(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert "the dog\n" in terminal.say("é 日")
    terminal.say(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert saved["messages"][0]["content"] == "é 日"
    assert terminal.exit() == 0


def test_input_in_invalid_utf8_is_refused(talk) -> None:
    terminal = talk("the dog")
    terminal.press(b"caf\xe9 \r")
    assert "error: the input is not UTF-8" in terminal.ready()
    assert "the dog\n" in terminal.say("once")
    assert terminal.exit() == 0


def test_logprobs_are_a_usage_error(start, tiny_gguf, tmp_path: Path) -> None:
    model = tiny_gguf("gqa", tokenizer="spm", metadata=chat_keys(CHATML))
    terminal = Terminal(start, model, "--logprobs", "1", env={"HOME": str(tmp_path)})
    assert "--logprobs is for one reply: give a prompt." in terminal.wait("give a prompt.\n")
    assert terminal.process.wait(TIMEOUT_S) == 2


def test_message_of_several_lines(talk, tmp_path: Path) -> None:
    terminal = talk("the dog")
    terminal.say('"""once')
    terminal.say("upon")
    assert "the dog\n" in terminal.say('a time"""')
    terminal.say(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0]["content"] == "once\nupon\na time"
    assert terminal.exit() == 0


def test_pasted_lines_are_one_message(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", "she saw")
    terminal.press("\x1b[200~/etc/fstab is empty\n  or not\x1b[201~")
    assert "the dog\n" in terminal.say("?")
    terminal.press("\x1b[200~/system be\nbrief\x1b[201~")
    terminal.say("")
    terminal.say(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0]["content"] == "/etc/fstab is empty\n  or not?"
    assert saved["system"] == "be\nbrief"
    assert terminal.exit() == 0


def test_ctrl_c_stops_reply_and_typed_line(talk) -> None:
    terminal = talk("the dog")
    terminal.press("half a line\x03")
    assert "(Ctrl-D exits)" in terminal.ready()
    assert "the dog\n" in terminal.say("once")
    for text in ("and", "more"):
        terminal.press(f"{text}\r")
        terminal.wait("aaaaa")
        terminal.press("\x03")
        terminal.ready()
    assert "6 messages" in terminal.say("/show")
    assert terminal.exit() == 0


@pytest.mark.parametrize("command", slow_but(["/exit"], ["/exit", "/bye", "/quit", "exit", "quit"]))
def test_exit_commands(command: str, talk) -> None:
    terminal = talk()
    terminal.press(f"{command}\r")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_all_commands(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", "she saw", "big", "little", "a ball")
    listed = terminal.say("/help").split("/help", 1)[1]
    for name in (
        "/help", "/set", "/show", "/stats", "/clear", "/tokens", "/regen", "/edit", "/copy", "/system", "/model",
        "/tools", "/save", "/load", "/read", "/logs", "/resume", "/exit", "/quit",
    ):  # fmt: skip
        assert name in listed
    assert "unknown command /nonsense" in terminal.say("/nonsense")
    assert "there is no reply to replace" in terminal.say("/regen")
    assert "the dog\n" in terminal.say("once")
    assert "/regen takes a seed, an integer of at least 0, not 'x'" in terminal.say("/regen x")
    assert "she saw\n" in terminal.say("/regen")
    assert "(none)" in terminal.say("/system")
    terminal.say("/system be brief")
    assert "be brief" in terminal.say("/system")
    saved = tmp_path / "talk.json"
    terminal.say(f"/save {saved}")
    assert json.loads(saved.read_text()) == {
        "system": "be brief",
        "messages": [{"role": "user", "content": "once"}, {"role": "assistant", "content": "she saw"}],
        "variables": {},
    }
    terminal.say("/clear")
    assert "0 messages" in terminal.say("/show")
    terminal.say("/system other")
    terminal.say(f"/load {saved}")
    shown = terminal.say("/show")
    assert "2 messages" in shown
    assert "be brief" in shown
    (tmp_path / "notes.txt").write_text("my notes")
    terminal.say(f"/read {tmp_path / 'notes.txt'}")
    assert "big\n" in terminal.say("what of it")
    terminal.say(f"/save {saved}")
    assert json.loads(saved.read_text())["messages"][2]["content"] == "my notes\n\nwhat of it"
    assert terminal.exit() == 0


def test_reply_is_drawn_again_with_a_seed(start, tiny_gguf, tmp_path: Path) -> None:
    model = tiny_gguf("gqa", tokenizer="spm", context_length=512, metadata=chat_keys(CHATML))
    terminal = Terminal(start, model, "-n", "8", env={"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})
    terminal.ready()
    first = terminal.say("once").split("once", 1)[1]
    replies = [terminal.say(command).split("(seed ", 1)[1] for command in ("/regen 7", "/retry", "/retry 7")]
    assert replies[0] == replies[2]
    assert replies[0].startswith("7)\n")
    assert len({first, *(reply.split("\n", 1)[1] for reply in replies)}) == 3
    assert "2 messages" in terminal.say("/show")
    terminal.say("/set temperature 0")
    assert "(seed 7; at temperature 0 replies do not depend on it)" in terminal.say("/retry 7")
    assert terminal.exit() == 0


def test_tokens_of_a_text_and_of_the_last_message(talk) -> None:
    terminal = talk("the dog")
    assert "there is no message with a text; /tokens TEXT lists" in terminal.say("/tokens")
    assert re.search(r"\(1 token, 1 character\)\n  \d+ 'x'\n", terminal.say("/tokens x"))
    assert re.search(r"\(2 tokens, 2 characters\)\n  \d+ 'x'  \d+ '9'\n", terminal.say("/tokens x9"))
    terminal.say("once")
    assert re.search(r"\(\d tokens, 7 characters\)\n  \d+ '", terminal.say("/tokens"))
    assert "(600 tokens, 600 characters; the first 200:)" in terminal.say("/tokens " + "9" * 600)
    assert terminal.exit() == 0


def test_settings(talk) -> None:
    terminal = talk("a ball</think>the dog")
    for command, answer in [
        ("/set temp 0.5", ""),
        ("/set parameter top-k 7", ""),
        ("/set system be brief", ""),
        ("/set max-tokens 20", ""),
        ("/set seed 1", ""),
        ("/set effort low", ""),
        ("/set think on", ""),
        ("/set top_p 2", "top_p = 2.0 is not a number from 0 to 1"),
        ("/set top_k x", "/set top_k takes an integer, not 'x'"),
        ("/set temp x", "/set temp takes a number, not 'x'"),
        ("/set parameter temperature 0.25", ""),
        ("/set repeat-penalty 1.25", ""),
        ("/set repetition_penalty 1.5", ""),
        ("/set num_ctx 100", "num_ctx is fixed while a model is loaded: start llamacli run with -c N"),
        ("/set temp", "/set temp needs a value; now it is 0.25"),
        ("/set nonsense 1", "unknown setting 'nonsense'; /set lists all"),
    ]:
        assert answer in terminal.say(command)
    shown = terminal.say("/show")
    for line in (
        r"temperature +0\.25",
        r"repeat_penalty +1\.5",
        r"top_k +7",
        "system +be brief",
        r"max_tokens +20",
        r"think +on",
        r"effort +low",
        r"seed +1\n",
        r"top_p +0\.95\n",
        r"template +of the model's file",
        r"type +llama, 2 layers, mode auto, cache f16",
    ):
        assert re.search(line, shown)
    assert re.search(r"a ball\n+the dog\n", terminal.say("once"))
    assert terminal.exit() == 0


def flat(shown: str) -> str:
    """Text in one line: the terminal wraps lines with long paths."""
    return " ".join(shown.split())


def test_invalid_files(talk, tmp_path: Path) -> None:
    terminal = talk()
    (tmp_path / "bad.json").write_text('{"system": 1}')
    (tmp_path / "variables.json").write_text('{"system": "", "messages": [], "variables": {"messages": 1}}')
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for command, answer in [
        ("/load nowhere.json", "error: nowhere.json: No such file or directory"),
        (f"/load {tmp_path / 'bad.json'}", "not a chat file of /save"),
        (f"/load {tmp_path / 'variables.json'}", "not a chat file of /save"),
        (f"/load {tmp_path}", "Is a directory"),
        ("/read nowhere.txt", "No such file or directory"),
        (f"/read {tmp_path}", "Is a directory"),
        (f"/read {tmp_path / 'latin'}", "is not UTF-8"),
        ("/save", "/save needs a file name"),
        (f"/save {tmp_path / 'no' / 'folder'}", "No such file or directory"),
    ]:
        assert answer in flat(terminal.say(command))
    assert terminal.exit() == 0


def test_full_context(talk) -> None:
    terminal = talk("the dog", "she", context_length=64)
    assert "nearly full" not in terminal.say("once")
    answer = flat(terminal.say("0123456789" * 4))
    assert "and the context only 64: shorten it, /clear the chat" in answer
    assert re.search(r"the chat has \d+ tokens", answer)
    assert "(no reply; your message is back at the prompt, Ctrl-C discards it)" in answer
    terminal.press("\x03")
    terminal.ready()
    assert "she\n" in terminal.say("x")
    terminal.say("/clear")
    assert "(the context is full: 64 of 64 tokens; /clear it" in terminal.say("y")
    assert terminal.exit() == 0


def test_context_shift_drops_oldest_messages(talk) -> None:
    terminal = talk("the dog", "she", args=("--context-shift", "--stats"), context_length=64)
    assert re.search(r"\(read \d+ tokens, .* tok/s; wrote 4, .* tok/s\)", terminal.say("once"))
    assert "she\n" in terminal.say("0123456789" * 2)
    assert "2 messages" in terminal.say("/show")
    assert terminal.exit() == 0


def test_refused_message_and_its_files_come_back(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", context_length=64)
    (tmp_path / "notes.txt").write_text("0123456789" * 4)
    terminal.say(f"/read {tmp_path / 'notes.txt'}")
    answer = terminal.say("sum up")
    assert "your message is back at the prompt with notes.txt" in answer
    terminal.wait("sum up")
    terminal.press("\x03")
    assert "(notes.txt discarded; Ctrl-D exits)" in terminal.ready()
    assert re.search(r"attached +\(none\)", terminal.say("/show"))
    assert "the dog\n" in terminal.say("once")
    assert terminal.exit() == 0


def test_interrupted_message_comes_back(talk, install, site: Path) -> None:
    slow = """
import time
from llamacli import Session, hookimpl
LLAMACLI_API = 1

@hookimpl
def model_loaded(model):
    evaluate = Session.eval
    def slowly(session, tokens, **options):
        if len(tokens) > 40:
            time.sleep(60)
        return evaluate(session, tokens, **options)
    Session.eval = slowly
"""
    install(site, "llamacli-slow", "[llamacli]\nslow = slow_plugin\n", slow_plugin=slow)
    terminal = talk("the dog")
    terminal.press("0123456789" * 5 + "\r")
    terminal.wait("reading the prompt")
    terminal.press("\x03")
    assert "(no reply; your message is back at the prompt, Ctrl-C discards it)" in terminal.ready()
    terminal.wait("0123456789" * 5)
    terminal.press("\x03")
    terminal.ready()
    assert "0 of 512 tokens, 0 messages" in terminal.say("/show")
    assert "the dog\n" in terminal.say("once")
    assert terminal.exit() == 0


def test_clear_frees_the_context(talk) -> None:
    terminal = talk("the dog")
    terminal.say("once")
    assert re.search(r"context +[1-9]\d* of 512 tokens, 2 messages", terminal.say("/show"))
    terminal.say("/clear")
    assert re.search(r"context +0 of 512 tokens, 0 messages", terminal.say("/show"))
    assert terminal.exit() == 0


def test_stop_string_ends_a_reply(talk) -> None:
    terminal = talk("the dog saw", "she")
    terminal.say('/set stop " dog" "never"')
    assert re.search(r"stop +' dog' 'never'", terminal.say("/set"))
    answer = terminal.say("once")
    assert "the\n" in answer
    assert "dog" not in answer
    assert terminal.exit() == 0


def test_speeds_are_shown_on_demand(talk) -> None:
    terminal = talk("the dog", "she", "a")
    assert "tok/s" not in terminal.say("once")
    assert "tok/s" in terminal.say("/stats")
    terminal.say("/set verbose")
    assert "tok/s" in terminal.say("x")
    terminal.say("/set quiet")
    assert "tok/s" not in terminal.say("y")
    assert terminal.exit() == 0


def test_last_message_is_edited_and_sent_again(talk, tmp_path: Path) -> None:
    terminal = talk("the dog", "she saw", env={"EDITOR": "sed -i s/once/twice/"})
    terminal.say("once upon")
    assert "she saw\n" in terminal.say("/edit")
    terminal.say(f"/save {tmp_path / 'talk.json'}")
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in messages] == ["twice upon", "she saw"]
    assert terminal.exit() == 0


def test_last_reply_is_copied(talk) -> None:
    terminal = talk("the dog")
    assert "there is no reply to copy" in terminal.say("/copy")
    terminal.say("once")
    terminal.press("/copy\r")
    terminal.wait(b"\x1b]52;c;" + base64.b64encode(b"the dog") + b"\x07")
    terminal.ready()
    assert terminal.exit() == 0


def test_other_model_continues_the_chat(talk, tiny_gguf) -> None:
    terminal = talk("the dog", "she saw")
    terminal.say("/set temp 0.5")
    terminal.say("once")
    assert "nowhere.gguf: no such file" in flat(terminal.say("/model nowhere.gguf"))
    plain_model = tiny_gguf("gqa", tokenizer="spm", context_length=512)
    assert "has no chat template" in flat(terminal.say(f"/model {plain_model}"))
    other = tiny_gguf("rope_base", tokenizer="spm", context_length=256, metadata=chat_keys(CHATML))
    assert "(2 messages so far)" in flat(terminal.say(f"/model {other}"))
    shown = terminal.say("/show")
    assert re.search(r"temperature +0\.5", shown)
    assert "of 256 tokens, 2 messages" in shown
    assert terminal.exit() == 0


def test_tools_of_a_python_file(talk, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text('def where(name: str) -> str:\n    """Place."""\n    return f"{name} is here"\n')
    terminal = talk("the dog")
    assert "error: /tools needs" not in terminal.say("/tools")
    assert "(where tools)" in terminal.say(f"/tools {tmp_path / 'tools.py'}")
    assert re.search(r"tools +where", terminal.say("/show"))
    assert "(no tools)" in terminal.say("/tools off")
    assert "the dog\n" in terminal.say("once")
    assert terminal.exit() == 0


def test_conversations_are_logged_and_resumed(talk) -> None:
    terminal = talk("the dog", "she saw", "a ball", args=("--log",))
    assert "(no conversations; /set log on records them)" in terminal.say("/logs")
    terminal.say("once upon")
    terminal.say("and?")
    terminal.say("/clear")
    terminal.say("another")
    assert "1     4 messages  once upon" in terminal.say("/logs dog")
    assert "another" in terminal.say("/logs")
    assert "(conversation 1: 4 messages, 'once upon')" in terminal.say("/resume 1")
    assert "4 messages" in terminal.say("/show")
    assert "there is no conversation 9 in the log" in terminal.say("/resume 9")
    assert terminal.exit() == 0


def test_completion_of_commands_settings_and_files(talk, tmp_path: Path) -> None:
    terminal = talk("the dog")
    (tmp_path / "notes_of_today.txt").write_text("my notes")
    for typed, completed in [
        ("/reg\t", "/regen"),
        ("/set wordw\t", "/set wordwrap"),
        (f"/read {tmp_path}/notes\t", "notes_of_today.txt"),
    ]:
        terminal.press(typed)
        terminal.wait(completed)
        terminal.press("\x03")
        terminal.ready()
    assert terminal.exit() == 0


def test_replies_are_wrapped_at_words(talk) -> None:
    terminal = talk("once upon a time " * 20)
    answer = terminal.say("tell").replace("\n", " ")
    assert len(re.findall(r"time", answer)) >= 20
    assert terminal.exit() == 0


CALLS = CHATML + "{{ tools }}{# Calls are between <tool_call> and </tool_call>. #}"
CALL = '<tool_call>{"name": "small_echo", "arguments": {"message": "a\\u202eb"}}</tool_call>'


def test_calls_of_mcp_servers_run_after_consent(talk, tmp_path: Path) -> None:
    path = write_mcp_file(tmp_path, small=["echo"])
    terminal = talk(CALL, "she saw", CALL, "the dog", args=("--mcp", str(path), "--chat-template", CALLS))
    assert re.search(r"tools +small_echo", terminal.say("/show"))
    terminal.press("once\r")
    shown = terminal.wait("Run it? [y/N]: ")
    assert "The model wants to call echo of the MCP server small:" in shown
    assert r'"message": "a\u202eb"' in shown
    terminal.press("y\r")
    shown = terminal.ready()
    assert r"-> echo: a" in shown
    assert "she saw\n" in shown
    terminal.press("again\r")
    terminal.wait("Run it? [y/N]: ")
    terminal.press("\r")
    shown = terminal.ready()
    assert "the user has not allowed this call" in " ".join(shown.split())  # the terminal wraps lines
    assert "the dog\n" in shown
    assert terminal.exit() == 0


@pytest.mark.slow
def test_example_of_the_mcp_package(talk, tmp_path: Path) -> None:
    wanted = CALL.replace("small_echo", "demo_add").replace('{"message": "a\\u202eb"}', '{"a": 20, "b": 22}')
    args = ("--mcp", str(write_sdk_file(tmp_path)), "--chat-template", CALLS)
    terminal = talk(wanted, "she saw", args=args, context_length=4096)
    terminal.press("once\r")
    assert "The model wants to call add of the MCP server demo:" in terminal.wait("Run it? [y/N]: ")
    terminal.press("y\r")
    shown = terminal.ready()
    assert "-> 42" in shown
    assert "she saw\n" in shown
    assert terminal.exit() == 0
