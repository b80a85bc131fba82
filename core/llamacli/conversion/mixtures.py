"""Quantization mixtures of llama.cpp: types of tensors by file type.

Every choice is that of its quantizer. More important tensors get more bits: the output, the values of attention and the
down projections of some layers. Tensors whose rows do not fit a type's blocks fall back to another type. Its exceptions
for single architectures are left out.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, IntEnum

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata, TensorInfo
from llamacli.quantization import BLOCK_FORMATS, CODEBOOK_TYPES, FORMATS, TensorType, block_size

T = TensorType


@attrs.frozen
class FileType:
    """A file type: name, number in general.file_type, type of most tensors."""

    name: str
    number: int
    type: IntEnum


_TYPES = (
    ("F32", 0, T.F32), ("F16", 1, T.F16), ("BF16", 32, T.BF16), ("Q8_0", 7, T.Q8_0), ("Q4_0", 2, T.Q4_0),
    ("Q4_1", 3, T.Q4_1), ("Q5_0", 8, T.Q5_0), ("Q5_1", 9, T.Q5_1), ("Q2_K", 10, T.Q2_K), ("Q3_K_S", 11, T.Q3_K),
    ("Q3_K_M", 12, T.Q3_K), ("Q3_K_L", 13, T.Q3_K), ("Q4_K_S", 14, T.Q4_K), ("Q4_K_M", 15, T.Q4_K),
    ("Q5_K_S", 16, T.Q5_K), ("Q5_K_M", 17, T.Q5_K), ("Q6_K", 18, T.Q6_K), ("Q2_K_S", 21, T.Q2_K),
    ("IQ4_NL", 25, T.IQ4_NL), ("IQ4_XS", 30, T.IQ4_XS), ("IQ3_M", 27, T.IQ3_S), ("IQ3_S", 26, T.IQ3_S),
    ("IQ3_XS", 22, T.IQ3_S), ("IQ3_XXS", 23, T.IQ3_XXS), ("IQ2_M", 29, T.IQ2_S), ("IQ2_S", 28, T.IQ2_XS),
    ("IQ2_XS", 20, T.IQ2_XS), ("IQ2_XXS", 19, T.IQ2_XXS), ("IQ1_M", 31, T.IQ1_M), ("IQ1_S", 24, T.IQ1_S),
    ("TQ2_0", 37, T.TQ2_0), ("TQ1_0", 36, T.TQ1_0), ("MXFP4_MOE", 38, T.MXFP4), ("NVFP4", 39, T.NVFP4),
)  # fmt: skip

FILE_TYPES = {name: FileType(name, number, kind) for name, number, kind in _TYPES}
"""Supported file types by name."""

FILE_TYPE_NAMES = {kind.number: kind.name for kind in FILE_TYPES.values()} | {
    4: "Q4_1_SOME_F16", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""Names of llama.cpp's file types by `general.file_type`, with those that are only read here."""

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def file_type(name: str) -> FileType:
    """Look up a file type by name, case-insensitively.

    A tensor type that a plugin adds with a quantizer is a file type too, whose number is the tensor type's. Raises
    InvalidRequestError.
    """
    upper = name.upper()
    added = {
        fmt.name: FileType(fmt.name, int(fmt.type), fmt.type)
        for fmt in FORMATS.values()
        if fmt.quantize is not None and not isinstance(fmt.type, TensorType)
    }
    known = FILE_TYPES | added
    try:
        return known[ALIASES.get(upper, upper)]
    except KeyError:
        raise InvalidRequestError(f"unknown type {name!r}; known are {', '.join([*known, *ALIASES])}") from None


@attrs.frozen
class Choice:
    """Type of a tensor, and the `wanted` one before a fallback."""

    type: IntEnum
    wanted: IntEnum


