"""Catalogue of models: names, files, Modelfiles."""

import hashlib
import json
from pathlib import Path

import pytest

from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.serve.catalogue import Catalogue, Manifest, checked_name, parse_modelfile
from llamacli.serve.requests import Preset

PRESET = Preset(system="Be brief.", sampling={"temperature": 0.5}, stop=("x", "y"), seed=3, max_tokens=9)


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "catalogue")


def add_blob(catalogue: Catalogue, data: bytes) -> str:
    with catalogue.new_blob() as blob:
        blob.path.write_bytes(data)
    return catalogue.relative(blob.path)


def files_of(catalogue: Catalogue) -> set[str]:
    return {path.name for path in (catalogue.folder / "blobs").iterdir()}


OUTSIDE = ["", "..", "../a", "a/../b", "/etc/passwd", "a/..", "a\0b", "a\\b", "a b", "\n", "a\n", ".a", "a//b", "é"]


@pytest.mark.parametrize("name", [*OUTSIDE, "a" * 201, "a:b:c", "~", "a/.b", "a/b/c/d/e"])
def test_names_that_could_be_paths_are_refused(name: str, catalogue: Catalogue) -> None:
    for use in (checked_name, catalogue.read, catalogue.delete, lambda given: catalogue.write(given, Manifest([]))):
        with pytest.raises(InvalidRequestError, match="is not a name of a model"):
            use(name)
    assert not catalogue.has(name)
    assert catalogue.names() == []


@pytest.mark.parametrize("name", ["a", "family:8b", "user/model:Q4_K_M", "hf.co/user/model-1.5", "a-b_c.d"])
def test_models_are_kept(name: str, catalogue: Catalogue) -> None:
    file, adapter = add_blob(catalogue, b"model"), add_blob(catalogue, b"adapter")
    catalogue.write(name, Manifest([file], [adapter], PRESET))
    again = Catalogue(catalogue.folder)
    assert again.names() == [name]
    assert again.read(f"{name}:latest" if ":" not in name else name) == Manifest([file], [adapter], PRESET)
    (source,) = again.sources()
    assert (source.name, source.path, source.preset) == (name, catalogue.folder / file, PRESET)
    assert source.adapters == ((catalogue.folder / adapter, 1.0),)


def test_files_go_with_the_last_model_that_has_them(catalogue: Catalogue) -> None:
    shared, own = add_blob(catalogue, b"shared"), add_blob(catalogue, b"own")
    catalogue.write("a", Manifest([shared], [own]))
    catalogue.copy("a", "b")
    catalogue.write("a", Manifest([shared]))
    assert len(files_of(catalogue)) == 2
    catalogue.delete("b")
    assert files_of(catalogue) == {Path(shared).name}
    catalogue.delete("a")
    assert files_of(catalogue) == set()


def test_damaged_manifests_are_named_and_left_out(catalogue: Catalogue, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    manifest = {"files": ["../secret"], "adapters": [], "preset": {"stop": []}}
    for data in ("", "{}", "[]", json.dumps(manifest), json.dumps({**manifest, "files": [str(secret)]}),
                 json.dumps({**manifest, "files": ["blobs/none"]}), json.dumps({**manifest, "files": []}),
                 json.dumps({**manifest, "files": [5]})):  # fmt: skip
        (catalogue.folder / "manifests" / "a.json").write_text(data)
        with pytest.raises(ModelFormatError, match=r"a.json"):
            catalogue.read("a")
        assert catalogue.sources() == []
    catalogue.delete("a")
    assert secret.exists()


def test_blobs_have_the_digest_that_was_said(catalogue: Catalogue) -> None:
    digest = f"sha256:{hashlib.sha256(b'data').hexdigest()}"
    with catalogue.new_blob(digest) as blob:
        blob.path.write_bytes(b"data")
    assert blob.path == catalogue.blob(digest) == catalogue.blob(digest.replace(":", "-"))
    with (
        pytest.raises(InvalidRequestError, match="the file has the digest sha256:"),
        catalogue.new_blob(digest) as blob,
    ):
        blob.path.write_bytes(b"other")
    with pytest.raises(KeyboardInterrupt), catalogue.new_blob():
        raise KeyboardInterrupt
    assert len(files_of(catalogue)) == 1
    for wrong in ("", "sha256:", "sha256:../../x", "md5:" + "0" * 64, "sha256:" + "G" * 64, digest + "0"):
        with pytest.raises(InvalidRequestError, match="is not a digest"):
            catalogue.blob(wrong)


def test_a_name_is_changed_by_one_at_a_time(catalogue: Catalogue) -> None:
    with catalogue.claimed("a"):
        with pytest.raises(InvalidRequestError, match="a is being changed by another request"), catalogue.claimed("a"):
            pass
        with catalogue.claimed("b"):
            pass
    with catalogue.claimed("a"):
        pass


MODELFILE = '''# a comment
FROM family:8b
PARAMETER temperature 0.5
PARAMETER stop "<end>"
PARAMETER stop user:
SYSTEM """Be brief.
Be kind."""

template "{{ messages }}"
ADAPTER @sha256:12
LICENSE MIT
'''


def test_modelfile() -> None:
    assert parse_modelfile(MODELFILE) == {
        "from": "family:8b", "parameters": {"temperature": 0.5, "stop": ["<end>", "user:"]},
        "system": "Be brief.\nBe kind.", "template": "{{ messages }}", "adapters": ["@sha256:12"], "license": "MIT",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no FROM"),
        ("SYSTEM x", "it has no FROM"),
        ("FROM", "'FROM' is not an instruction"),
        ("FROM a\nMESSAGE user hi", "MESSAGE is not supported"),
        ("FROM a\nPARAMETER temperature hot", "PARAMETER temperature 'hot' is not a number"),
        ("FROM a\nPARAMETER temperature", "PARAMETER is not supported"),
        ("FROM a\nFROM b", "it has a second FROM"),
        ('FROM a\nSYSTEM """b\nPARAMETER top_k 1', "is not an instruction"),
        ("FROM a\nx", "'x' is not an instruction"),
    ],
)
def test_wrong_modelfiles(text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_modelfile(text)
