import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from llamacli.plugins import ARCHITECTURES, GENERAL, Plugins
from llamacli.testing import parametrize, result_checks

BROKEN = EntryPoint("broken", "no_such_plugin_module", GENERAL)


def test_line_per_plugin(invoke) -> None:
    header, *rows = invoke("plugins").stdout.splitlines()
    llama, llama2c = (row for row in rows if row.split()[0] in ("llamacli_llama", "llamacli_llama.llama2c"))
    assert header.split() == ["module", "distribution", "architectures", "brings"]
    assert llama.split()[:3] == ["llamacli_llama", "(unknown)", "llama"]
    assert "chat formats: llama-3" in llama
    assert llama2c.split()[:2] == ["llamacli_llama.llama2c", "(unknown)"]
    assert "loaders: llama2.c" in llama2c
    assert "error:" not in llama


def test_broken_plugin_is_listed(invoke, use_plugins) -> None:
    use_plugins(Plugins([BROKEN, EntryPoint("llama", "llamacli_llama", ARCHITECTURES)]))
    result = invoke("plugins")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[1].startswith("llamacli_llama ")
    assert "error:" not in lines[1]
    assert "error: " in lines[2]
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
        "brings": llama["brings"],
        "error": None,
    }
    assert "llama-3" in llama["brings"]["chat formats"]
    assert "No module named" in broken["error"]


@pytest.mark.usefixtures("broken_plugin")
def test_distribution_names(program) -> None:
    result = program("plugins")
    assert (result.returncode, result.stderr) == (0, "")
    assert "llamacli-broken" in result.stdout
    assert "No module named 'no_such_module'" in result.stdout


def test_hint_without_plugins(invoke, use_plugins) -> None:
    use_plugins(Plugins([]))
    assert "pip install llamacli" in invoke("plugins").stdout
    assert json.loads(invoke("plugins", "--json").stdout) == []


class TestNew:
    def test_like_a_kind(self, invoke, tmp_path) -> None:
        folder = tmp_path / "made"
        result = invoke("plugins", "new", "mine", "--like", "dense", "--folder", folder)
        assert f"{folder}/llamacli_mine/__init__.py" in result.stdout
        assert result.stdout.splitlines()[-1] == f"next: pip install -e '{folder}[test]' && pytest {folder}"
        assert 'mine = "llamacli_mine"' in (folder / "pyproject.toml").read_text().replace('"mine" =', "mine =")

    @pytest.mark.parametrize(("kind", "base"), [("vision", "MediaEncoder"), ("sound", "SoundEncoder")])
    def test_like_a_media_encoder(self, kind, base, invoke, tmp_path) -> None:
        folder = tmp_path / "made"
        invoke("plugins", "new", "mine", "--like", kind, "--folder", folder)
        assert f"class Mine({base}):" in (folder / "llamacli_mine/__init__.py").read_text()
        assert '"llamacli.media"]\n"mine" = "llamacli_mine"' in (folder / "pyproject.toml").read_text()

    def test_from_a_model(self, invoke, model, tmp_path) -> None:
        result = invoke("plugins", "new", "mine", "--from", model, "--folder", tmp_path / "made")
        assert result.exit_code == 0
        assert "has the architecture 'llama' too: models of it are an error while both are installed" in result.stderr
        assert 'name = "llama"' in (tmp_path / "made/llamacli_mine/__init__.py").read_text()

    @pytest.mark.parametrize("options", [[], ["--like", "dense", "--from", "a.gguf"]])
    def test_one_source_is_needed(self, options, invoke) -> None:
        result = invoke("plugins", "new", "mine", *options)
        assert result.exit_code == 2
        assert "Give either --from MODEL or --like KIND." in result.stderr


