"""Metadata of distributions, and wheels in a bare environment."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

from llamacli.kernels.isa import isa
from llamacli.kernels.packs import pack_name, packed
from llamacli.testing import checks_of
from llamacli.testing.installed import tiny_models_of
from llamacli_t5 import T5

ROOT = Path(__file__).resolve().parents[1]
URL = "https://host.example/user/llamacli"
DIST: dict[str, Any] = runpy.run_path(str(ROOT / "tools/dist.py"))
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://host.example/user/llamacli.git", URL),
        ("https://token@host.example/user/llamacli", URL),
        ("git@host.example:user/llamacli.git", URL),
        ("ssh://git@host.example:22/user/llamacli.git", URL),
        ("/srv/llamacli.git", ""),
        ("../llamacli", ""),
        ("", ""),
    ],
)
def test_addresses_of_remotes(remote: str, url: str) -> None:
    assert DIST["repository_url"](remote) == url


@pytest.mark.parametrize(
    ("text", "folder", "absolute", "plain"),
    [
        ("[a b](docs/a.md)", ".", f"[a b]({URL}/blob/v1/docs/a.md)", "a b"),
        ("[a](a.md#part), [b](b)", ".", f"[a]({URL}/blob/v1/a.md#part), [b]({URL}/blob/v1/b)", "a, b"),
        ("![a](a.svg)", "docs", f"![a]({URL}/raw/v1/docs/a.svg)", "a"),
        ("[core](../../README.md)", "plugins/x", f"[core]({URL}/blob/v1/README.md)", "core"),
        ("[`x.py`](x.py)", "plugins/x", f"[`x.py`]({URL}/blob/v1/plugins/x/x.py)", "`x.py`"),
        ("[a](https://host.example/a) [b](#part)", ".", None, None),
    ],
)
def test_links_become_absolute(text: str, folder: str, absolute: str | None, plain: str | None) -> None:
    assert DIST["with_absolute_links"](text, folder, URL, "v1") == (absolute or text)
    assert DIST["with_absolute_links"](text, folder, "", "v1") == (plain or text)


def test_relative_links_of_readmes_exist() -> None:
    for project in DIST["projects"]():
        for link in DIST["_LINK"].finditer((project / "README.md").read_text()):
            assert (project / link[3]).exists(), f"{project.name}: {link[0]}"


def test_one_install_brings_the_core_and_all_families() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [name for name in project["dependencies"] if name.startswith("llamacli-")]
    others = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (DIST["CORE"], *PLUGINS)]
    assert sorted(ours) == sorted(f"{other['name']}=={other['version']}" for other in others)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_plugin_readmes_say_what_they_bring(plugin: Path) -> None:
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    text = (plugin / "README.md").read_text()
    first = text.partition("\n## ")[0]
    assert text.startswith(f"# {project['name']}\n")
    assert f"pip install {project['name']}\n" in first
    assert "llamacli run model.gguf" in first or "llamacli embed model.gguf" in first
    named = set(re.findall(r"`(?:general\.architecture = )?([a-z0-9_.-]+)`", text))
    assert project["entry-points"]["llamacli.architectures"].keys() <= named


def test_the_core_needs_the_kernels_of_its_own_version() -> None:
    core, packs = (
        tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (DIST["CORE"], DIST["PACKS"])
    )
    assert f"llamacli-kernels=={packs['version']}" in core["dependencies"]
    assert packs["version"] == core["version"]


@pytest.mark.medium
@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_staged_plugins_have_their_tiny_models(plugin: Path, tmp_path: Path) -> None:
    DIST["stage"](plugin, tmp_path, URL, "v1")
    (package,) = (path for path in tmp_path.iterdir() if path.is_dir())
    models = sorted(path.name for path in plugin.glob("tests/tiny_*.py"))
    assert models
    assert sorted(path.name for path in package.glob("tiny_*.py")) == models


@pytest.mark.slow
def test_checks_of_a_plugin_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    DIST["build"](tmp_path / "dist", URL, "v1", [ROOT / "plugins/t5"])
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    tiny = tiny_models_of("llamacli-t5")
    assert tiny.variants is not None
    assert "t5_q8_0" in tiny.variants
    assert Path(next(iter(tiny.variants.values()))[0].__code__.co_filename).is_relative_to(tmp_path / "site")
    check = next(check for check in checks_of(T5(), tiny.variants, inert=tiny.inert, unread=tiny.unread))
    assert check.name == "tables"
    check()


DEMO = ("run", "-p", "Once upon a time", "--temp", "0", "-n", "12")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels and sdists of the core and the Llama plugin.

    The kernels are those of the demo.
    """
    pytest.importorskip("build")
    pytest.importorskip("twine")
    out, cache = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("cache")
    environment = os.environ | {"LLAMACLI_CACHE": str(cache)}
    subprocess.run(
        [sys.executable, "-m", "llamacli", *DEMO], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        check=True,
    )  # fmt: skip
    (folder,) = (cache / "kernels").iterdir()
    pack = cache / pack_name(isa())
    pack.write_bytes(packed(folder.name, {path.name: path.read_bytes() for path in folder.glob("*.kernel")}))
    DIST["build"](out, URL, "v1", [DIST["CORE"], DIST["PACKS"], ROOT / "plugins/llama"], [pack])
    return out


@pytest.mark.slow
def test_metadata_has_urls_and_absolute_links(dist: Path) -> None:
    wheels = sorted(dist.glob("*.whl"))
    assert len(wheels) == 3
    assert len(list(dist.glob("*.tar.gz"))) == 2
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode())
        assert f"Homepage, {URL}" in metadata.get_all("Project-URL", [])
        assert f"({URL}/blob/v1/" in metadata.get_payload()
        assert not DIST["_LINK"].search(metadata.get_payload())
    for path in dist.glob("*.tar.gz"):
        with tarfile.open(path) as sdist:
            assert not [name for name in sdist.getnames() if "__pycache__" in name]


@pytest.mark.slow
def test_the_core_and_a_family_run_the_demo_model_and_compile_nothing(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=True)
    scripts = tmp_path / "bare" / "bin"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["LLAMACLI_CACHE"] = str(tmp_path / "cache")

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "compil" not in done.stderr
        return done.stdout

    install = ("-m", "pip", "install", "--quiet", "--find-links", str(dist))
    run(str(scripts / "python"), *install, "llamacli-core", "llamacli-llama")
    expected = subprocess.run(
        [sys.executable, "-m", "llamacli", *DEMO],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    assert run(str(scripts / "llamacli"), *DEMO) == expected.stdout
    assert not (tmp_path / "cache" / "kernels").exists(), "all kernels come from the pack"
    assert "llamacli-llama" in run(str(scripts / "llamacli"), "plugins")
