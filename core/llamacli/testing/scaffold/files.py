"""Files of skeletons: a distribution with tests."""

from __future__ import annotations

import importlib.resources
import json
import keyword
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata
from llamacli.loaders import ModelFile
from llamacli.media.encoder import projector_of
from llamacli.testing.scaffold.checkpoint import Layout, layout_values
from llamacli.testing.scaffold.declarations import Declarations
from llamacli.testing.scaffold.description import Description
from llamacli.testing.scaffold.forward import Forward
from llamacli.testing.tiny import KEYS

_INERT = '''
INERT = ["*.attn_k.bias"]
"""Tensors that change no logit: this one cancels out in softmax where there is no RoPE."""
'''


def write_plugin(
    folder: Path, name: str, description: Description, *, from_file: bool, layout: Layout | None = None
) -> list[Path]:
    """Write a distribution `llamacli-NAME` into a new folder; returns its files.

    With the `layout` of a Hugging Face folder it reads such folders, and is compared with transformers. Raises
    InvalidRequestError for a name that is no Python name with hyphens, and if the folder exists.
    """
    return _write(folder, name, lambda module: _contents(name, module, description, from_file, layout))


def write_encoder_plugin(folder: Path, name: str, file: ModelFile | None = None, *, hears: bool = False) -> list[Path]:
    """Write the distribution of a media encoder into a new folder.

    Returns its files.
    From an open mmproj file it has the fields of the configuration and the tensors of the projector that the file
    shows; else `name` is its `clip.projector_type` too, and with `hears` it is an encoder of sound. Raises what
    `write_plugin` raises, and ModelFormatError for another file.
    """
    return _write(folder, name, lambda module: _encoder_contents(name, module, file, hears=hears))


def _write(folder: Path, name: str, contents: Callable[[str], dict[str, str]]) -> list[Path]:
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise InvalidRequestError(
            f"the name {name!r} must be lower-case letters, digits and hyphens, a letter first, and no Python keyword"
        )
    if folder.exists():
        raise InvalidRequestError(f"{folder} exists already")
    files = contents(module)
    written = []
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written.append(path)
    return written


def _encoder_contents(name: str, module: str, file: ModelFile | None, *, hears: bool) -> dict[str, str]:
    class_name = _class_name(module)
    if file:
        hears = "clip.audio.embedding_length" in file.metadata and "clip.vision.embedding_length" not in file.metadata
    values = {
        "name": name, "module": module, "architecture": projector_of(file.metadata) if file else name,
        "class_name": class_name, "inert": _INERT, "options": ", inert=INERT", "names": "INERT, MEDIA",
        "variants": "MEDIA", "kind": "Media encoder", "group": "llamacli.media",
    }  # fmt: skip
    values |= _SOUND if hears else _PICTURES
    if file:
        values |= _of_encoder(file.metadata, {key: info.shape for key, info in file.tensors.items()}, hears=hears)
    files = _files(module, values, "media.py", "media_tiny.py", "media_README.md")
    init = f"llamacli_{module}/__init__.py"
    return files | {init: _without_unused(files[init], *_IMPORTED)}


_IMPORTED = (
    "SAMPLE_RATE", "MediaEncoder", "Mel", "Pixels", "Samples", "SoundConfig", "SoundEncoder", "VisionConfig", "gelu",
    "log_mel", "mlp", "resized", "vision_tensors", "vision_tower", "whisper", "whisper_tensors",
)  # fmt: skip
"""Names that only some encoders import."""

