import json
from importlib.metadata import EntryPoint

import pytest

from llamacli.plugins import ARCHITECTURES, GENERAL, Plugins

BROKEN = EntryPoint("broken", "no_such_plugin_module", GENERAL)


def test_line_per_plugin(invoke) -> None:
    header, *rows = invoke("plugins").stdout.splitlines()
    llama, llama2c = (row for row in rows if row.split()[0] in ("llamacli_llama", "llamacli_llama.llama2c"))
    assert header.split() == ["module", "distribution", "version", "architectures", "commands", "status"]
    assert (llama.split()[0], llama.split()[-3:]) == ("llamacli_llama", ["llama", "-", "ok"])
    assert (llama2c.split()[0], llama2c.split()[-3:]) == ("llamacli_llama.llama2c", ["-", "-", "ok"])


def test_broken_plugin_is_listed(invoke, use_plugins) -> None:
    use_plugins(Plugins([BROKEN, EntryPoint("llama", "llamacli_llama", ARCHITECTURES)]))
    result = invoke("plugins")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[1].startswith("llamacli_llama ")
    assert lines[1].endswith("ok")
    assert "No module named 'no_such_plugin_module'" in lines[2]


def test_json(invoke, use_plugins) -> None:
    use_plugins(Plugins([BROKEN, EntryPoint("llama", "llamacli_llama", ARCHITECTURES)]))
    llama, broken = json.loads(invoke("plugins", "--json").stdout)
    assert llama == {
        "module": "llamacli_llama",
        "distribution": "(unknown)",
        "version": "",
        "architectures": ["llama"],
        "commands": [],
        "error": None,
    }
    assert "No module named" in broken["error"]


@pytest.mark.usefixtures("broken_plugin")
def test_distribution_names(program) -> None:
    result = program("plugins")
    assert (result.returncode, result.stderr) == (0, "")
    assert "llamacli-broken" in result.stdout
    assert "No module named 'no_such_module'" in result.stdout


def test_hint_without_plugins(invoke, use_plugins) -> None:
    use_plugins(Plugins([]))
    assert "pip install 'llamacli[all]'" in invoke("plugins").stdout
    assert json.loads(invoke("plugins", "--json").stdout) == []