def choose(
    tensors: Collection[TensorInfo],
    metadata: Metadata,
    kind: FileType,
    *,
    pure: bool = False,
    has_imatrix: bool = False,
    overrides: Sequence[tuple[str, IntEnum]] = (),
) -> dict[str, Choice]:
    """Choose the types of all tensors to be quantized, by name.

    With `pure` all get the same type, except for fallbacks. Some mixtures depend on `has_imatrix`. `overrides` are
    regexes of names with types, the first that is found in a name counts. Raises InvalidRequestError for a regex that
    is none, or found in no name.
    """
    # llama.cpp counts layers in this order, whatever the file's is.
    ordered = sorted(filter(is_quantizable, tensors), key=lambda info: (_layer(info.name), info.name.encode()))
    types: dict[str, IntEnum] = dict.fromkeys((info.name for info in ordered), kind.type)
    given = _overridden([info.name for info in ordered], overrides)
    if not pure and (kind.type in BLOCK_FORMATS or kind.type in CODEBOOK_TYPES):
        mixed = [info for info in ordered if info.name not in given]  # llama.cpp counts the others alone
        types = _mixed(mixed, {info.name for info in tensors}, _Model.of(metadata, has_imatrix), kind)
    types |= given
    return {info.name: Choice(_fitting(types[info.name], info.shape[-1]), types[info.name]) for info in ordered}


def _overridden(names: Sequence[str], overrides: Sequence[tuple[str, IntEnum]]) -> dict[str, IntEnum]:
    found: dict[str, IntEnum] = {}
    for pattern, kind in reversed(overrides):
        try:
            matching = [name for name in names if re.search(pattern.lower(), name)]
        except re.error as error:
            raise InvalidRequestError(f"{pattern!r} is no regex of tensor names: {error}") from None
        if not matching:
            raise InvalidRequestError(f"{pattern!r} is in no name of a tensor that can be quantized")
        found |= dict.fromkeys(matching, kind)
    return found


_NEED_IMATRIX = (T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S)


def requires_imatrix(name: str, kind: IntEnum, file_type: FileType) -> bool:
    """True if a type needs an importance matrix, as llama.cpp demands."""
    needs = kind in _NEED_IMATRIX or (kind is T.Q2_K and file_type.name == "Q2_K_S")
    return needs and name not in _EXACT


# --- tensors that are not quantized ----------------------------------------------------------------------------------

_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
_KEPT_PARTS = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight",
    ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger",
    "a.rvq.codebook", "mm.a.code_embd", "time_mix_first.weight", "time_mix_lerp_fused.weight",
    "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    *(f"time_mix_{part}.weight" for part in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")),
)  # fmt: skip
"""Norms, routers, convolutions, position embeddings: small or sensitive tensors."""


def is_quantizable(info: TensorInfo) -> bool:
    """True for weights that are quantized: matrices and stacks of matrices."""
    return (
        any(n > 1 for n in info.shape[:-1])
        and info.name.endswith("weight")
        and info.name not in _KEPT_NAMES
        and not any(part in info.name for part in _KEPT_PARTS)
    )


# --- the mixtures ----------------------------------------------------------------------------------------------------


_Role = Enum("_Role", "OUTPUT EMBEDDING QUERY VALUE KEY ATTENTION_OUTPUT UP GATE DOWN OTHER")
"""Roles of tensors in the rules of mixtures."""

_EXACT = {
    "output.weight": _Role.OUTPUT,
    "token_embd.weight": _Role.EMBEDDING,
    "per_layer_token_embd.weight": _Role.EMBEDDING,
}
_PARTS = {
    "attn_qkv.weight": _Role.VALUE, "attn_kv_b.weight": _Role.VALUE, "attn_v.weight": _Role.VALUE,
    "attn_k.weight": _Role.KEY, "attn_q.weight": _Role.QUERY, "attn_output.weight": _Role.ATTENTION_OUTPUT,
    "ffn_up": _Role.UP, "ffn_gate": _Role.GATE, "ffn_down": _Role.DOWN,
}  # fmt: skip


def _role(name: str) -> _Role:
    if name in _EXACT:
        return _EXACT[name]
    return next((role for part, role in _PARTS.items() if part in name), _Role.OTHER)


@attrs.frozen
class _Model:
    """Hyperparameters that mixtures depend on; 0 where the file has none."""

    n_layer: int
    n_expert: int
    n_head: int
    n_head_kv: int
    has_imatrix: bool

    @classmethod
    def of(cls, metadata: Metadata, has_imatrix: bool) -> "_Model":
        arch = metadata.get_str("general.architecture", "")
        n_layer = metadata.get_int(f"{arch}.block_count", 0, minimum=0)
        heads = metadata.get_ints(f"{arch}.attention.head_count", n_layer, (0,), minimum=0)
        heads_kv = metadata.get_ints(f"{arch}.attention.head_count_kv", n_layer, heads, minimum=0)
        n_expert = metadata.get_int(f"{arch}.expert_count", 0, minimum=0)
        return cls(n_layer, n_expert, heads[0] if heads else 0, heads_kv[0] if heads_kv else 0, has_imatrix)

    @property
    def group(self) -> int:
        return self.n_head // self.n_head_kv if self.n_head_kv else 0


