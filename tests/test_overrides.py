"""Overridden metadata and RoPE options, compared with llama.cpp's recorded results."""

from pathlib import Path
from typing import Any

import click
import click.testing
import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError, load_model
from llamacli.cli.command import Command
from llamacli.cli.overrides import override_options, pop_overrides
from llamacli.engine import ReferenceEngine
from llamacli.plugins import Plugins
from oracle.goldens import N_CTX, POSITIONS, TOKENS, nmse, sha256
from oracle.overrides import CASES, PATH


def parsed(arguments: list[str]) -> Any:
    """Overrides of a command line, or the error."""
    found: list[Any] = []

    @click.command(cls=Command)
    @override_options
    def command(**given: Any) -> None:
        found.append(pop_overrides(given))

    result = click.testing.CliRunner().invoke(command, arguments)
    return found[0] if found else result.output


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_llama_cpp(name: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    variant, _, arguments = CASES[name]
    path = tiny_gguf(variant)
    with np.load(PATH) as goldens:
        assert str(goldens[f"{name} sha256"]) == sha256(path), "its writer changed: record the goldens again"
        expected = goldens[name]
    results, identities = [], []
    for overrides in (parsed(arguments), {}):
        with load_model(path, "fp32", plugins=plugins, overrides=overrides) as model:
            identities.append(model.identity)
            with model.create_session(n_ctx=N_CTX, reuse=False) as session:
                results.append(session.eval(TOKENS.tolist(), all_logits=True)[POSITIONS])
    assert nmse(expected, results[0]) <= 1e-9
    assert nmse(expected, results[1]) > 1e-3, "the option changes too little for a test"
    assert identities[0] != identities[1], "saved states of the other would be accepted"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"llama.block_coun": 2}, r"llama\.block_coun: the model does not read it; did you mean llama\.block_count"),
        ({"{arch}.block_count": "2"}, r"llama\.block_count: '2' is of the type str, and the file has 2"),
        ({"llama.block_count": 2.0}, r"llama\.block_count: 2\.0 is of the type float"),
        ({"llama.block_count": [2]}, r"llama\.block_count: \[2\] is no int, float, bool or str"),
        ({"tokenizer.ggml.tokens": "a"}, r"tokenizer\.ggml\.tokens: 'a' is of the type str, and the file has"),
    ],
)
def test_overrides_that_cannot_be(
    overrides: dict[str, Any], message: str, tiny_gguf: TinyGguf, plugins: Plugins
) -> None:
    with pytest.raises(InvalidRequestError, match=f"override of {message}"):
        load_model(tiny_gguf(), plugins=plugins, engine=ReferenceEngine(), overrides=overrides)


def test_keys_that_are_read_later_can_be_overridden(tiny_gguf: TinyGguf, plugins: Plugins, tmp_path: Path) -> None:
    overrides = {"general.name": "another", "tokenizer.chat_template": "{{ messages[0].content }}"}
    with load_model(tiny_gguf(), plugins=plugins, engine=ReferenceEngine(), overrides=overrides) as model:
        assert model.metadata["general.name"] == "another"
        assert model.create_chat_codec().template.source == overrides["tokenizer.chat_template"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--override-kv", "a=int:4", "--override-kv", "b=bool:true"], {"a": 4, "b": True}),
        (["--override-kv", "a=str:x=y:z", "--override-kv", "b=float:1e-5"], {"a": "x=y:z", "b": 1e-5}),
        (["--override-kv", "a=int:4.5"], "a: '4.5' is not a value of the type int"),
        (["--override-kv", "a=bool:yes"], "a: 'yes' is not a value of the type bool"),
        (["--override-kv", "a=4"], "'a=4' is not KEY=TYPE:VALUE with a type of int, float, bool, str"),
        (["--rope-scale", "2", "--rope-freq-scale", "0.5"], "--rope-scale and --rope-freq-scale exclude each other"),
    ],
)
def test_options(arguments: list[str], expected: Any) -> None:
    found = parsed(arguments)
    assert found == expected if isinstance(expected, dict) else expected in found