_PICTURES = {
    "title": "Pictures", "base": "MediaEncoder", "config": "VisionConfig", "like": "SigLIP", "numpy": "",
    "attributes": "", "tower": "vision_tower", "tower_tensors": "vision_tensors", "prefix": "clip.vision",
    "points": "norms, gates, positions, RoPE, windows, a class token",
    "medium": "a picture", "lengths": "the sizes that it is resized to", "option": "--image",
    "layout": '''\
    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture in a square, between two tokens."""
        # Left to do: the tokens of this model; how it resizes pictures, and divides large ones into tiles
        square = resized(pixels, config.image_size, config.image_size, "bicubic")
        return ["<image>", square, "</image>"]
''',
    "fields": "n_merge=2",
    "projector": """\
        table.add("mm.0", config.n_embd_text, width, bias=True)
        table.add("mm.2", config.n_embd_text, config.n_embd_text, bias=True)""",
    "result": "mlp(g, x, weights.mm_0, weights.mm_2, gelu)",
    "keys": '{"projector.scale_factor": 2}',
}  # fmt: skip

_STACK = 'n_merge=metadata.get_int("clip.audio.projector.stack_factor", minimum=1)'

_SOUND = {
    "title": "Sound", "base": "SoundEncoder", "config": "SoundConfig", "like": "Whisper's",
    "numpy": "import numpy as np\n\n", "tower": "whisper", "tower_tensors": "whisper_tensors", "prefix": "clip.audio",
    "attributes": '    convolutions = ("a.conv1d.1.weight", "a.conv1d.2.weight")\n',
    "points": "norms, gates, RoPE, windows, the most patches of a tile; other convolutions than Whisper's",
    "medium": "sound", "lengths": "the length that it is filled up to with silence", "option": "--audio",
    "layout": '''\
    def layout(self, samples: Samples, config: SoundConfig) -> list[str | Mel]:
        """The sound, filled up with silence to whole tokens, between two tokens."""
        # Left to do: the tokens of this model; the length that sound is filled up to, such as 30 seconds
        token = self.n_frames * config.n_merge
        mel = log_mel(np.pad(samples, (0, -len(samples) % (token * SAMPLE_RATE // 100))), config.n_mel)
        window = config.max_patches // config.n_merge * token
        return ["<audio>", *(mel[i : i + window] for i in range(0, len(mel), window)), "</audio>"]
''',
    "fields": _STACK,
    "projector": """\
        table.add("mm.a.mlp.1", config.n_embd_text, width, bias=True)
        table.add("mm.a.mlp.2", config.n_embd_text, config.n_embd_text, bias=True)""",
    "result": "mlp(g, x, weights.mm_a_mlp_1, weights.mm_a_mlp_2, gelu)",
    "keys": '{"projector.stack_factor": 2}',
}  # fmt: skip


def _of_encoder(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], *, hears: bool) -> dict[str, str]:
    """Parts of the template that a mmproj file tells."""
    prefix, key = ("clip.audio", "projector.stack_factor") if hears else ("clip.vision", "projector.scale_factor")
    if f"{prefix}.spatial_merge_size" in metadata:
        key = "spatial_merge_size"
    n_merge = metadata.get_int(f"{prefix}.{key}", 1)
    layer = "a.blk.0" if hears else "v.blk.0"
    shown = {
        "n_merge": _STACK.partition("=")[2] if hears and f"{prefix}.{key}" in metadata else str(n_merge),
        "merge_key": f'"{key}"' if key == "spatial_merge_size" else "",
        "n_frames": "2" if "v.patch_embd.weight.1" in shapes else "",
        "rms": "" if f"{layer}.ln1.bias" in shapes else "True",
        "gated": "True" if f"{layer}.ffn_gate.weight" in shapes else "",
        "positions": "" if hears or "v.position_embd.weight" in shapes else '""',
        "class_token": '"dropped"' if "v.class_embd" in shapes else "",
        "qk_norm": '"head"' if f"{layer}.attn_q_norm.weight" in shapes else "",
        "layer_scale": "True" if f"{layer}.ls1.weight" in shapes else "",
        "post_norms": "True" if f"{layer}.attn_post_norm.weight" in shapes else "",
    }
    found = {field: value for field, value in shown.items() if value}
    n_embd, n_text = (metadata.get_int(f"{prefix}.{key}") for key in ("embedding_length", "projection_dim"))
    n_merged = n_merge if hears else n_merge**2
    sizes = {n_embd * n_merged: "width", n_embd: "config.n_embd", n_text: "config.n_embd_text"}
    table, matrices = [], []
    for tensor in sorted(name for name in shapes if name.startswith("mm.") and name.startswith("mm.a.") == hears):
        stem, _, kind = tensor.rpartition(".")
        numbers = ", ".join(sizes.get(size, str(size)) for size in shapes[tensor])
        if kind == "weight":
            table.append(f'table.add("{stem}", {numbers}{", bias=True" if f"{stem}.bias" in shapes else ""})')
            matrices += [f"weights.{stem.replace('.', '_')}"] if len(shapes[tensor]) == 2 else []
        elif kind != "bias" or f"{stem}.weight" not in shapes:
            table.append(f'table.add_tensor("{tensor}", {numbers})')
    result = {1: "g.linear(x, {})", 2: "mlp(g, x, {}, gelu)"}.get(len(matrices), "x")
    left = "" if result != "x" and len(table) == len(matrices) else "  # Left to do: the projector"
    return {
        "fields": ", ".join(f"{field}={value}" for field, value in found.items()),
        "projector": "\n".join(f"        {line}" for line in table),
        "result": result.format(", ".join(matrices)) + left,
        "keys": f'{{"{key}": {n_merge}}}' if not hears or f"{prefix}.{key}" in metadata else "{}",
    }