@attrs.frozen
class _Place:
    """The `index`-th of `count` tensors of a role."""

    index: int
    count: int
    model: _Model

    @property
    def uses_more_bits(self) -> bool:
        return self.is_early or self.index >= 7 * self.count // 8 or (self.index - self.count // 8) % 3 == 2

    @property
    def is_early(self) -> bool:
        return self.index < self.count // 8

    @property
    def is_inner(self) -> bool:
        return not self.is_early and self.index < 7 * self.count // 8


_Rule = Callable[[_Place], TensorType | None]


def _grouped(kind: TensorType, otherwise: TensorType | None = None) -> _Rule:
    """Type where at least four query heads share a key-value head."""
    return lambda place: kind if place.model.group >= 4 else otherwise


def _early(kind: TensorType, *, imatrix: bool) -> _Rule:
    return lambda place: kind if place.is_early and place.model.has_imatrix is imatrix else None


def _values_of_iq3_xxs(place: _Place) -> TensorType | None:
    return T.Q4_K if place.model.group >= 4 else None if place.model.has_imatrix else T.IQ3_S


def _down_of_iq3_xxs(place: _Place) -> TensorType | None:
    if place.model.has_imatrix:
        return None
    return T.Q4_K if place.is_early else T.Q3_K


def _down_of_iq3_m(place: _Place) -> TensorType | None:
    more = place.model.n_expert == _EIGHT_EXPERTS and place.uses_more_bits
    return T.Q4_K if place.is_early or more else None


