"""Layouts of Hugging Face folders that no plugin reads, as code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

import gguf
from llamacli.checkpoints import Checkpoint, CheckpointFile, Folder
from llamacli.checkpoints.file import TensorNameMap
from llamacli.checkpoints.keys import ROPE_FIELDS, configured_keys, rope_of, settings_of
from llamacli.errors import ModelFormatError
from llamacli.testing.hugging_face import KEYS
from llamacli.testing.scaffold.description import Description

_WITHOUT_EFFECT = re.compile(
    r"architectures|model_type|auto_map|vocab_size|(torch_)?dtype|use_cache|transformers_version|initializer_range"
    r"|_name_or_path|pretraining_tp|.*_config|.*dropout.*|.*_token_id|.*_bias|output_.*|id2label|label2id|tie_.*"
)
"""Fields of config.json that no logit depends on, or that the tensors tell."""

_EXPERTS = {
    "expert_count": re.compile(r".*n(um)?_(local_|routed_)?experts"),
    "expert_used_count": re.compile(r"moe_k|.*(expert|moe).*top_?k|.*experts?_per_tok(en)?"),
}
"""Names of the fields of experts that only some models have."""

_ENDS = (".weight", ".bias")
_TINY = {"layers": 2, "experts": 8, "window": 8, "rank": 16, "head": 16, "size": 32}
"""Sizes of random models, by a part of the field's name."""


class _Asked(dict[str, Any]):
    """Fields that remember the names of those that were looked up."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__(fields)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


class _Guessed(dict[str, str]):
    """GGUF names of tensors by the original ones.

    Both have `{}` for the block. They are guessed when they are looked up: by the name map of the architecture that
    names most tensors, else by any, else they are the original name.
    """

    def __init__(self, names: Mapping[str, int]):
        super().__init__()
        self._names = names  # with their numbers of axes
        self._stems = {re.sub(r"\.(weight|bias)$", "", name) for name in names}
        maps = [TensorNameMap(arch, 1) for arch in gguf.MODEL_ARCH_NAMES]
        self._maps = sorted(maps, key=lambda found: -len(set(filter(None, (self._in(found, x) for x in self._stems)))))

    @staticmethod
    def _in(names: gguf.TensorNameMap, stem: str) -> str | None:
        found = names.get_name(stem.replace(".{}.", ".0."), _ENDS)
        return re.sub(r"\.0\.", ".{}.", found, count=1) if found else None

    def get(self, stem: str, default: Any = None) -> Any:
        if stem not in self:
            self[stem] = self._guess(stem)
        return self[stem]

    def _guess(self, stem: str) -> str:
        taken = set(self.values())
        own = re.sub(r"^(model|transformer|decoder|backbone)\.", "", stem)
        block, _, rest = own.rpartition("{}.")
        own = ("blk.{}." if block else "") + rest.replace(".", "_")
        known = (found for names in self._maps if (found := self._in(names, stem)))
        ending = ".weight" if self._names.get(stem, 0) > 1 else ""
        return next(name for x in (*known, own, stem) if (name := x + ending) not in taken)


@attrs.frozen
class Layout:
    """Code of a checkpoint's layout.

    `model_type` and `config` are arguments of the model of transformers to compare with, `left` are the fields of
    config.json that no key is made of.
    """

    classes: tuple[str, ...]
    keys: Mapping[str, str]
    tensors: Mapping[str, str]
    vocabulary: tuple[str, ...]
    model_type: str
    config: Mapping[str, Any]
    left: Mapping[str, Any]

    def code(self) -> Iterator[str]:
        """Arguments of `Checkpoint`, after the architecture."""
        yield f"    classes={_tuple(self.classes)},"
        for name, value in self.left.items():
            shown = json.dumps(value)
            yield f"    # Left to do: {name} = {shown[:60]}{'...' if len(shown) > 60 else ''} of config.json"
        yield "    keys={"
        yield from (f"        {json.dumps(key)}: {text}," for key, text in self.keys.items())
        yield "    },"
        if not self.vocabulary:
            yield "    # Left to do: the tokenizer, which is of a kind that is not known, see docs/hooks/tokenizer.md"
        yield f"    vocabulary={_tuple(self.vocabulary)},"
        yield "    tensors={"
        yield from (f"        {json.dumps(name)}: {json.dumps(found)}," for name, found in self.tensors.items())
        yield "    },"


def describe_folder(folder: Folder, architecture: str) -> tuple[Description, Layout]:
    """Describe a folder, and the layout that reads it.

    Raises ModelFormatError naming the file, field or tensor that is missing or wrong.
    """
    plain = {re.sub(r"\.\d+\.", ".{}.", name.replace("language_model.", ""), count=1): len(entry.shape)
             for name, entry in folder.entries.items()}  # fmt: skip
    names = _Guessed({re.sub(r"\.experts\.\d+\.", ".experts.", name): axes for name, axes in plain.items()})
    checkpoint = Checkpoint(architecture, tuple(folder.classes), tensors=names, vocabulary=())
    source = f"{folder.path}/config.json"
    settings = _Asked(settings_of(folder.config, checkpoint, source))
    configured_keys(settings, checkpoint, source)
    values, code, left = _own_keys(settings)
    file = CheckpointFile(folder, attrs.evolve(checkpoint, keys=values))
    layout = Layout(
        tuple(folder.classes), code, dict(names), _vocabulary(folder, checkpoint), str(settings.get("model_type", "")),
        _config(settings, plain), left,
    )  # fmt: skip
    return attrs.evolve(Description.of(file), rotates_halves=True), layout


def _own_keys(settings: _Asked) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Keys of fields that nothing has read: values, code, other fields."""
    names = {field: key for key, fields in KEYS.items() for field in fields}
    values: dict[str, Any] = {}
    code: dict[str, str] = {}
    left: dict[str, Any] = {}
    for field, value in settings.items():
        if field in settings.asked or field in ROPE_FIELDS or value is None or _WITHOUT_EFFECT.fullmatch(field):
            continue
        other = (key for key, pattern in _EXPERTS.items() if type(value) is int and pattern.fullmatch(field))
        key = names.get(field) or next(other, field)
        if field == "layer_types" and "sliding_attention" in value:
            values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in value]
            code["attention.sliding_window_pattern"] = (
                'lambda settings: [kind == "sliding_attention" for kind in settings["layer_types"]]'
            )
        elif _is_key(value):
            values[key], code[key] = value, f"itemgetter({json.dumps(field)})"
        elif (field, value) not in (("hidden_act", "silu"), ("hidden_act", "swish")):
            left[field] = value
    if (share := rope_of(settings).get("partial_rotary_factor", 1)) != 1:
        head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        values["rope.dimension_count"] = int(head_dim * share)
        code["rope.dimension_count"] = (
            'lambda settings: int((settings.get("head_dim") or settings["hidden_size"] // '
            'settings["num_attention_heads"]) * rope_of(settings)["partial_rotary_factor"])'
        )
    return values, code, left


