"""`llamacli create`, and the names that it makes in `run` and `serve`."""

from pathlib import Path
from typing import Any

import pytest

from llamacli.cli.serve import model_sources
from llamacli.serve.requests import Preset


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "llamacli" / "aliases.toml"


def test_run_uses_parameters_unless_options_say_otherwise(invoke: Any) -> None:
    made = invoke("create", "tutor", "--from", "demo", "--set", "temp=0", "--set", "max_tokens=5", "--set", "stop=zzz")
    assert (made.exit_code, made.stderr) == (0, "tutor is demo; llamacli run tutor\n")
    expected = invoke("run", "demo", "Tell me a story.", "--temp", "0", "-n", "5").stdout
    assert invoke("run", "tutor", "Tell me a story.").stdout == expected
    shorter = invoke("run", "demo", "Tell me a story.", "--temp", "0", "-n", "3").stdout
    assert invoke("run", "tutor", "Tell me a story.", "-n", "3").stdout == shorter != expected


def test_serve_gets_a_preset(invoke: Any) -> None:
    invoke("create", "tutor", "--from", "demo", "--system", "Be brief.", "--set", "top_k=2", "--set", "seed=3")
    (source,) = model_sources(["tutor"], ())
    assert (source.name, source.is_fixed) == ("tutor", True)
    assert source.preset == Preset(system="Be brief.", sampling={"top_k": 2}, seed=3)
    assert model_sources(["demo"], ())[0].preset is None


def test_modelfile(invoke: Any, tmp_path: Path, config: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "Modelfile").write_text(
        'FROM ./tiny.gguf\nSYSTEM """Be\nkind."""\nPARAMETER temperature 0.3\nPARAMETER num_ctx 4096\n'
        "PARAMETER num_predict 9\nPARAMETER stop a\nPARAMETER stop b\n"
    )
    made = invoke("create", "kind", "-f", str(tmp_path / "Modelfile"))
    assert "PARAMETER num_ctx is left out; give run and serve -c or -t" in made.stderr
    assert config.read_text() == (
        f'["kind"]\nfrom = "{tmp_path}/tiny.gguf"\nsystem = "Be\\nkind."\ntemperature = 0.3\nmax_tokens = 9\n'
        'stop = ["a", "b"]\n'
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x",), "Which model? llamacli create x --from MODEL, or -f Modelfile."),
        (("x", "--from", "demo", "--set", "temp"), "'temp' is not NAME=VALUE, as in temperature=0.3."),
        (("x", "--from", "demo", "--set", "system=a"), "system is not a parameter; give --system."),
        (("x", "--from", "demo", "--set", "temp=hot"), "temperature must be a number from 0"),
    ],
)
def test_errors_say_what_to_type(arguments: tuple[str, ...], message: str, invoke: Any, config: Path) -> None:
    failed = invoke("create", *arguments)
    assert failed.exit_code in (1, 2)
    assert message in failed.stderr.replace("\n", " ")
    assert not config.exists()


def test_rm_deletes_the_name_alone(invoke: Any, config: Path) -> None:
    invoke("create", "x", "--from", "demo")
    assert invoke("rm", "x").stderr == "x: the name is deleted, its model stays\n"
    assert config.read_text() == ""