_RULES: dict[tuple[str, _Role], TensorType | _Rule] = {
    (name, role): rule
    for names, roles, rule in (
        ("Q4_0", "DOWN", _early(T.Q4_1, imatrix=True)),
        ("Q5_0", "DOWN", _early(T.Q5_1, imatrix=True)),
        ("Q2_K", "VALUE", _grouped(T.Q4_K, T.Q3_K)),
        ("Q2_K", "DOWN ATTENTION_OUTPUT", T.Q3_K),
        ("Q2_K_S IQ3_S IQ3_XS", "VALUE", _grouped(T.Q4_K)),
        ("Q2_K_S", "DOWN", lambda place: T.Q4_K if place.is_early else None),
        ("Q3_K_M", "VALUE", lambda place: T.Q5_K if place.index < 2 else T.Q4_K),
        ("Q3_K_M", "DOWN", lambda place: T.Q5_K if place.index < place.count // 16 else T.Q4_K),
        ("Q3_K_M", "ATTENTION_OUTPUT", T.Q4_K),
        ("Q3_K_L", "VALUE DOWN ATTENTION_OUTPUT", T.Q5_K),
        ("Q4_K_S", "VALUE", lambda place: T.Q5_K if place.index < 4 else None),
        ("Q4_K_S", "DOWN", lambda place: T.Q5_K if place.is_early else None),
        ("Q4_K_M Q5_K_M", "VALUE DOWN", lambda place: T.Q6_K if place.uses_more_bits else None),
        ("IQ4_NL IQ4_XS", "VALUE", _grouped(T.Q5_K)),
        ("IQ4_NL IQ4_XS", "DOWN", _early(T.Q5_K, imatrix=False)),
        ("IQ3_M", "VALUE ATTENTION_OUTPUT", T.Q4_K),
        ("IQ3_M", "DOWN", _down_of_iq3_m),
        ("IQ3_XS", "KEY QUERY", T.IQ3_XXS),
        ("IQ3_XS", "GATE UP", lambda place: T.IQ3_XXS if place.is_inner else None),
        ("IQ3_XXS", "EMBEDDING ATTENTION_OUTPUT", T.IQ3_S),
        ("IQ3_XXS", "VALUE", _values_of_iq3_xxs),
        ("IQ3_XXS", "KEY QUERY", T.IQ2_S),
        ("IQ3_XXS", "DOWN", _down_of_iq3_xxs),
        ("TQ1_0 TQ2_0", "EMBEDDING", T.Q4_K),
    )
    for name in names.split()
    for role in (_Role[word] for word in roles.split())
}
"""Types of tensors that differ from the file's type, by mixture and role."""

_MORE_OF_LOW = {
    "IQ2_M": (T.IQ3_S, T.IQ3_S, T.IQ3_S), "IQ2_S": (T.IQ3_S, T.IQ3_S, T.IQ3_S), "IQ2_XS": (T.Q2_K, T.Q2_K, None),
    "IQ2_XXS": (T.Q2_K, T.Q2_K, None), "IQ1_M": (T.Q2_K, T.Q2_K, T.IQ2_XXS), "IQ1_S": (T.Q2_K, T.Q2_K, T.IQ2_XXS),
}  # fmt: skip
"""Mixtures of the lowest bits: types of the embedding, of values and early down projections, of attention's output."""

_EIGHT_EXPERTS = 8
_EIGHT_EXPERTS_OUTPUT = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ3_XS", "IQ3_XXS", "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
_MANY_LAYERS = 80


def _mixed(ordered: Iterable[TensorInfo], names: set[str], model: _Model, kind: FileType) -> dict[str, IntEnum]:
    tied = "output.weight" not in names
    n_value = sum(_role(name) is _Role.VALUE for name in names)
    seen = dict.fromkeys(_Role, 0)
    types: dict[str, IntEnum] = {}
    for info in ordered:
        role = _role(info.name)
        if role is _Role.OUTPUT or (tied and role is _Role.EMBEDDING):
            types[info.name] = _output_type(kind, info.shape[-1])
            continue
        if kind.name == "MXFP4_MOE":
            types[info.name] = T.MXFP4 if math.prod(info.shape[:-2]) > 1 else T.Q8_0
            continue
        index, count = seen[role], n_value
        if role in (_Role.UP, _Role.GATE, _Role.DOWN):
            count = model.n_layer
            index = _layer(info.name) if model.n_expert > 1 and kind.name not in _MORE_OF_LOW else index
        choose_type = _of_low if kind.name in _MORE_OF_LOW else _by_role
        types[info.name] = choose_type(role, _Place(index, count, model), kind)
        seen[role] += 1
    return types


def _output_type(kind: FileType, width: int) -> TensorType:
    if kind.type in (T.Q8_0, T.MXFP4) or width % block_size(kind.type):
        return T.Q8_0
    return T.Q5_K if kind.name in (*_MORE_OF_LOW, "IQ3_XXS") else T.Q6_K


def _of_low(role: _Role, place: _Place, kind: FileType) -> IntEnum:
    model, has_eight = place.model, place.model.n_expert == _EIGHT_EXPERTS
    embedding, more, output = _MORE_OF_LOW[kind.name]
    match role:
        case _Role.EMBEDDING:
            return embedding
        case _Role.VALUE:
            return T.Q4_K if model.group >= 4 or model.n_expert >= 4 else more
        case _Role.KEY if has_eight:
            return T.Q4_K
        case _Role.DOWN if place.is_early:
            return more
        case _Role.ATTENTION_OUTPUT:
            return T.Q5_K if has_eight else output or kind.type
    return kind.type


def _by_role(role: _Role, place: _Place, kind: FileType) -> IntEnum:
    model = place.model
    if model.n_expert == _EIGHT_EXPERTS and role in (_Role.VALUE, _Role.KEY):
        return T.Q8_0
    if model.n_expert == _EIGHT_EXPERTS and role is _Role.ATTENTION_OUTPUT:
        return T.Q5_K if kind.name in _EIGHT_EXPERTS_OUTPUT else kind.type
    rule = _RULES.get((kind.name, role))
    chosen = (rule(place) if callable(rule) else rule) or kind.type
    shared_values = model.n_layer == _MANY_LAYERS and model.n_head != model.n_head_kv
    if role is _Role.VALUE and shared_values and chosen in (T.Q3_K, T.Q4_K):
        return T.Q5_K
    return chosen


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


# --- fallbacks -------------------------------------------------------------------------------------------------------

_FALLBACK: dict[IntEnum, IntEnum] = {
    T.Q2_K: T.Q4_0, T.Q3_K: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0, T.TQ1_0: T.Q4_0, T.TQ2_0: T.Q4_0,
    T.NVFP4: T.IQ4_NL,
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
}  # fmt: skip


def _fitting(kind: IntEnum, width: int) -> IntEnum:
    for candidate in (kind, _FALLBACK.get(kind, kind)):
        if width % block_size(candidate) == 0:
            return candidate
    return T.F16
