from pathlib import Path

import pytest

from llamacli import InvalidRequestError, ModelFormatError
from llamacli.hub import names
from llamacli.hub.names import aliases_path, lookup, reference, resolve, shipped_names, similar
from llamacli.hub.repositories import Reference, choose


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = aliases_path()
    assert path is not None
    path.parent.mkdir()
    return path


def test_shipped_names_are_repositories() -> None:
    found = shipped_names()
    assert len(found) > 40
    for name, repo in found.items():
        assert name == name.lower()
        assert str(Reference.parse(repo)) == repo
        assert repo.endswith("-GGUF")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3:0.6b", "unsloth/Qwen3-0.6B-GGUF"),
        ("Qwen3:0.6B", "unsloth/Qwen3-0.6B-GGUF"),
        ("qwen3", "unsloth/Qwen3-8B-GGUF"),
        ("qwen3:latest", "unsloth/Qwen3-8B-GGUF"),
        ("qwen3:0.6b-q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0"),
        ("qwen3:0.6b-bf16", "unsloth/Qwen3-0.6B-GGUF:BF16"),
        ("hf.co/user/repo:Q4_0", "user/repo:Q4_0"),
        ("https://huggingface.co/user/repo", "user/repo"),
        ("https://hf.co/user/repo:Q4_0", "user/repo:Q4_0"),
        ("https://huggingface.co/user/repo/resolve/main/sub/m-Q8_0.gguf?download=true", "user/repo:sub/m-Q8_0"),
        ("https://huggingface.co/user/repo/blob/main/m-Q8_0-00001-of-00002.gguf", "user/repo:m-Q8_0"),
        ("https://huggingface.co/user/repo/tree/main", "user/repo"),
        ("qwen3:7b", "None"),
        ("user/repo", "None"),
    ],
)
def test_names_as_ollama_spells_them(name: str, found: str) -> None:
    assert str(lookup(name)) == found


def test_own_names_of_own_names(config: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    config.write_text(f'a = "b"\nb = "{tmp_path}/tiny.gguf"\nc = "d"\nd = "c"\ne = "qwen3"\n[f]\nfrom = "e"\n')
    assert lookup("a") == tmp_path / "tiny.gguf"
    assert str(lookup("f")) == "unsloth/Qwen3-8B-GGUF"
    with pytest.raises(InvalidRequestError, match="is not a model of the hub"):
        lookup("c")


def test_own_names_come_first(config: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    config.write_text(f'qwen3 = "user/repo:Q5_K_M"\nmine = "{tmp_path}/tiny.gguf"\n')
    assert lookup("qwen3") == Reference("user/repo", "Q5_K_M")
    assert lookup("mine") == tmp_path / "tiny.gguf"
    assert reference("qwen3") == Reference("user/repo", "Q5_K_M")
    with pytest.raises(InvalidRequestError, match="mine is a file"):
        reference("mine")


@pytest.mark.parametrize(
    ("text", "said"), [("a = 1", 'a must be a string, as in a = "'), ("a b", "not a file of names")]
)
def test_wrong_file_of_names(text: str, said: str, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(InvalidRequestError, match=said):
        lookup("qwen3")


def test_repository_or_short_name() -> None:
    assert reference("user/repo") == Reference("user/repo")
    with pytest.raises(InvalidRequestError, match="expected user/repo"):
        reference("nonsense")


def test_similar_names() -> None:
    assert "qwen3:8b" in similar("qwen3:7b")
    assert "qwen3" in similar("qwen")
    assert similar("zzzzzz") == []


def test_resolve_to_a_file(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def cached(found: Reference) -> Path | None:
        asked.append(("cached", str(found)))
        return tmp_path / "cached.gguf" if found.quant == "Q8_0" else None

    def fetch(found: Reference) -> list[Path]:
        asked.append(("fetch", str(found)))
        return [tmp_path / "fetched.gguf"]

    monkeypatch.setattr(names, "cached", cached)
    monkeypatch.setattr(names, "fetch", fetch)
    file = tmp_path / "model.gguf"
    file.touch()
    config.write_text(f'mine = "{file}"\n')
    assert resolve(str(file)) == resolve("mine") == file
    assert asked == []
    assert resolve("user/repo:Q8_0") == tmp_path / "cached.gguf"
    assert resolve("user/repo") == tmp_path / "fetched.gguf"
    assert asked == [("cached", "user/repo:Q8_0"), ("cached", "user/repo"), ("fetch", "user/repo")]
    for name, said in (
        ("nothing", "nothing: no such file, and no short name"),
        ("user/repo.gguf", "no such file"),
        (f"{tmp_path}/repo", "no such file"),
    ):
        with pytest.raises(ModelFormatError, match=said):
            resolve(name)
    with pytest.raises(InvalidRequestError, match=r"example\.org/m\.gguf is not an address of a model at hugging"):
        resolve("https://example.org/m.gguf")


def test_part_of_an_address_selects_the_file() -> None:
    found = lookup("https://huggingface.co/user/repo/resolve/main/sub/m-Q8_0.gguf")
    assert isinstance(found, Reference)
    files = ["sub/m-Q8_0.gguf", "m-Q8_0.gguf", "sub/m-Q4_0.gguf"]
    assert choose(files, found.quant) == ["sub/m-Q8_0.gguf"]
