"""`llamacli pull`, `list`, `rm` and `run -hf` with a local server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

import hub_server
from llamacli.cli.hub import resolve_model
from llamacli.hub.demo import demo_path
from llamacli.testing.tiny_media import drawn
from media_cases import write_mmproj, write_text

pytest.importorskip("huggingface_hub")

REPO = "user/tiny-GGUF"


@pytest.fixture
def server(model: Path) -> Iterator[hub_server.HubServer]:
    content = model.read_bytes()
    files = {"README.md": b"hello", "tiny-Q8_0.gguf": content, "tiny-Q4_K_M.gguf": content, "tiny-F16.gguf": b"GGUF"}
    with hub_server.serving({REPO: files, "user/empty": {"README.md": b"hello"}}) as server:
        yield server


@pytest.fixture
def hub(program, server: hub_server.HubServer, tmp_path: Path) -> Callable:
    """Run the program with an empty cache and the local server."""
    surroundings = {
        "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip

    def run(*args: str, **env: str):
        return program(*args, env=surroundings | env)

    return run


def test_pull_list_and_rm(hub, server: hub_server.HubServer, tmp_path: Path) -> None:
    pulled = hub("pull", REPO)
    path = Path(pulled.stdout.strip())
    assert (pulled.returncode, pulled.stderr) == (0, "")
    assert path.name == "tiny-Q4_K_M.gguf"
    assert path.is_relative_to(tmp_path / "home" / "hub")
    assert path.read_bytes() == server.repos[REPO][path.name]

    (listed,) = json.loads(hub("list", "--json").stdout)
    assert (listed["model"], listed["path"], listed["n_bytes"]) == (f"{REPO}:Q4_K_M", str(path), path.stat().st_size)
    assert listed["fits"] is True
    head, line = hub("list").stdout.splitlines()
    assert line.split()[0] == f"{REPO}:Q4_K_M"
    assert (head.split()[2], line.split()[3]) == ("fits", "yes")

    # What is in the cache runs without the hub.
    server.requests.clear()
    said = hub("run", "-hf", REPO, "once", "-n", "4", "--temp", "0")
    assert (said.returncode, said.stdout[:4]) == (0, "once")
    assert server.requests == []

    removed = hub("rm", REPO)
    assert removed.returncode == 0
    assert removed.stderr.endswith(" freed\n")
    assert not path.exists()
    emptied = hub("list")
    assert (emptied.stdout, emptied.stderr.count("\n")) == ("", 1)


def test_run_downloads_missing_model(hub, server: hub_server.HubServer) -> None:
    said = hub("run", "-hf", f"{REPO}:q8_0", "once", "-n", "4", "--temp", "0")
    assert (said.returncode, said.stdout[:4]) == (0, "once")
    assert any(path.endswith("tiny-Q8_0.gguf") for path in server.requests)
    again = hub("run", "-hf", f"{REPO}:q8_0", "once", "-n", "4", "--temp", "0", HF_HUB_OFFLINE="1")
    assert again.stdout == said.stdout


def test_a_model_comes_with_its_encoder(hub, tmp_path: Path) -> None:
    text, encoder = write_text(tmp_path / "t.gguf", "gemma3"), write_mmproj(tmp_path / "m.gguf", "gemma3")
    Image.fromarray(drawn(40, 30)).save(tmp_path / "photo.png")
    names = ("see-Q8_0.gguf", "mmproj-see-F16.gguf", "mmproj-see-F32.gguf")
    files = dict(zip(names, (path.read_bytes() for path in (text, encoder, encoder)), strict=True))
    with hub_server.serving({"user/see-GGUF": files}) as server:
        given = ("--image", str(tmp_path / "photo.png"), "What is it?", "-n", "3", "--temp", "0", "--json")
        said = hub("run", "user/see-GGUF", *given, HF_ENDPOINT=server.url)
        assert said.returncode == 0, said.stderr
        assert {path.rpartition("/")[2] for path in server.requests if path.endswith(".gguf")} == {*names[:2]}


def test_pull_downloads_newer_revision(hub, server: hub_server.HubServer) -> None:
    first = hub("pull", f"{REPO}:F16").stdout.strip()
    server.repos[REPO]["tiny-F16.gguf"] = b"GGUF, but newer"
    second = hub("pull", f"{REPO}:F16").stdout.strip()
    assert first != second
    assert Path(second).read_bytes() == b"GGUF, but newer"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (f"{REPO}:Q2_K", "no matching file; available are F16, Q4_K_M, Q8_0"),
        ("user/empty", "the repository has no GGUF files"),
        ("user/nothing", "no such repository on the hub, or it is private: set HF_TOKEN"),
        (hub_server.GATED, "request access on its page at the hub, then set HF_TOKEN"),
    ],
)
def test_errors_of_the_hub(reference: str, message: str, hub) -> None:
    done = hub("pull", reference)
    assert (done.returncode, done.stderr) == (1, f"llamacli: error: {reference}: {message}\n")


def test_errors_without_network(hub) -> None:
    done = hub("run", "-hf", REPO, "once", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr == (
        f"llamacli: error: {REPO} is not in the cache, and HF_HUB_OFFLINE is set: unset it to download\n"
    )
    done = hub("pull", REPO, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith(f"llamacli: error: {REPO}: the hub request failed: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["pull", "nonsense"], 1, "'nonsense' is not a model of the hub"),
        (["rm", "user/nothing"], 1, "user/nothing is not in the cache"),
        (["rm"], 2, "Give models to delete"),
        (["run", "-hf", REPO, "-m", "x.gguf"], 2, "MODEL, -m and -hf exclude each other."),
        (["run", "-hf", REPO, "one", "two"], 2, "MODEL, -m and -hf exclude each other."),
        (["run", "-hf", REPO, ""], 1, "the prompt is empty"),
    ],
)
def test_invalid_references(args: list[str], code: int, message: str, hub, server: hub_server.HubServer) -> None:
    done = hub(*args)
    assert done.returncode == code
    assert message in done.stderr
    assert server.requests == []


def test_short_name_of_the_user_is_downloaded_and_run(hub, tmp_path: Path) -> None:
    config = tmp_path / "config" / "llamacli"
    config.mkdir(parents=True)
    (config / "aliases.toml").write_text(f'tiny = "{REPO}:Q8_0"\n')
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    said = hub("run", "tiny", "once", "-n", "4", "--temp", "0", **env)
    assert (said.returncode, said.stdout[:4]) == (0, "once"), said.stderr
    assert hub("pull", "tiny", **env).stdout.strip().endswith("tiny-Q8_0.gguf")
    listed = hub("list", "--names", **env).stdout.splitlines()
    assert listed[1].split() == ["tiny", f"{REPO}:Q8_0"]
    assert json.loads(hub("list", "--names", "--json", **env).stdout)["tiny"] == f"{REPO}:Q8_0"
    assert hub("rm", "tiny", **env).returncode == 0


def test_demo_is_the_short_name_of_the_demo_model(invoke, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo") == str(demo_path())
    assert json.loads(invoke("list", "--names", "--json").stdout)["demo"] == str(demo_path())
    (tmp_path / "llamacli").mkdir()
    (tmp_path / "llamacli" / "aliases.toml").write_text('demo = "own.gguf"\n')
    assert resolve_model("demo") == "own.gguf"
    (tmp_path / "demo").touch()
    assert resolve_model("demo") == "demo"


@pytest.mark.parametrize(("name", "said"), [("qwen3:7b", "similar names: qwen3:0.6b"), ("zzz", "list --names prints")])
def test_unknown_short_name_names_similar_ones(name: str, said: str, invoke) -> None:
    result = invoke("run", name, "once")
    assert result.exit_code == 1
    assert f"{name}: no such file, and no short name of a model; " in result.stderr
    assert said in result.stderr


def test_missing_file_names_similar_ones(invoke, tmp_path: Path) -> None:
    (tmp_path / "story-Q8_0.gguf").touch()
    for name in ("story-Q4_0.gguf", "other/x.gguf", "qwen2.5-7b.gguf"):
        result = invoke("inspect", tmp_path / name)
        assert result.exit_code == 1
        assert "o such file" in result.stderr
    assert "similar in its folder: story-Q8_0.gguf" in invoke("run", tmp_path / "story-Q4_0.gguf").stderr
    assert "unsloth" not in invoke("run", "qwen2.5:9b").stderr
    assert "qwen2.5:7b" in invoke("run", "qwen2.5:9b").stderr


def test_packed_copies_are_listed_and_deleted(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    assert "there are no packed copies" in invoke("list", "--packed").stderr
    copy = tmp_path / "packed" / "0123.packed"
    copy.parent.mkdir()
    copy.write_bytes(bytes(3 << 20))
    (listed,) = json.loads(invoke("list", "--packed", "--json").stdout)
    assert (listed["model"], listed["path"], listed["n_bytes"]) == ("", str(copy), 3 << 20)
    assert "3.00 MiB" in invoke("list", "--packed").stdout
    assert invoke("rm", "--packed").stderr == "packed copies: 3.00 MiB freed\n"
    assert not copy.exists()


@pytest.mark.parametrize("arguments", [("list", "--names", "--packed"), ("rm",), ("rm", "user/repo", "--packed")])
def test_contradictory_options_are_refused(arguments: tuple[str, ...], invoke) -> None:
    assert invoke(*arguments).exit_code == 2


def test_list_supported_asks_the_hub(hub, server: hub_server.HubServer) -> None:
    server.about[REPO] = {"gguf": {"architecture": "qwen3moe", "total": 1}}
    (answer,) = json.loads(hub("list", "--supported", REPO, "--json").stdout)
    assert (answer["architecture"], answer["runs"], answer["plugin"]) == ("qwen3moe", True, "llamacli-qwen")

    server.about[REPO] = {"config": {"architectures": ["Qwen3ForCausalLM"]}}
    (answer,) = json.loads(hub("list", "--supported", REPO, "--json").stdout)
    assert (answer["architecture"], answer["note"]) == ("Qwen3ForCausalLM", "as a folder")

    server.about[REPO] = {"gguf": {"architecture": "wavtokenizer-dec"}}
    refused = hub("list", "--supported", REPO)
    assert (refused.returncode, "speech" in refused.stderr) == (1, True)


def test_list_supported_goes_by_the_name_without_the_hub(hub) -> None:
    found = hub("list", "--supported", "someone/Qwen3.5-9B-GGUF")
    assert found.returncode == 0
    assert [line.split()[1] for line in found.stdout.splitlines()[1:]] == ["qwen35", "qwen35moe"]
    assert "no such repository" in found.stderr
    unknown = hub("list", "--supported", "someone/unheard-of")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no model of this name is known" in unknown.stderr
