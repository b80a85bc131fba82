"""Wrong values of every option of every command.

Each message has the value, what is allowed, and what to type next: a similar name, an example, or the way to the help.
"""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from llamacli.cli.app import app
from llamacli.cli.numbers import Form, Integer, IntList, Number
from llamacli.cli.options import LoraFile
from llamacli.cli.plot import ImagePath
from llamacli.cli.serve import ReplicaRange
from suite import check_each

Wrong = tuple[list[str], tuple[str, ...]]

ARGUMENTS = {
    "batch": ["/dev/null"], "worker": ["--secret-file", "/dev/null"],
    "tokenize": ["text"], "embed": ["text"], "rank": ["query", "text"], "quantize": ["out.gguf", "Q8_0"],
    "convert": ["folder", "out.gguf"],
    "rm": ["user/repo"], "pull": ["user/repo"], "completion": ["bash"], "create": ["x"], "plugins new": ["mymodel"],
    "plugins check": ["llama"],
}  # fmt: skip
"""Further arguments of commands; those with MODEL have it first."""

ANY = {
    "prompt",
    "system",
    "system_prompt",
    "reasoning_effort",
    "reasoning_budget_message",
    "dry_sequence_breaker",
    "supported",
    "tags",
}
"""Options that take any text."""

TEXTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "origin": (["nonsense"], ("'nonsense' is not a model of the hub", "expected user/repo or user/repo:quant")),
    "settings": (["much"], ("'much' is not NAME=VALUE", "as in temperature=0.3")),
    "hf_repo": (["nonsense"], ("'nonsense' is not a model of the hub", "expected user/repo or user/repo:quant")),
    "kv_memory": (["nonsense"], ("'nonsense' is not a size such as 512M or 2G", "--kv-memory", "--help")),
    "catalogue": (["/dev/null/x"], ("/dev/null/x", "ot a directory")),
    "data": (["/dev/null/x"], ("/dev/null/x", "ot a directory")),
    "store_size": (["nonsense"], ("'nonsense' is not a size such as 512M or 2G", "--store-size", "--help")),
    "slot_save_path": (["/dev/null/x"], ("/dev/null/x", "ot a directory")),
    "ssl_cert_file": (["/dev/null"], ("/dev/null", "not a certificate and its key")),
    "ssl_key_file": (["/dev/null"], ("/dev/null", "not a certificate and its key")),
    "prompt_cache": (["/dev/null/x"], ("/dev/null/x", "ot a directory")),
    "prompt_cache_size": (
        ["nonsense"],
        ("'nonsense' is not a size such as 512M or 2G", "--prompt-cache-size", "--help"),
    ),
    "kl_base": (["/dev/null/x"], ("/dev/null is no folder",)),
    "split_max_size": (["nonsense"], ("'nonsense' is not a size such as 512M or 2G", "--split-max-size", "--help")),
    "models_memory": (["nonsense"], ("'nonsense' is not a size such as 512M or 2G", "--models-memory", "--help")),
    "override_kv": (["a=5"], ("'a=5' is not KEY=TYPE:VALUE with a type of int, float, bool, str", "--override-kv")),
    "max_body": (["nonsense"], ("'nonsense' is not a size such as 512M or 2G", "--max-body", "--help")),
    "samplers": (["top_k;nonsense"], ("unknown sampler 'nonsense'", "known are", "min_p", "--help")),
    "logit_bias": (["5"], ("'5' is not a token id and a number", "as in 15043-1.5", "--help")),
    "sampler_option": (["much"], ("'much' is not NAME=VALUE, as in strength=0.5", "--sampler-option", "--help")),
    "stop": ([""], ("'--stop': it is empty", "Give the text to stop at, as in --stop", "--help")),
    "grammar": (["root"], ("grammar: line 1, column 5: expected ::=", "such as --grammar 'root ::=")),
    "json_schema": (["[]"], ("json_schema: line 1: a schema must be an object", "such as --json-schema '{")),
    "lora": (["a.gguf:much"], ("'much' is not a number", "FILE:SCALE, as in adapter.gguf:0.5", "--lora", "--help")),
    "chat_template": (["nonsense"], ("chat template 'nonsense' is not one of bailing",)),
    "base": (["/dev/null/x"], ("'/dev/null/x' is no folder", "--base", "--help")),
    "tensor_type": (["much"], ("'much': expected NAME=TYPE, as in attn_v=Q8_0", "--tensor-type", "--help")),
    "hf_repos": (["nonsense"], ("'nonsense' is not a model of the hub", "expected user/repo or user/repo:quant")),
    "host": (["nowhere.invalid"], ("cannot listen on nowhere.invalid:8080",)),
    "folder": (["/dev/null/x"], ("/dev/null/x", "ot a directory")),
    "api_keys": ([""], ("'--api-key': it is empty", "--help")),
}
"""Wrong texts, and parts of their messages."""

NEEDS = {
    "settings": ["--from", "demo"],
    "html": ["--logprobs", "1"],
    "folder": ["--like", "dense"],
    "ssl_cert_file": ["--ssl-key-file", "/dev/null"],
    "ssl_key_file": ["--ssl-cert-file", "/dev/null"],
}
"""Options that need another one."""