def _is_key(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and len({type(item) for item in items}) == 1 and isinstance(items[0], bool | int | float)


def _vocabulary(folder: Folder, checkpoint: Checkpoint) -> tuple[str, ...]:
    from llamacli.tokenizer.hugging_face import vocabulary_keys

    try:
        kind, _ = vocabulary_keys(folder.path, folder.config, ("sentencepiece", "byte_fallback", "bpe"), checkpoint.pre)
    except ModelFormatError:
        return ()
    return (kind,)


def _config(settings: _Asked, names: Mapping[str, int]) -> dict[str, Any]:
    """Arguments of a small model's configuration; sizes that all have are drawn."""
    n_layer = _TINY["layers"]
    found = {}
    for field, value in settings.items():
        sized = field in settings.asked and not isinstance(value, bool)
        if value is None or sized or (_WITHOUT_EFFECT.fullmatch(field) and not field.endswith("_bias")):
            continue
        if field == "rope_parameters" and field not in settings.asked:
            continue
        if isinstance(value, list) and len(value) == settings.get("num_hidden_layers"):
            value, found["num_hidden_layers"] = value[-n_layer:], n_layer
        elif type(value) is int and field not in ROPE_FIELDS:
            value = min(value, next((size for part, size in _TINY.items() if part in field), 4))
        found[field] = value
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if settings.get(field):
            found[field] = _TINY["experts"]
    return found | {"tie_word_embeddings": "lm_head.weight" not in names}


def _tuple(names: tuple[str, ...]) -> str:
    return f"({', '.join(map(json.dumps, names))}{',' if len(names) == 1 else ''})"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def layout_values(layout: Layout) -> dict[str, str]:
    """Values of the templates `checkpoints.py` and `tiny.py`."""
    config = "\n".join(f"    {json.dumps(field)}: {_literal(value)}," for field, value in layout.config.items())
    used = "\n".join(layout.code())
    names = [name for name in ("itemgetter", "rope_of") if name in used]
    return {
        "layout": used, "model_type": layout.model_type, "config": f"{{\n{config}\n}}",
        "operator": "from operator import itemgetter\n\n" if "itemgetter" in names else "",
        "rope_of": ", rope_of" if "rope_of" in names else "",
    }  # fmt: skip
