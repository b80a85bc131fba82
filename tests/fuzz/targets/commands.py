"""Command lines of `llamacli`, in one process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from click.testing import CliRunner
from hypothesis import strategies as st

import tiny_variants
from fuzz.target import Target
from llamacli.cli.app import app
from llamacli.cli.interrupts import EXIT_CODE
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys

_EXCLUDED = {"serve", "pull", "rm", "warmup", "doctor", "logs"}
"""Commands that wait for clients, need the network, delete, or take long."""

COMMANDS_TRIED = sorted(app.commands.keys() - _EXCLUDED)
_VALUES = [
    "model.gguf", "missing.gguf", "text.txt", ".", "/dev/null", "", "-", "x", "0", "1", "-1", "3", "2.5", "1e400",
    "nan",
    "inf", "18446744073709551616", "é", "\udcff", "a,b", "1,2", "1=2", "1+1", "auto", "fp32", "f16", "q8_0",
    "Q4_K_M", "true",
    "json", "{}", '{"type": "object"}', 'root ::= "a"', "{{ messages }}", "none", "top_k;temp", "bash", "\n",
    "a" * 3000,
]  # fmt: skip


def _flags(command: click.Command) -> Iterator[str]:
    for param in command.params:
        if isinstance(param, click.Option):
            yield from (*param.opts, *param.secondary_opts)


_FLAGS = {name: sorted(_flags(app.commands[name])) for name in COMMANDS_TRIED}
_OTHERS = ["--ngl", "-ngl", "-fa", "--mlock", "--no-such-option", "-x", "--", "--help", "--version", "--debug"]


def _lines(name: str) -> st.SearchStrategy[list[str]]:
    flag, value = st.sampled_from([*_FLAGS[name], *_OTHERS]), st.sampled_from(_VALUES)
    words = st.one_of(
        st.tuples(flag, value), st.tuples(flag, value), st.tuples(flag), st.tuples(value),
        st.builds(lambda flag, value: (f"{flag}={value}",), flag, value),
    )  # fmt: skip
    first = st.sampled_from([["model.gguf"], ["model.gguf"], []])
    # The last -n wins: what is generated stays short.
    last = [["-n", "2"]] if "-n" in _FLAGS[name] else [[]]
    return st.builds(
        lambda first, rest, last: [name, *first, *(word for words in rest for word in words), *last],
        first,
        st.lists(words, max_size=4),
        st.sampled_from(last),
    )


def _start(folder: Path) -> Callable[[tuple[list[str], str]], None]:
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HF_HOME"):
        os.environ[name] = str(folder / "home")
    os.environ.update(HF_HUB_OFFLINE="1", LLAMACLI_THREADS="1", COLUMNS="80")
    tiny_variants.write(folder / "model.gguf", "gqa", tokenizer="spm", metadata=chat_keys(CHATML))
    (folder / "text.txt").write_text("Once upon a time there was a little girl. " * 20)
    runner = CliRunner()

    def run(case: tuple[list[str], str]) -> None:
        arguments, text = case
        done = runner.invoke(app, arguments, input=text, prog_name="llamacli")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code in (0, 1, 2, EXIT_CODE), done.exit_code
        assert "Traceback (most recent" not in done.output or "--debug" in arguments, done.output
        assert done.exit_code == 0 or done.output.strip(), "an exit code without a message"

    for model in (["model.gguf"], []):  # kernels are compiled or loaded now
        run((["run", *model, "-p", "Once", "-n", "2"], ""))
    return run


COMMANDS = Target(
    cases=st.tuples(
        st.one_of(
            [*map(_lines, COMMANDS_TRIED), st.lists(st.sampled_from([*_VALUES, *COMMANDS_TRIED, *_OTHERS]), max_size=4)]
        ),
        st.sampled_from(["", "Once\n", "/help\n/exit\n", "\0\n", "Once\n/save x\n/load x\n/regen\n"]),
    ),
    start=_start,
    per_process=1000,
    memory=8 << 30,
    growth=256 << 20,
)
"""Command lines."""