def commands(group: click.Group = app, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(group.commands.items()):
        yield prefix + name, command
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")


COMMANDS = dict(commands())


def options() -> Iterator[tuple[str, click.Option]]:
    for name, command in COMMANDS.items():
        for param in command.params:
            if not isinstance(param, click.Option) or param.name in ANY:
                continue
            if (name, param.name) == ("serve", "chat_template"):
                continue  # found once the model is loaded: tests/cli/test_serve.py
            yield name, param


ALL = [(f"{name} {option.opts[-1]}", name, option) for name, option in options()]


def wrong(option: click.Option, folder: Path) -> Wrong:
    """Wrong values of an option, and parts of the message."""
    flag, kind = option.opts[0], option.type
    if option.name in TEXTS:
        values, said = TEXTS[str(option.name)]
        return [flag, *values, *NEEDS.get(str(option.name), [])], said
    if option.is_flag:
        return [f"{option.opts[-1]}=x"], (f"Option '{option.opts[-1]}' does not take a value",)
    if isinstance(kind, Integer | Number):
        noun = "an integer" if isinstance(kind, Integer) else "a number"
        return [flag, "many"], (f"'many' is not {noun} {kind.bounds}", flag, "--help")
    if isinstance(kind, IntList):
        return [flag, "1,x"], ("'1,x' is not a list of integers from 0 to", "such as 128,512", flag, "--help")
    if isinstance(kind, ReplicaRange):
        return [flag, "4:2"], ("'4:2' is not a number of replicas such as 2, or 1:8", flag, "--help")
    if isinstance(kind, Form):
        return [flag, " /"], (f"' /' is not {kind.expected}", flag, "--help")
    if isinstance(kind, click.Choice):
        return [flag, "nonsense"], ("'nonsense' is not one of", str(kind.choices[-1]), flag, "--help")
    if isinstance(kind, ImagePath):
        return [flag, "x.txt"], ("'x.txt' does not end in .png, .svg or .pdf", flag, "--help")
    if isinstance(kind, LoraFile):
        values, said = TEXTS["lora"]
        return [flag, *values], said
    if isinstance(kind, click.Path):
        path = str(folder / "nowhere" / "file.gguf")
        return [flag, path, *NEEDS.get(str(option.name), [])], (path, "o such file")
    raise AssertionError(f"add a wrong value of {flag} to TEXTS, or its name to ANY")


@pytest.mark.medium
def test_wrong_values(invoke: Callable[..., click.testing.Result], model: Path, tmp_path: Path) -> None:
    def check(command: str, option: click.Option) -> None:
        args, said = wrong(option, tmp_path)
        names = {param.name for param in COMMANDS[command].params if isinstance(param, click.Argument)}
        given = [str(model)] if names & {"model", "first"} and option.name not in ("model", "hf_repo") else []
        result = invoke(*command.split(), *given, *ARGUMENTS.get(command, []), *args, input="")
        message = " ".join(result.stderr.split())
        assert result.exit_code in (1, 2), message
        assert result.stdout == ""
        for part in said:
            assert part in message
        assert "Traceback" not in message

    check_each(check, ALL)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["convert", "a", "b/"], ("'b/' is not a file name", "--help")),
        (["quantize", "a", "b", "Q9"], ("unknown type 'Q9'; known are F32, F16", "--help")),
        (["completion", "tcsh"], ("'tcsh' is not one of 'bash', 'zsh', 'fish'", "--help")),
        (["runn"], ("No such command 'runn'", "Did you mean 'run'", "--help")),
        (["run", "--temprature", "1"], ("No such option '--temprature'", "'--temperature'", "--help")),
        (["pull", "nonsense"], ("'nonsense' is not a model of the hub", "expected user/repo or user/repo:quant")),
        (["logs", "--show", "1", "--rm", "1"], ("--show, --rm and --path exclude each other", "--help")),
    ],
)
def test_wrong_arguments(args: list[str], said: tuple[str, ...], invoke: Callable[..., click.testing.Result]) -> None:
    result = invoke(*args)
    message = " ".join(result.stderr.split())
    assert result.exit_code in (1, 2)
    for part in said:
        assert part in message


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("embed 'Hello world' m.gguf", "MODEL comes first. Here: llamacli embed m.gguf 'Hello world'"),
        ("run 'Tell a story.' m.gguf", "MODEL comes first. Here: llamacli run m.gguf 'Tell a story.'"),
        ("rank fox m.gguf owl", "MODEL comes first. Here: llamacli rank m.gguf fox owl"),
        ("create x --from x.gguf", "user/repo:quant; no such file; similar in its folder: m.gguf"),
        ("merge m.gguf", "No such command 'merge'. Here: llamacli quantize SHARD OUT COPY"),
        ("quantize m.gguf q4_k_m q.gguf", "OUT comes before TYPE. Here: llamacli quantize m.gguf q.gguf q4_k_m"),
        ("quantize m.gguf Q4_K_M", "Here: llamacli quantize m.gguf m-Q4_K_M.gguf Q4_K_M"),
        ("quantize folder a.gguf Q8_0", "folder is a folder. Here: llamacli convert folder a.gguf Q8_0"),
        ("run m.safetensors", "weights in safetensors: give the folder with their config.json"),
        ("run demo hi -j schema.json", "schema.json is a file. Here: --json-schema-file schema.json"),
        ("run demo hi --grammar schema.json", "schema.json is a file. Here: --grammar-file schema.json"),
        ("bench m.gguf -m m.gguf", "MODEL and -m exclude each other."),
    ],
)
def test_answer_says_what_to_type(arguments, said, invoke, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.gguf", "m.safetensors", "schema.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder").mkdir()
    failed = invoke(*shlex.split(arguments))
    assert failed.exit_code in (1, 2)
    assert said in " ".join(failed.stderr.split())
