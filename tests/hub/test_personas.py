"""Names of a user's own with a system prompt and parameters."""

from pathlib import Path

import pytest

from llamacli import InvalidRequestError
from llamacli.hub.demo import demo_path
from llamacli.hub.names import aliases, aliases_path, lookup
from llamacli.hub.personas import Persona, create_persona, persona, remove_name


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = aliases_path()
    assert path is not None
    return path


def test_persona_is_written_and_read() -> None:
    table = {
        "from": "demo",
        "system": 'Say "hi"\nin French.',
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["\n"],
        "seed": 7,
    }
    create_persona("tutor:small", table, replace=False)
    expected = Persona("demo", table["system"], sampling={"temperature": 0.5, "top_k": 3}, stop=("\n",), seed=7)
    assert persona("tutor:small") == expected
    assert aliases() == {"tutor:small": "demo"}
    assert lookup("tutor:small") == demo_path()
    assert persona("demo") is persona("other") is None


def test_other_lines_stay(config: Path) -> None:
    config.parent.mkdir()
    config.write_text('# mine\nmine = "user/repo"\n\n[a]\nfrom = "demo" # here\n\n[b]\nfrom = "demo"\n')
    create_persona("a", {"from": "demo", "system": "new"}, replace=True)
    remove_name("b")
    assert config.read_text() == '# mine\nmine = "user/repo"\n\n["a"]\nfrom = "demo"\nsystem = "new"\n'
    remove_name("mine")
    assert aliases() == {"a": "demo"}


def test_name_that_exists_is_kept() -> None:
    create_persona("a", {"from": "demo"}, replace=False)
    with pytest.raises(InvalidRequestError, match="a exists; --force replaces it, llamacli rm a deletes it"):
        create_persona("a", {"from": "demo", "system": "x"}, replace=False)
    assert persona("a") == Persona("demo")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "x: from must be a model, not None"),
        ({"from": "demo", "temperature": -1}, "x: temperature must be a number from 0 to 1e[+]06, not -1"),
        ({"from": "demo", "top_k": 1.5}, "x: top_k must be an integer, not 1.5"),
        ({"from": "demo", "temperature": "hot"}, "x: temperature must be a number"),
        ({"from": "demo", "heat": 1}, "x: there is no parameter 'heat'; .*temperature"),
        ({"from": "demo", "stop": "a"}, "x: stop must be a list of texts, not 'a'"),
        ({"from": "demo", "seed": -1}, "x: seed must be an integer from 0, not -1"),
        ({"from": "demo", "system": 1}, "x: system must be a text, not 1"),
    ],
)
def test_wrong_tables_name_the_key(table: dict[str, object], message: str, config: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        create_persona("x", table, replace=False)
    assert not config.exists()


@pytest.mark.parametrize("name", ["", "a/b", "demo", "a b", "../x"])
def test_names_that_are_no_own_ones(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a name of your own"):
        create_persona(name, {"from": "demo"}, replace=False)


def test_name_that_cannot_be_edited_stays(config: Path) -> None:
    config.parent.mkdir()
    config.write_text('a.from = "demo"\n')
    with pytest.raises(InvalidRequestError, match="delete a there with an editor"):
        remove_name("a")
    assert aliases() == {"a": "demo"}
    with pytest.raises(InvalidRequestError, match="b is not a name of your own"):
        remove_name("b")