def _class_name(module: str) -> str:
    return "".join(part.capitalize() for part in module.split("_"))


def _filled(template: str, values: Mapping[str, str]) -> str:
    source = importlib.resources.files("llamacli").joinpath(f"data/plugin/{template}.tmpl").read_text("utf-8")
    return Template(source).substitute(values)


def _files(
    module: str,
    values: Mapping[str, str],
    init: str = "init.py",
    tiny: str = "tiny.py",
    readme: str = "README.md",
) -> dict[str, str]:
    return {
        "pyproject.toml": _filled("pyproject.toml", values),
        "README.md": _filled(readme, values),
        "MANIFEST.in": "recursive-include tests *.py *.json\n",
        ".github/workflows/test.yml": _filled("workflow.yml", values),
        f"llamacli_{module}/__init__.py": _filled(init, values),
        f"llamacli_{module}/py.typed": "",
        f"llamacli_{module}/tiny.py": _filled(tiny, values),
        f"tests/test_{module}.py": _filled("test.py", values),
    }


def _contents(
    name: str, module: str, description: Description, from_file: bool, layout: Layout | None
) -> dict[str, str]:
    class_name = _class_name(module)
    code = Declarations(description, class_name)
    tiny_keys = [f"    {json.dumps(key)}: {_source(value)}," for key, value in _tiny_keys(code).items()]
    values = {
        "name": name,
        "module": module,
        "architecture": description.architecture,
        "class_name": class_name,
        "inert": "" if code.has_rope else _INERT,
        "options": "" if code.has_rope else ", inert=INERT",
        "names": "VARIANTS" if code.has_rope else "INERT, VARIANTS",
        "variants": "VARIANTS",
        "kind": "Architecture",
        "group": "llamacli.architectures",
        "tiny_keys": "\n".join(["{", *tiny_keys, "}"]),
        "fields": "\n".join(code.fields()),
        "configure": "\n".join(code.configure()),
        "tensors": "\n".join(code.tensors()),
        "forward": "\n".join(Forward(code).lines()),
    }
    values["bound"] = "1e-5),  # llama.cpp rounds GELU to float16" if "gelu" in values["forward"] else "1e-8),"
    files = _files(module, values)
    files[f"llamacli_{module}/__init__.py"] = _without_unused(files[f"llamacli_{module}/__init__.py"], "gelu", "Rope")
    if layout:
        _add_layout(files, module, values | layout_values(layout), layout)
    if from_file:
        imports = "import json\nfrom pathlib import Path\n\nfrom llamacli.testing import check_shapes, "
        test = files[f"tests/test_{module}.py"].replace("from llamacli.testing import ", imports)
        test += _filled("test_file.py", values)
        content = {"keys": dict(description.keys), "shapes": {key: list(x) for key, x in description.shapes.items()}}
        files |= {f"tests/test_{module}.py": test, "tests/file.json": json.dumps(content, indent=1) + "\n"}
    return files


