"""Names of hub models, and selection of files in repositories."""

import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import HubError, InvalidRequestError
from llamacli.hub import repositories as hub
from llamacli.hub.repositories import Reference, choose, choose_encoder

FILES = [
    "README.md",
    "Model-7B.F16.gguf",
    "Model-7B.IQ4_XS.gguf",
    "Model-7B.Q2_K.gguf",
    "Model-7B.Q4_K_M.gguf",
    "Model-7B.Q4_K_S.gguf",
    "Model-7B.Q8_0.gguf",
    "imatrix.gguf",
    "mmproj-Model-7B-Q4_K_M.gguf",
]
SPLIT = [f"Q6_K/Model-Q6_K-{i:05}-of-00003.gguf" for i in (2, 1, 3)] + ["Q6_K/other.txt"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user/repo", Reference("user/repo")),
        ("user/Repo-7B.x_GGUF:Q4_K_M", Reference("user/Repo-7B.x_GGUF", "Q4_K_M")),
        ("hf.co/user/repo:q8_0", Reference("user/repo", "q8_0")),
        ("https://huggingface.co/user/repo", Reference("user/repo")),
    ],
)
def test_parse_references(text: str, expected: Reference) -> None:
    assert Reference.parse(text) == expected
    assert Reference.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "repo", "user/", "user/repo:", "a/b/c", "user/repo:Q4/x", "../../etc", "user/repo\n", "ü/repo", "a b/c"],
)
def test_invalid_references(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a model of the hub"):
        Reference.parse(text)


@pytest.mark.parametrize(
    ("files", "quant", "expected"),
    [
        (FILES, None, ["Model-7B.Q4_K_M.gguf"]),
        (FILES, "q8_0", ["Model-7B.Q8_0.gguf"]),
        (FILES, "Q4_K_S", ["Model-7B.Q4_K_S.gguf"]),
        (FILES, "IQ4_XS", ["Model-7B.IQ4_XS.gguf"]),
        (FILES, "Q4_XS", []),
        (FILES, "Q4_K", []),
        (FILES, "Q6_K", []),
        (FILES[:4], None, ["Model-7B.F16.gguf"]),
        (["a-Q8_0.gguf", "a-Q2_K.gguf"], None, ["a-Q8_0.gguf"]),
        (["README.md", "imatrix.gguf"], None, []),
        (SPLIT, None, sorted(SPLIT[:3])),
        (SPLIT, "Q6_K", sorted(SPLIT[:3])),
        (SPLIT[:1], "Q6_K", []),
        (["UPPER-Q8_0.GGUF"], None, ["UPPER-Q8_0.GGUF"]),
    ],
)
def test_files_of_a_model(files: list[str], quant: str | None, expected: list[str]) -> None:
    assert choose(files, quant) == expected
    assert choose(reversed(files), quant) == expected


@pytest.mark.parametrize(
    ("files", "model", "expected"),
    [
        (["m-Q8_0.gguf"], "m-Q8_0.gguf", None),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "m.gguf"], "m.gguf", "mmproj-F16.gguf"),
        (["mmproj-m-Q8_0.gguf", "m-F32.mmproj.gguf"], "m.gguf", "mmproj-m-Q8_0.gguf"),
        (["mmproj.gguf"], "Q4_K_M/m-00001-of-00002.gguf", "mmproj.gguf"),
        (["a/mmproj-F32.gguf", "mmproj-F16.gguf", "b/mmproj-F16.gguf"], "a/m.gguf", "a/mmproj-F32.gguf"),
        (["b/mmproj-F16.gguf", "mmproj.txt", "mmproj/m.gguf"], "a/m.gguf", None),
    ],
)
def test_encoder_of_a_model(files: list[str], model: str, expected: str | None) -> None:
    assert choose_encoder(files, model) == expected
    assert choose_encoder(reversed(files), model) == expected


@given(st.lists(st.text(max_size=20)), st.none() | st.text(min_size=1, max_size=5))
def test_choose_accepts_any_names(names: list[str], quant: str | None) -> None:
    assert all(name.lower().endswith(".gguf") for name in choose(names, quant))


def test_error_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"need huggingface_hub: pip install huggingface_hub"):
        hub.cached(Reference("user/repo"))


