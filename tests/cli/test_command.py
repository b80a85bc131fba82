"""Groups of options in the help, and options of llama.cpp."""

import re
from pathlib import Path

import click
import pytest

from llamacli.cli.app import app
from llamacli.cli.command import Command, Option, grouped, in_group
from llamacli.cli.numbers import Integer, Number
from llamacli.cli.peer_options import FOREIGN


@pytest.fixture
def run():
    """Run a small command: its parameters or usage error, and stderr."""

    @click.command(cls=Command)
    @click.argument("model")
    @in_group("Length", click.option("-n", type=Integer(0, 9), cls=Option), click.option("-x", type=Number(0, 1)))
    @click.option("-p", "--prompt")
    @click.option("--raw", is_flag=True)
    @click.option("-b", is_flag=True)
    @click.option("-a", is_flag=True)
    def command(**given: object) -> None:
        click.echo(given)

    def invoke(*args: str) -> tuple[dict[str, object] | str, str]:
        result = click.testing.CliRunner().invoke(command, args)
        if result.exit_code:
            return result.stderr.splitlines()[-1].removeprefix("Error: "), ""
        return eval(result.stdout), result.stderr

    return invoke


def test_help_has_groups(invoke) -> None:
    shown = invoke("run", "--help").stdout
    headings = re.findall(r"^(\w.*):$", shown, re.M)
    assert headings == [
        "Model and prompt", "Context and length", "Sampling", "Grammar", "Chat", "Speculative decoding", "Output",
        "Computing", "Several machines", "Model metadata", "Other",
    ]  # fmt: skip
    assert shown.index("Sampling:") < shown.index("--top-k") < shown.index("Grammar:")
    assert "[from 0 to 1]" in shown
    assert "1000000" not in shown


def test_every_option_is_in_one_group() -> None:
    command = app.commands["run"]
    options = [option for group in grouped(command.params).values() for option in group]
    assert sorted(map(id, options)) == sorted(id(p) for p in command.params if isinstance(p, click.Option))


@pytest.mark.parametrize("name", sorted(app.commands))
def test_summaries_are_not_cut(name: str, invoke) -> None:
    shown = invoke("--help", env={"COLUMNS": "80"}).stdout
    line = next(line for line in shown.splitlines() if line.startswith(f"  {name} "))
    assert line.endswith(".")
    assert "..." not in line


@pytest.mark.parametrize(
    "args",
    [
        ["-ngl", "99"], ["--n-gpu-layers=99"], ["-fa", "on"], ["-fa"], ["--no-mmap"], ["-i"], ["-sm", "none"], ["-cnv"],
    ],
)  # fmt: skip
def test_options_without_effect_are_accepted_with_a_note(args: list[str], run) -> None:
    given, said = run(*args, "m", "-n", "3")
    assert given == {"model": "m", "n": 3, "x": None, "prompt": None, "raw": False, "b": False, "a": False}
    assert said.startswith("llamacli: note: without effect: " + args[0].partition("=")[0])
    assert said.count("\n") == 1


def test_options_without_effect_are_named_in_one_line(run) -> None:
    _, said = run("m", "-ngl", "99", "-ngl", "9", "-mg", "0", "--mlock")
    assert said == (
        "llamacli: note: without effect: -ngl (models run on the CPU), -mg (models run on the CPU), "
        "--mlock (weights are packed in memory)\n"
    )


def test_option_under_another_name(run) -> None:
    given, said = run("m", "-no-cnv")
    assert (given["raw"], said) == (True, "")


def test_server_takes_them_too(invoke) -> None:
    result = invoke("serve", "-ngl", "99", "--host")
    assert result.exit_code == 2
    assert result.stderr.startswith("llamacli: note: without effect: -ngl (models run on the CPU)")


def test_options_that_would_change_results_are_errors(run) -> None:
    assert run("m", "--keep", "2")[0].startswith("--keep is an option of llama.cpp; here: use --context-shift")
    assert run("m", "--mmproj-url", "x")[0].endswith("llama.cpp; here: use --mmproj.")
    assert run("m", "--num-ctx", "2")[0] == "--num-ctx is an option of other programs; here: use --ctx-size."


@pytest.mark.parametrize(
    ("arg", "said"),
    [
        ("-nlg", "No such option '-nlg'. (Did you mean one of: '-n', '-ngl'?)"),
        ("-zzz", "No such option '-zzz'."),
        ("--promt", "No such option '--promt'. Did you mean '--prompt'?"),
        ("-n12", "Invalid value for '-n': '12' is not an integer from 0 to 9."),
        ("-nx", "No such option '-nx'. "),
    ],
)
def test_unknown_options_name_similar_ones(arg: str, said: str, run) -> None:
    assert run("m", arg)[0].startswith(said)


def test_values_and_positional_arguments_stay(run) -> None:
    assert run("m", "-p", "-ngl")[0]["prompt"] == "-ngl"
    assert run("m", "-n3", "-x.5", "-ba")[0]["n"] == 3
    assert run("--", "-ngl")[0]["model"] == "-ngl"
    assert run("-", "--prompt=-cnv")[0] == {
        "model": "-", "n": None, "x": None, "prompt": "-cnv", "raw": False, "b": False, "a": False,
    }  # fmt: skip


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_defaults_in_the_help_are_not_broken(columns: int, invoke) -> None:
    shown = invoke("run", "--help", terminal_width=columns).stdout
    assert "[default: -1]\n" in shown
    assert "\N{NO-BREAK SPACE}" not in shown
    assert not [
        line
        for line in shown.splitlines()
        if line.rpartition("[")[2].startswith(("default:", "from ")) and not line.endswith("]")
    ]


def test_no_option_of_ours_is_shadowed() -> None:
    ours = {flag for command in app.commands.values() for param in command.params for flag in param.opts}
    assert not (ours - {"-b", "-i", "-sm", "--split-mode"}) & FOREIGN.keys()


def test_llama_bench_options(invoke, model: Path) -> None:
    result = invoke("bench", "-m", model, "-p", "4", "-n", "0", "-r", "1", "-ngl", "0,99", "-fa", "1", "-mmp", "0")
    assert result.exit_code == 0
    assert "without effect: -ngl" in result.stderr
