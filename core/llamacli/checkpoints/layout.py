"""Rules of plugins for Hugging Face checkpoints: keys, tensor names, conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Settings = Mapping[str, Any]
"""Fields of config.json, with those of its text_config and the defaults.

`tensor_names` are the names of the folder's tensors, `shapes` their shapes, `numbers` a function that returns one of
them, or a slice of its rows, `pooling` GGUF's number of what modules.json names, `modules` its folders by type,
`generation` the fields of generation_config.json, `base` those of the model of a draft head."""
Shape = tuple[int, ...]


@attrs.frozen
class Conversion:
    """Conversion of a tensor.

    `apply` takes the tensor and the fields of config.json, with the number of its `block`; `shape` those and the shape
    before it, and returns the one after it. Unless it `computes`, it moves elements only, and may be given the bits of
    bfloat16 or float8. It moves rows, or with `columns` columns, of an adapter's matrices too. With `integers` the
    tensor is and stays int64.
    """

    apply: Callable[[Array, Settings], Array]
    shape: Callable[[Shape, Settings], Shape] = lambda shape, settings: shape
    computes: bool = False
    columns: bool = False
    integers: bool = False


@attrs.frozen(eq=False)
class Checkpoint:
    """Hugging Face checkpoints that an architecture is read from.

    - `architecture`: the `general.architecture`; `classes`: the values of `architectures` in config.json.
    - `keys`: GGUF keys of the architecture, without its name, beside those that all have: values, or functions of the
      fields of config.json; None leaves a key out.
    - `defaults`: values of fields that config.json lacks, as transformers has them, or functions of the others.
    - `vocabulary`: kinds of tokenizers that are looked for, see `vocabulary_keys`; without any, files have none.
      `pre` are preferred names of `tokenizer.ggml.pre`; `tokenizer` returns further keys, of the kind,
      tokenizer_config.json and config.json, which has the `folder` and the keys of the `vocabulary` too.
      `user_defined` are texts of special tokens that files call user-defined.
    - `drop`: regexes of tensors that are not read; `rename`: regexes and their replacements before names are looked up
      in `gguf`'s map; both may be functions of the fields of config.json. `tensors`: GGUF names, with `{}` for the
      block, where the map has none.
    - `keep`: regex of tensors that are read though their names are those of other modalities.
    - `names`: the architecture whose names in gguf's map tensors have, where it is not their own.
    - `split`: names for the parts of a tensor below each other in its last but one axis, by its regex. If they are
      `mixed`, its last axis, or the rows of MXFP4 blocks, has numbers of each part in turns.
    - `whole`: names as of `split`, each of which gets the whole tensor, of which its conversion takes a part.
    - `convert`: conversions by the name of the GGUF tensor in its block, such as "attn_q.weight".
    - `types`: GGUF types of matrices by their dtypes in the folder, which files then have whatever type is asked for;
      quantized rows of other lengths than whole blocks are F16.
    - `float32`: such names of matrices that are float32 in all files, or a function that returns them.
    - `extra`: tensors that are computed from the fields of config.json.
    - `is_draft`: these are draft heads, whose vocabulary is that of their model's folder.
    - `variant`: the layout to take for these fields, where files of one class have several architectures.
    """

    architecture: str
    classes: tuple[str, ...]
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    vocabulary: tuple[str, ...] = ("bpe",)
    pre: tuple[str, ...] = ()
    tokenizer: Callable[[str, Settings, Settings], Mapping[str, Any]] = lambda kind, tokenizer, settings: {}
    drop: tuple[str, ...] | Callable[[Settings], tuple[str, ...]] = ()
    rename: tuple[tuple[str, str], ...] | Callable[[Settings], tuple[tuple[str, str], ...]] = ()
    tensors: Mapping[str, str] = attrs.field(factory=dict)
    split: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    mixed: bool = False
    whole: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    convert: Mapping[str, Conversion] = attrs.field(factory=dict)
    extra: Callable[[Settings], Mapping[str, npt.NDArray[np.float32]]] = lambda settings: {}
    variant: Callable[[Settings], Checkpoint] | None = None
    user_defined: tuple[str, ...] = ()
    names: str = ""
    keep: str = r"(?!)"
    float32: tuple[str, ...] | Callable[[Settings], tuple[str, ...]] = ()
    types: Mapping[str, str] = attrs.field(factory=dict)
    is_draft: bool = False

    @property
    def name(self) -> str:
        """Architecture and first class, for messages."""
        return f"{self.architecture} ({self.classes[0]})"


def _interleaved(field: str) -> Conversion:
    def apply(array: Array, settings: Settings) -> Array:
        n_head = settings.get(field) or settings["num_attention_heads"]
        return array.reshape(n_head, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return Conversion(apply)


INTERLEAVED: dict[str, Conversion] = {
    f"attn_{name}.{kind}": _interleaved(field)
    for name, field in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}
"""Rows of queries and keys for RoPE that rotates pairs, where the original rotates halves of heads."""

PLUS_ONE = Conversion(lambda array, settings: array + array.dtype.type(1), computes=True)
"""Weights of norms that multiply by `1 + weight` in the original code."""

MINUS_EXP = Conversion(lambda array, settings: -np.exp(array), computes=True)
"""Decay rates of state-space models: `ssm_a = -exp(A_log)`."""

TRANSPOSED = Conversion(
    lambda array, settings: array.swapaxes(-1, -2), lambda shape, settings: (*shape[:-2], shape[-1], shape[-2])
)
"""Matrices that are stored with a row for each input."""


def _draft_tokens(array: Array, settings: Settings) -> Array:
    tokens, n_vocab = array.reshape(-1) + np.arange(array.size), settings["base"]["vocab_size"]
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= n_vocab:
        raise ValueError(f"ids of tokens are from {tokens.min()} to {tokens.max()}, and the model has {n_vocab}")
    if len(np.unique(tokens)) < len(tokens):
        raise ValueError("ids of tokens are equal")
    return tokens


DRAFT_TOKENS = Conversion(_draft_tokens, lambda shape, settings: (math.prod(shape),), integers=True)
"""Ids of a draft head's tokens in its model, stored as their differences to those of the head."""

SQUEEZED = Conversion(
    lambda array, settings: array.reshape(array.shape[0], array.shape[-1]),
    lambda shape, settings: (shape[0], shape[-1]),
)
"""Weights of depthwise convolutions, stored as [n_channels, 1, width]."""


def state_space(n_groups: Callable[[Settings], int]) -> dict[str, Conversion]:
    """Conversions of state-space tensors, whose norm has this number of groups."""

    def grouped(shape: Shape, settings: Settings) -> Shape:
        return n_groups(settings), shape[0] // n_groups(settings)

    return {
        "ssm_a": Conversion(
            lambda array, settings: MINUS_EXP.apply(array, settings)[:, None],
            lambda shape, settings: (*shape, 1),
            computes=True,
        ),
        "ssm_d": Conversion(lambda array, settings: array[:, None], lambda shape, settings: (*shape, 1)),
        "ssm_norm.weight": Conversion(lambda array, settings: array.reshape(grouped(array.shape, settings)), grouped),
        "ssm_conv1d.weight": SQUEEZED,
    }


def field(*names: str, kind: Callable[[Any], Any] = int) -> Callable[[Settings], Any]:
    """Value of the first of these fields of config.json, None without any."""

    def value(settings: Settings) -> Any:
        found = next((settings[name] for name in names if settings.get(name) is not None), None)
        return None if found is None else kind(found)

    return value