def test_error_with_old_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("huggingface_hub")
    old.__version__ = "0.26.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", old)
    with pytest.raises(HubError, match=r"huggingface_hub 0.26.1 is too old, 2.4 is needed"):
        hub.cached_models()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, commit: str, name: str, data: bytes = b"GGUF", *, main: bool = False) -> Path:
    """Add a file to the cache, as a link to a blob."""
    repo = cache / "models--user--repo"
    blob, link = repo / "blobs" / f"{commit}-{name.replace('/', '-')}", repo / "snapshots" / commit / name
    for path in (blob, link, repo / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(blob)
    if main:
        (repo / "refs" / "main").write_text(commit)
    return link


REPO = Reference("user/repo")


def test_empty_cache(cache: Path) -> None:
    assert hub.cached(REPO) is None
    assert hub.cached_models() == []
    with pytest.raises(HubError, match="user/repo is not in the cache"):
        hub.remove(REPO)


def test_newest_complete_revision(cache: Path) -> None:
    old = put(cache, "1" * 40, "a-Q8_0-00001-of-00002.gguf")
    put(cache, "1" * 40, "a-Q8_0-00002-of-00002.gguf")
    assert hub.cached(REPO) == old
    new = put(cache, "0" * 40, "a-Q8_0-00001-of-00002.gguf", main=True)
    assert hub.cached(REPO) == old
    put(cache, "0" * 40, "a-Q8_0-00002-of-00002.gguf")
    assert hub.cached(REPO) == new


def test_cached_models(cache: Path) -> None:
    put(cache, "1" * 40, "a-Q8_0-00001-of-00002.gguf", b"12345", main=True)
    put(cache, "1" * 40, "a-Q8_0-00002-of-00002.gguf", b"123")
    put(cache, "1" * 40, "a-UD-Q4_K_XL.gguf", b"1")
    put(cache, "1" * 40, "plain.gguf", b"12")
    put(cache, "1" * 40, "config.json")
    found = [(str(model.reference), model.path.name, model.n_bytes) for model in hub.cached_models()]
    assert found == [
        ("user/repo:Q8_0", "a-Q8_0-00001-of-00002.gguf", 8),
        ("user/repo:UD-Q4_K_XL", "a-UD-Q4_K_XL.gguf", 1),
        ("user/repo", "plain.gguf", 2),
    ]
    for model in hub.cached_models()[:2]:
        assert hub.cached(model.reference) == model.path


def test_remove_keeps_other_models(cache: Path) -> None:
    parts = [put(cache, "1" * 40, f"a-Q8_0-0000{i}-of-00002.gguf", b"12345", main=True) for i in (1, 2)]
    other = put(cache, "1" * 40, "a-Q4_0.gguf")
    assert hub.remove(Reference("user/repo", "Q8_0")) == 10
    assert not any(part.exists() for part in parts)
    assert len(list((cache / "models--user--repo" / "blobs").iterdir())) == 1
    assert other.is_file()


def test_remove_keeps_other_files(cache: Path) -> None:
    model = put(cache, "1" * 40, "a-Q8_0.gguf", main=True)
    other = put(cache, "1" * 40, "model.safetensors")
    hub.remove(REPO)
    assert not model.exists()
    assert other.is_file()


def test_remove_deletes_empty_repository(cache: Path) -> None:
    put(cache, "1" * 40, "a-Q8_0.gguf", main=True)
    put(cache, "2" * 40, "a-Q8_0.gguf")
    hub.remove(Reference("user/repo", "Q8_0"))
    assert not (cache / "models--user--repo").exists()


def test_the_last_model_takes_the_encoder_along(cache: Path) -> None:
    encoder = put(cache, "1" * 40, "mmproj-F16.gguf", main=True)
    put(cache, "1" * 40, "a-Q8_0.gguf")
    put(cache, "1" * 40, "a-Q2_K.gguf")
    hub.remove(Reference("user/repo", "Q8_0"))
    assert encoder.exists()
    hub.remove(Reference("user/repo", "Q2_K"))
    assert not encoder.exists()


GIB = 1 << 30
SIZES = {"m-Q4_K_M.gguf": 5 * GIB, "m-Q8_0.gguf": 9 * GIB, "m-Q2_K.gguf": 2 * GIB, "m-IQ3_M.gguf": 3 * GIB}


@pytest.mark.parametrize(
    ("free", "chosen"),
    [(8, "m-Q4_K_M.gguf"), (4, "m-IQ3_M.gguf"), (2.5, "m-Q2_K.gguf"), (1, "m-Q4_K_M.gguf"), (None, "m-Q4_K_M.gguf")],
)
def test_largest_type_that_fits_is_taken(
    free: float | None, chosen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "available_memory", lambda: None if free is None else int(free * GIB))
    assert hub._fitting(choose(SIZES, None), SIZES) == [chosen]
    assert ("Q4_K_M does not fit the free memory" in caplog.text) == (chosen != "m-Q4_K_M.gguf")


def test_parts_of_a_split_model_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "available_memory", lambda: 4 * GIB)
    parts = [f"m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    small = [f"m-Q3_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    sizes = dict.fromkeys(parts, 3 * GIB) | dict.fromkeys(small, GIB)
    assert hub._fitting(choose(sizes, None), sizes) == small