class TestCheck:
    @pytest.fixture(autouse=True)
    def few_checks(self, monkeypatch) -> None:
        """Leave out the checks that run models."""
        for kind in (parametrize.RESULTS, parametrize.MEDIA, parametrize.PROCESSES):
            for name in list(kind):
                monkeypatch.delitem(kind, name)

    @pytest.mark.parametrize("name", ["llama", "llamacli_llama"])
    def test_report(self, name, invoke) -> None:
        result = invoke("plugins", "check", name)
        lines = result.stdout.splitlines()
        assert result.exit_code == 0
        assert [line.split()[-1] for line in lines[:3]] == ["llama-tables", "llama-keys", "llama-tensors"]
        assert lines[-1] == "3 of 3 checks passed"

    def test_a_media_encoder(self, invoke) -> None:
        lines = invoke("plugins", "check", "idefics3").stdout.splitlines()
        assert [line.split()[-1] for line in lines[:-1]] == [
            f"idefics3-{name}" for name in ("tables", "keys", "tensors")
        ]

    def test_names_of_an_architecture_and_a_media_encoder(self, invoke) -> None:
        assert invoke("plugins", "check", "gemma3").stdout.count("gemma3-tables") == 2

    @pytest.fixture
    def write_tiny(self, tmp_path):
        """Write a file with one variant of llama, with these keys."""

        def write(**keys: int) -> Path:
            (path := tmp_path / "tiny.py").write_text(
                "from llamacli.testing import write_architecture\n"
                "from llamacli_llama import Llama\n"
                f"VARIANTS = {{'odd': (write_architecture, {{'architecture': Llama(), 'keys': {keys}}}, 1e-8)}}\n"
            )
            return path

        return write

    def test_failures_are_named(self, invoke, write_tiny) -> None:
        result = invoke("plugins", "check", "llama", "--variants", write_tiny(odd=1), "--json")
        assert result.exit_code == 1
        tables, keys, _ = json.loads(result.stdout)
        assert tables["error"] == "llama, variant odd: configure does not read llama.odd"
        assert keys["error"] is None

    def test_missing_keys_are_asked_for_once(self, invoke) -> None:
        result = invoke("plugins", "check", "lfm2")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "metadata key 'lfm2.shortconv.l_cache' is missing; tiny models made from the" in result.stderr
        assert "give others by --variants FILE.py" in result.stderr

    def test_unexpected_errors_are_rows(self, invoke, monkeypatch) -> None:
        def fail(tiny) -> None:
            raise ValueError("shapes do not match")

        monkeypatch.setitem(parametrize.RESULTS, "broken", fail)
        monkeypatch.setitem(parametrize.RESULTS, "behind", lambda tiny: result_checks.measured.append(3e-14))
        result = invoke("plugins", "check", "llama")
        assert result.exit_code == 1
        broken = next(line for line in result.stdout.splitlines() if line.endswith(tuple("0123456789")))
        assert re.match(
            r"FAILED +\S+ s  llama-broken: ValueError: shapes do not match, at \S*test_plugins.py:\d+$", broken
        )
        assert re.search(r"^ok +\S+ s  llama-behind: NMSE 3e-14$", result.stdout, re.MULTILINE)

    def test_missing_extra_is_named(self, invoke, monkeypatch) -> None:
        monkeypatch.delitem(sys.modules, "llamacli.testing.parametrize")
        monkeypatch.setitem(sys.modules, "pytest", None)
        result = invoke("plugins", "check", "llama")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == "llamacli: error: checks need pytest: pip install 'llamacli-core[testing]'\n"

    def test_unknown_name(self, invoke) -> None:
        result = invoke("plugins", "check", "unheard")
        assert result.exit_code == 1
        assert "no installed plugin runs architecture 'unheard'" in result.stderr

    def test_peer(self, invoke, write_tiny) -> None:
        pytest.importorskip("llama_cpp")
        result = invoke("plugins", "check", "llama", "--variants", write_tiny(), "--peer", "--json")
        assert json.loads(result.stdout)[-1] | {"seconds": 0, "nmse": 0} == {
            "check": "llama-peer", "seconds": 0, "nmse": 0, "error": None, "remarks": [],
        }  # fmt: skip

    def test_transformers_are_needed(self, invoke, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        result = invoke("plugins", "check", "llama", "--transformers", "--json")
        assert result.exit_code == 1
        row = json.loads(result.stdout)[0]
        assert row["check"] == "llama-transformers"
        assert "torch" in row["error"]

    @pytest.mark.slow
    def test_transformers(self, invoke) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        row = json.loads(invoke("plugins", "check", "qwen3", "--transformers", "--json").stdout)[0]
        assert row | {"seconds": 0} == {"check": "qwen3-transformers", "seconds": 0, "error": None}
