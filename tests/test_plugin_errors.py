"""Errors of plugins: part, file and line."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from conftest import TinyGguf
from llamacli import ModelFormatError, PluginError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.errors import plugin_errors
from llamacli.plugins import ARCHITECTURES, Plugins

SOURCE = """
import json

from llamacli import hookimpl
from llamacli_llama import Llama

LLAMACLI_API = 1

class Failing(Llama):
    name = "llama"
    def {method}

def helper(g):
    return g.softcap(g.embed, -1)

@hookimpl
def register_architectures(register):
    register(Failing())
"""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("configure(self, metadata): return {}['foo']", "architecture 'llama' failed: KeyError: 'foo', at {at}:11"),
        ("tensors(self, config): json.loads('{')", "architecture 'llama' failed: JSONDecodeError: .*, at {at}:11"),
        ("forward(self, g, c, w): return helper(g)", "softcap: cap must be a number from .*, not -1, at {at}:14"),
        ("forward(self, g, c, w): return g.embed(w.foo)", "'foo' is not in the architecture's table .*, at {at}:11"),
        ("forward(self, g, c, w): return g.linear(g.embed(w.token_embd), None)", "linear: the param.*, at {at}:11"),
        ("forward(self, g, c, w): g.embed(w.token_embd)", "forward of 'llama' returned None: is `return` missing\\?"),
        ("forward(self, g, c, w): return 1, 2", "forward of 'llama' returned tuple, expected one value"),
        ("forward(self, g, c, w): return g.foo(2)", "unknown verb g.foo; the graph has .*, at {at}:11"),
        ("forward(self, g, c, w): return g.embed(w.token_embd) * 2", r"\* of a value and int .*, at {at}:11"),
    ],
)
def test_file_and_line_of_the_plugin(
    method: str, message: str, tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llamacli_failing.py").write_text(SOURCE.replace("{method}", method))
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins([EntryPoint("llama", "llamacli_failing", ARCHITECTURES)])
    try:
        with pytest.raises(PluginError) as raised:
            load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine())
    finally:
        sys.modules.pop("llamacli_failing")
    assert re.fullmatch(message.replace("{at}", r"\S*llamacli_failing\.py"), str(raised.value))


def test_errors_of_files_and_memory_pass_unchanged() -> None:
    for error in (ModelFormatError("key x is missing"), MemoryError("full")):
        with pytest.raises(type(error)) as raised, plugin_errors("a part"):
            raise error
        assert raised.value is error


def test_errors_of_the_plugin_are_named_once() -> None:
    with pytest.raises(PluginError) as raised, plugin_errors("outer"), plugin_errors("inner"):
        json.loads("{")
    assert re.fullmatch(r"inner failed: JSONDecodeError: [^/]*, at \S*test_plugin_errors\.py:\d+", str(raised.value))


def test_long_messages_are_shortened() -> None:
    with pytest.raises(PluginError, match=r"a \| b \| c \| d \.\.\. \(--debug shows all\), at "), plugin_errors("part"):
        raise ValueError("a\nb\n\nc\nd\ne")
