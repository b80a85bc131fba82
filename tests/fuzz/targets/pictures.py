"""Pictures, encoders of pictures, folders of safetensors."""

import io
import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from PIL import Image

import checkpoint_cases
from fuzz.mutations import Edit, edited, edits, gguf_fields
from fuzz.target import Target
from fuzz.targets.files import use
from llamacli import load_model
from llamacli.media.pictures import Picture, data_of_uri
from llamacli.plugins import Plugins
from llamacli.testing.tiny_media import drawn
from media_cases import write_mmproj, write_text
from paths import entry_points

_KINDS = ("bit", "byte", "cut", "drop", "repeat")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def _start_pictures(folder: Path) -> Callable[[tuple[str, list[Edit]]], None]:
    files = {}
    for kind in _FORMATS:
        buffer = io.BytesIO()
        Image.fromarray(drawn(61, 33)).save(buffer, kind)
        files[kind] = buffer.getvalue()

    def read(case: tuple[str, list[Edit]]) -> None:
        kind, changes = case
        if kind == "address":
            Picture.of(data_of_uri(edited(b"data:image/png;base64,iVBORw0KGgo=", changes).decode(errors="replace")))
        else:
            picture = Picture.of(edited(files[kind], changes))
            assert picture.pixels.shape == (*picture.size[::-1], 3)

    return read


PICTURES = Target(
    cases=st.tuples(st.sampled_from(["address", *_FORMATS]), edits(_KINDS)), start=_start_pictures, per_process=20_000
)
"""Pictures of requests and files."""

_ENCODERS = ("idefics3", "gemma3", "qwen2vl", "pixtral", "lfm2")


def _start_encoders(folder: Path) -> Callable[[tuple[str, list[Edit]]], None]:
    plugins, files, picture = Plugins(entry_points()), {}, drawn(61, 33)
    for name in _ENCODERS:
        (folder / name).mkdir()
        data = write_mmproj(folder / name / "mmproj.gguf", name).read_bytes()
        files[name] = write_text(folder / name / "text.gguf", name), data, gguf_fields(data)

    def load(case: tuple[str, list[Edit]]) -> None:
        name, changes = case
        text, data, fields = files[name]
        path = folder / name / "mmproj.gguf"
        path.write_bytes(edited(data, changes, fields))
        with load_model(text, threads=1, plugins=plugins, mmproj=path) as model:
            encoder = model.media_encoder()
            layout = encoder.layout(Picture.of(picture))
            assert layout
            encoder.encode(next(part for part in layout if not isinstance(part, str)))

    for name in files:
        load((name, []))
    return load


ENCODERS = Target(
    cases=st.tuples(
        st.sampled_from(_ENCODERS),
        edits((*_KINDS[:2], "cut", "field", "copy", "value", "value", "float", "type", "dim", "offset"), 3),
    ),
    start=_start_encoders,
    memory=8 << 30,
)
"""Files of encoders, up to the rows of a picture."""


def _start_folders(folder: Path) -> Callable[[tuple[str, list[Edit]]], None]:
    plugins = Plugins(entry_points())
    path = checkpoint_cases.write_checkpoint(folder, "llama_f32")
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    weights = next(name for name in whole if name.endswith(".safetensors"))

    def load(case: tuple[str, list[Edit]]) -> None:
        kind, changes = case
        name = {"weights": weights, "header": weights}.get(kind, kind)
        for other, data in whole.items():
            (path / other).write_bytes(data)
        data = whole[name]
        if kind == "header":
            length = int.from_bytes(data[:8], "little")
            header = edited(data[8 : 8 + length], changes)
            data = len(header).to_bytes(8, "little") + header + data[8 + length :]
        else:
            data = edited(data, changes)
        (path / name).write_bytes(data)
        with load_model(path, threads=1, plugins=plugins) as model:
            use(model)

    assert json.loads(whole["config.json"])
    load(("config.json", []))
    return load


FOLDERS = Target(
    cases=st.tuples(
        st.sampled_from(["weights", "header", "header", "config.json", "tokenizer.model", "tokenizer_config.json"]),
        edits(_KINDS, 3),
    ),
    start=_start_folders,
    memory=8 << 30,
)
"""Folders of Hugging Face with safetensors."""