def _without_unused(init: str, *names: str) -> str:
    for name in names:
        if len(re.findall(rf"\b{name}\b", init)) == 1:
            init = re.sub(rf"\s+{name},", "", init)
    return init


def _add_layout(files: dict[str, str], module: str, values: Mapping[str, str], layout: Layout) -> None:
    """Add the module that reads folders, and the comparison with transformers."""
    package = f"llamacli_{module}"
    entries = "".join(f'"{name}" = "{package}.checkpoints"\n' for name in layout.classes)
    files["pyproject.toml"] = files["pyproject.toml"].replace(
        "[tool.setuptools]", f'[project.entry-points."llamacli.checkpoints"]\n{entries}\n[tool.setuptools]', 1
    )
    files[f"{package}/checkpoints.py"] = _filled("checkpoints.py", values)
    tiny, test = f"{package}/tiny.py", f"tests/test_{module}.py"
    files[tiny] = (
        (files[tiny] + _filled("tiny_folder.py", values))
        .replace("import write_architecture\n", "import HuggingFaceModel, write_architecture\n")
        .replace(
            f"import {values['class_name']}\n",
            f"import {values['class_name']}\nfrom {package}.checkpoints import CHECKPOINT\n",
        )
    )
    files[test] = (
        files[test]
        .replace("VARIANTS\n", "TRANSFORMERS, VARIANTS\n")
        .replace("VARIANTS, ", "VARIANTS, transformers=TRANSFORMERS, ")
        .replace("VARIANTS)", "VARIANTS, transformers=TRANSFORMERS)")
    )


def _source(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, str):
        return json.dumps(value)
    return str(np.float32(value)) if isinstance(value, float) else repr(value)


_TINY = {"feed_forward_length": 32, "expert_count": 8, "expert_used": 2, "sliding_window": 8, "rank": 16, "inner": 64}
"""Sizes of tiny files, by a part of the key."""


def _tiny_keys(declarations: Declarations) -> dict[str, Any]:
    description = declarations.description
    keys, n_layer = description.keys, _n_layer(description)
    tiny: dict[str, Any] = {}
    for key, value in keys.items():
        if key == "vocab_size":
            continue
        if key in ("attention.key_length", "attention.value_length"):
            tiny[key] = 16
        elif key == "rope.dimension_count":
            head_dim = declarations.sizes.get("c.head_dim", value)
            tiny[key] = max(2, 16 * int(value) // head_dim // 2 * 2)
        elif isinstance(value, list) and len(value) == keys.get("block_count"):
            tiny[key] = [min(item, 16) if type(item) is int else item for item in value[:n_layer]]
        elif isinstance(value, list) and key.endswith("sections"):
            tiny[key] = [max(int(item > 0), item * 8 // max(1, sum(value))) for item in value]
        elif key in KEYS:
            tiny[key] = min(value, KEYS[key]) if isinstance(value, int) else value
        elif type(value) is int:
            tiny[key] = min(value, next((size for name, size in _TINY.items() if name in key), 4))
        else:
            tiny[key] = value
    heads, heads_kv = keys.get("attention.head_count"), keys.get("attention.head_count_kv")
    if heads is not None and heads == heads_kv:
        tiny["attention.head_count_kv"] = tiny["attention.head_count"]
    absent = {key: None for key in KEYS if key not in keys}
    return tiny | {"block_count": n_layer} | absent


def _n_layer(description: Description) -> int:
    kinds = [description.names(i) for i in range(description.n_layer)]
    last_new = max((i for i, kind in enumerate(kinds) if kind not in kinds[:i]), default=0)
    intervals = [v for k, v in description.keys.items() if "interval" in k and type(v) is int]
    return min(8, max(2, last_new + 1, *intervals, 0))
