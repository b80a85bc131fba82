"""Tiny models of installed plugins."""

import json
from pathlib import Path

import pytest

from llamacli.testing.installed import TinyModels, tiny_models_of


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Distribution "llamacli-mine", installed from a folder with two modules of tiny models."""
    folder = tmp_path / "a project"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "sizes_of_mine.py").write_text("SIZE = 3")
    (folder / "tests" / "tiny_mine.py").write_text(
        "from sizes_of_mine import SIZE\nVARIANTS, INERT = {'a': SIZE}, ['*.b']"
    )
    (folder / "tests" / "tiny_other.py").write_text("VARIANTS, UNREAD = {'c': 4}, ['mine.d']")
    info = tmp_path / "llamacli_mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: llamacli-mine\nVersion: 1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_models_of_the_folder_that_was_installed(project: Path) -> None:
    found = tiny_models_of("llamacli-mine")
    assert found.variants == {"a": 3, "c": 4}
    assert (found.inert, found.unread) == (("*.b",), ("mine.d",))


def test_folder_without_models(project: Path) -> None:
    for path in (project / "tests").iterdir():
        path.unlink()
    assert tiny_models_of("llamacli-mine") == TinyModels()


def test_distribution_that_is_not_installed_from_a_folder(project: Path, tmp_path: Path) -> None:
    assert tiny_models_of("llamacli-none") == TinyModels()
    (tmp_path / "llamacli_mine-1.dist-info" / "direct_url.json").unlink()
    assert tiny_models_of("llamacli-mine") == TinyModels()


def test_models_of_a_package_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llamacli_wheel"
    package.mkdir()
    (package / "tiny.py").write_text("VARIANTS, INERT = {'a': 3}, ['*.b']")
    info = tmp_path / "llamacli_wheel-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: llamacli-wheel\nVersion: 1\n")
    record = ["__init__.py", "tiny.py", "tiny_more.py", "tinyish.py"]
    (package / "tiny_more.py").write_text("from tiny_base import VALUE\nVARIANTS = {'b': VALUE}")
    (package / "tiny_base.py").write_text("VALUE = 4")
    (info / "RECORD").write_text("".join(f"llamacli_wheel/{name},,\n" for name in record))
    monkeypatch.syspath_prepend(tmp_path)
    assert tiny_models_of("llamacli-wheel") == TinyModels({"a": 3, "b": 4}, ("*.b",))
