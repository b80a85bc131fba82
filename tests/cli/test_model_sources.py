"""Models of a folder, of presets and of both."""

from pathlib import Path

import pytest

from llamacli.cli.model_sources import Offer, folder_sources, preset_sources
from llamacli.errors import InvalidRequestError
from llamacli.hub.demo import demo_path


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_folder(tmp_path: Path) -> None:
    write(
        tmp_path, "b.gguf", "a.gguf", "mmproj-a.gguf", "read.me", ".hidden.gguf",
        "seer/weights.gguf", "seer/mmproj-F16.gguf",
        "split/big-00001-of-00002.gguf", "split/big-00002-of-00002.gguf",
        "two/c.gguf", "two/d.gguf", "checkpoint/config.json", "checkpoint/model.safetensors", "empty/read.me",
    )  # fmt: skip
    found = {one.name: (one.path.relative_to(tmp_path).as_posix(), one.mmproj) for one in folder_sources(tmp_path)}
    assert found == {
        "a": ("a.gguf", None),
        "b": ("b.gguf", None),
        "checkpoint": ("checkpoint", None),
        "seer": ("seer/weights.gguf", tmp_path / "seer/mmproj-F16.gguf"),
        "split": ("split/big-00001-of-00002.gguf", None),
        "c": ("two/c.gguf", None),
        "d": ("two/d.gguf", None),
    }
    with pytest.raises(OSError, match="nowhere"):
        folder_sources(tmp_path / "nowhere")


PRESETS = """
version = 1
; for all
[*]
ctx-size = 2048
temp = 0.5

[a]
c = 4096
pin = true
keep-alive = -1
lora = {folder}/lora.gguf:0.5,{folder}/lora.gguf
[brief]
model = demo
alias = short, terse
tags = small, quick
system = Be brief: one line.
stop = END
seed = 7
top_k = 20
kv-memory = 64M
n-predict = 9
"""


def test_presets(tmp_path: Path) -> None:
    write(tmp_path, "models/a.gguf", "models/b.gguf", "lora.gguf")
    file = tmp_path / "presets.ini"
    file.write_text(PRESETS.format(folder=tmp_path))
    sources = {one.name: one for one in Offer((), tmp_path / "models", file, pins=frozenset({"terse"})).read()}
    assert [*sources] == ["a", "b", "brief"]
    one, two, three = sources.values()
    assert (one.path, one.n_ctx, one.pinned, one.keep_alive) == (tmp_path / "models/a.gguf", 4096, True, -1)
    assert one.adapters == ((tmp_path / "lora.gguf", 0.5), (tmp_path / "lora.gguf", 1.0))
    assert one.preset is not None
    assert one.preset.sampling == {"temperature": 0.5}
    assert (two.n_ctx, two.pinned, two.preset) == (None, False, None)
    assert (three.path, three.aliases, three.tags, three.n_ctx, three.kv_memory) == (
        demo_path(),
        ("short", "terse"),
        ("small", "quick"),
        2048,
        64 << 20,
    )
    assert three.pinned
    preset = three.preset
    assert preset is not None
    assert (preset.system, preset.stop, preset.seed, preset.max_tokens) == ("Be brief: one line.", ("END",), 7, 9)
    assert preset.sampling == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nmodel = demo\nlora = none.gguf", r"\[a\]: none\.gguf: no such file"),
        ("[a]\nmodel = demo\nmmproj = none.gguf", r"\[a\]: none\.gguf: no such file"),
        ("[a]\nmodel = none.gguf", r"\[a\]: none\.gguf"),
        ("[a]\ntemp = 1", r"\[a\]: it has neither model nor hf-repo"),
        ("[a]\nmodel = demo\nn-gpu-layers = 9", r"\[a\]: unknown key 'n-gpu-layers'; the keys are a, "),
        ("[a]\nmodel = demo\ntemp = warm", r"\[a\]: .*'warm' is not a number"),
        ("[a]\nmodel = demo\npin = perhaps", r"\[a\]: pin must be true or false, not 'perhaps'"),
        ("[a]\nmodel = demo\nctx-size = 0", r"\[a\]: .*'0' is not an integer"),
        ("[a]\nmodel = demo\nmodel = demo", r"not a file of presets: .*line 3.*'model'"),
        ("[a]\nmodel = demo\n[a]\nmodel = demo", r"not a file of presets: .*line 3.*'a'"),
        ("[a\nmodel = demo", r"not a file of presets|is outside of a section"),
        ("ctx-size = 5\n[a]\nmodel = demo", "ctx-size is outside of a section"),
    ],
)  # fmt: skip
def test_wrong_presets(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "presets.ini"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=rf"presets\.ini: .*(?:{message})"):
        preset_sources(file, {})


def test_names_that_are_there_twice_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path, "a.gguf", "x/b.gguf", "x/c.gguf")
    (tmp_path / "presets.ini").write_text("[new]\nmodel = demo\nalias = a")
    with pytest.raises(InvalidRequestError, match="Two models are called 'a'"):
        Offer((), tmp_path, tmp_path / "presets.ini").read()
    with pytest.raises(InvalidRequestError, match="there is no model 'none'"):
        Offer((), tmp_path, pins=frozenset({"none"})).read()
    write(tmp_path, "x/a.gguf")
    with pytest.raises(InvalidRequestError, match="Two models are called 'a'"):
        Offer((), tmp_path).read()
