"""Ranges of all numeric options of all commands, and the log."""

import json
import logging
import re
from collections.abc import Iterator

import click
import pytest

from llamacli.cli.app import app
from llamacli.cli.numbers import IntList
from llamacli.cli.options import StderrHandler
from suite import check_each

NUMERIC = (click.types.IntParamType, click.types.FloatParamType, IntList)


def numeric_options() -> Iterator[tuple[str, click.Option]]:
    for name, command in sorted(app.commands.items()):
        for param in command.params:
            if isinstance(param, click.Option) and isinstance(param.type, NUMERIC):
                yield name, param


OPTIONS = [(f"{command} {option.opts[-1]}", command, option) for command, option in numeric_options()]


def outside(kind: click.ParamType) -> Iterator[tuple[str, str]]:
    """Values outside of a range, each with the expected message."""
    if isinstance(kind, IntList):
        for value in ("-1", str(kind.largest + 1), "1,9999999999", "nan"):
            yield value, f"from 0 to {kind.largest}"
        return
    said = f"of at least {kind.min}" if kind.max is None else f"from {kind.min:.15g} to {kind.max:.15g}"
    yield from ((str(value), said) for value in (kind.min - 1, -(10**30)))
    if kind.max is not None:
        yield from ((str(value), said) for value in (kind.max + 1, 10**30))
    if isinstance(kind, click.FloatRange):
        yield "-inf", said
        yield "inf", said
        yield "nan", said


def refusal(invoke, command: str, *options: str, **settings) -> str:
    """The usage error of a command with these options.

    Model files are not opened.
    """
    arguments = ["no such file" for param in app.commands[command].params if isinstance(param, click.Argument)]
    params = [param for param in app.commands[command].params if isinstance(param, click.Option) and param.required]
    needed = [text for param in params for text in (param.opts[-1], "no such file")]
    result = invoke(command, *needed, *options, "--", *arguments, **settings)
    assert (result.exit_code, result.stdout) == (2, "")
    return " ".join(result.stderr.split())


def test_numeric_options_are_found() -> None:
    assert {"run", "bench", "perplexity", "embed", "quantize"} <= {command for command, _ in numeric_options()}


def test_numeric_options_have_a_range() -> None:
    def check(command: str, option: click.Option) -> None:
        assert isinstance(option.type, click.IntRange | click.FloatRange | IntList)
        assert getattr(option.type, "min", 0) is not None

    check_each(check, OPTIONS)


def test_values_out_of_range_are_usage_errors(invoke) -> None:
    def check(command: str, option: click.Option) -> None:
        for value, said in outside(option.type):
            for flag in option.opts:
                given = [f"{flag}={value}"] if flag.startswith("--") else [flag, value]
                message = refusal(invoke, command, *given)
                assert said in message, value
                assert option.opts[-1] in message

    check_each(check, OPTIONS)


def test_invalid_numbers_are_usage_errors(invoke) -> None:
    def check(command: str, option: click.Option) -> None:
        for value in ("x", "1e", "0x10", " "):
            message = refusal(invoke, command, f"{option.opts[-1]}={value}")
            assert option.opts[-1] in message

    check_each(check, OPTIONS)


def test_ranges_of_environment_variables(invoke) -> None:
    def check(command: str, option: click.Option) -> None:
        value, said = next(outside(option.type))
        message = refusal(invoke, command, env={f"LLAMACLI_{command}_{option.name}".upper(): value})
        assert said in message
        assert option.opts[-1] in message

    check_each(check, OPTIONS)


def test_log_records_of_a_logger_begin_with_their_time(capsys) -> None:
    handler = StderrHandler()
    handler.timed = "llamacli.serve"
    for name in ("llamacli.serve.access", "llamacli.kv"):
        handler.emit(logging.makeLogRecord({"name": name, "levelname": "INFO", "msg": "text of %s", "args": (name,)}))
    timed, plain = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"llamacli: info: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d text of llamacli\.serve\.access", timed)
    assert plain == "llamacli: info: text of llamacli.kv"


def test_log_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    handler = StderrHandler()
    handler.as_json = True
    fields = {"method": "GET", "seconds": 0.5, "path": "/a\n\x1b"}
    record = logging.LogRecord("llamacli.serve", logging.INFO, "f.py", 1, "took %s\n", ("long",), None)
    record.fields = fields
    handler.emit(record)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {"level": "info", "logger": "llamacli.serve", "message": "took long\n", **fields}
