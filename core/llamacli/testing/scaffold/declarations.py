"""Code of skeletons: configuration and tensors of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamacli.parts import COMMON_KEYS, base_name
from llamacli.testing.scaffold.description import Description

_REQUIRED = {
    "context_length": "context_length", "embedding_length": "n_embd", "block_count": "n_layer",
    "attention.head_count": "n_head", "attention.head_count_kv": "n_head_kv", "feed_forward_length": "n_ff",
}  # fmt: skip
"""Keys that `Config.from_gguf` demands as integers, with its fields."""

_PREFERRED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"token_embd|output", ("c.n_vocab", "c.n_embd")),
    (r"position_embd", ("c.context_length", "c.n_embd")),
    (r"attn_q", ("n_q|2 * n_q", "c.n_embd")),
    (r"attn_[kv]", ("n_kv", "c.n_embd")),
    (r"attn_qkv", ("n_q + 2 * n_kv", "c.n_embd")),
    (r"attn_output", ("c.n_embd", "n_q")),
    (r"attn_[qk]_norm", ("c.head_dim|n_q|n_kv",)),
    (r"attn_sinks", ("c.n_head",)),
    (r"ffn_gate_inp", ("c.n_expert", "c.n_embd")),
    (r"ffn_(gate|up)_exps", ("c.n_expert", "c.expert_feed_forward_length|c.n_ff", "c.n_embd")),
    (r"ffn_down_exps", ("c.n_expert", "c.n_embd", "c.expert_feed_forward_length|c.n_ff")),
    (r"ffn_(gate|up)_shexp", ("c.expert_shared_feed_forward_length|c.expert_feed_forward_length|c.n_ff", "c.n_embd")),
    (r"ffn_down_shexp", ("c.n_embd", "c.expert_shared_feed_forward_length|c.expert_feed_forward_length|c.n_ff")),
    (r"ffn_(gate|up)", ("c.n_ff|2 * c.n_ff", "c.n_embd")),
    (r"ffn_down", ("c.n_embd", "c.n_ff")),
    (r"rope_freqs", ("c.rope.n_dims // 2",)),
)
"""Sizes to be preferred where several are equal: names, and the expressions for each axis."""


_OF_LAYERS = re.compile(r"block|dense|interval|layer|pattern|period")
"""Words of keys that choose layers; numbers of other keys may be equal by chance."""


class Declarations:
    """Code of a model's configuration and tensors.

    Shapes are written in terms of the configuration, conditions on layers in terms of its keys.

    - `own`: fields of the keys that the family reads itself. `sizes`: known sizes by the expression for them.
    - `has_rope`: false with learned positions, or with no rotated dimensions.
    - `layer_norm`: true if norms are layer norms.
    """

    def __init__(self, description: Description, class_name: str):
        self.description, self._class = description, class_name
        keys = description.keys
        self.own = {
            key: re.sub(r"\W", "_", key) for key in keys if self._is_own(key) and not key.startswith("tokenizer.")
        }
        self.has_rope = "position_embd.weight" not in description.shapes and keys.get("rope.dimension_count") != 0
        self.layer_norm = "attention.layer_norm_epsilon" in keys
        self.n_layer = description.n_layer
        self.sizes = self._known_sizes()

    def _is_own(self, key: str) -> bool:
        """True for keys that `Config.from_gguf` does not read as they are."""
        value = self.description.keys[key]
        if key == "attention.value_length":
            return bool(value != self.description.keys.get("attention.key_length", value))
        return key not in COMMON_KEYS or self._is_by_layer(value)

    def _is_by_layer(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) == self.description.n_layer

    def _int(self, key: str, default: int) -> int:
        value = self.description.keys.get(key, default)
        return max(value) if isinstance(value, list) else int(value)

    def _known_sizes(self) -> dict[str, int]:
        n_embd = self._int("embedding_length", 1)
        n_head = max(1, self._int("attention.head_count", 1))
        n_head_kv = max(1, self._int("attention.head_count_kv", n_head))
        head_dim = self._int("attention.key_length", n_embd // n_head)
        n_q, n_kv, n_ff = n_head * head_dim, n_head_kv * head_dim, self._int("feed_forward_length", 0)
        sizes = {
            "c.n_embd": n_embd, "c.n_ff": n_ff, "n_q": n_q, "n_kv": n_kv, "c.head_dim": head_dim,
            "c.n_vocab": self.description.shapes.get("token_embd.weight", (0,))[0],
            "c.n_expert": self._int("expert_count", 0),
        }  # fmt: skip
        own = {field: self.description.keys[key] for key, field in self.own.items()}
        numbers = {f"c.{field}": value for field, value in own.items() if type(value) is int and value > 1}
        sizes |= numbers | {"c.n_head": n_head, "c.n_head_kv": n_head_kv}
        sizes |= {"c.context_length": self._int("context_length", 0)}
        sizes |= {"n_q + 2 * n_kv": n_q + 2 * n_kv, "2 * c.n_ff": 2 * n_ff, "2 * n_q": 2 * n_q}
        rope_dims = self._int("rope.dimension_count", head_dim)
        sizes |= {"c.rope.n_dims // 2": rope_dims // 2} if self.has_rope else {}
        sizes |= {f"2 * {name}": 2 * size for name, size in numbers.items()}
        names = list(numbers)
        sizes |= {f"{a} * {b}": numbers[a] * numbers[b] for i, a in enumerate(names) for b in names[i:]}
        return {name: size for name, size in sizes.items() if size > 0}

    def _expression(self, size: int, name: str, axis: int) -> str:
        for pattern, preferred in _PREFERRED:
            if re.fullmatch(pattern, name) and axis < len(preferred):
                found = next((text for text in preferred[axis].split("|") if self.sizes.get(text) == size), None)
                if found:
                    return found
        rare = ("c.n_vocab", "c.context_length")  # sizes of tables alone
        return next((text for text, value in self.sizes.items() if value == size and text not in rare), str(size))

    def _shape(self, name: str, shape: Sequence[int]) -> str:
        base = base_name(name)
        return "".join(f", {self._expression(size, base, axis)}" for axis, size in enumerate(shape))

    def _shape_in_blocks(self, name: str) -> str:
        """Shape of a tensor in block `i`; differing sizes are looked up."""
        shapes = {i: self.description.shapes[f"blk.{i}.{name}"] for i in sorted(self.description.layers(name))}
        texts = []
        for axis in range(len(next(iter(shapes.values())))):
            sizes = {i: shape[axis] for i, shape in shapes.items()}
            alike = len(set(sizes.values())) == 1
            size = next(iter(sizes.values()))
            texts.append(self._expression(size, base_name(name), axis) if alike else self._size_by_block(sizes))
        return "".join(f", {text}" for text in texts)

    def _size_by_block(self, sizes: Mapping[int, int]) -> str:
        candidates: dict[str, dict[int, Any]] = {}
        head_dim, n_q = self.sizes.get("c.head_dim", 1), self.sizes.get("n_q", 0)
        for key, field in self.own.items():
            value = self.description.keys[key]
            if self._is_by_layer(value) and type(value[0]) is int:
                item = f"c.{field}[i]"
                for text, factor, start in (
                    (item, 1, 0), (f"{item} * c.head_dim", head_dim, 0), (f"2 * {item}", 2, 0),
                    (f"n_q + 2 * {item} * c.head_dim", 2 * head_dim, n_q),
                ):  # fmt: skip
                    candidates[text] = {i: start + factor * value[i] for i in sizes}
        return next((text for text, found in candidates.items() if found == dict(sizes)), f"{dict(sizes)}[i]")

    # --- configuration

    def fields(self) -> Iterator[str]:
        """Fields of the configuration that are the family's own."""
        for key, field in self.own.items():
            yield f"    {field}: {_type(self.description.keys[key])}"
        if self.has_rope:
            yield "    rope: Rope"
        elif not self.own:
            yield "    pass"

    def configure(self) -> Iterator[str]:
        """Body of `configure`."""
        indent = " " * 8
        if any(self._is_by_layer(value) for value in self.description.keys.values()):
            quoted = 'f"{self.name}.block_count"'
            yield f"{indent}n_layer = metadata.get_int({quoted}, minimum=1, maximum=1 << 10)"
        yield f"{indent}common = {{"
        for key, field in _REQUIRED.items():
            value = self.description.keys.get(key)
            if isinstance(value, list):
                yield f'{indent}    "{field}": max(1, *{self._getter(key)}),'
            elif value == 0:  # such files have no attention, or no network
                yield f'{indent}    "{field}": max(1, metadata.get_int(f"{{self.name}}.{key}", minimum=0)),'
            elif value is None and key != "attention.head_count_kv":
                yield f'{indent}    "{field}": {self._missing(field)},  # the file has no {key}'
        if "attention.value_length" in self.own:
            yield f'{indent}    "head_dim": metadata.get_int(f"{{self.name}}.attention.key_length", minimum=1),'
        if self.layer_norm:
            quoted = 'f"{self.name}.attention.layer_norm_epsilon"'
            yield f'{indent}    "layer_norm_eps": metadata.get_float({quoted}, minimum=0.0, maximum=1.0),'
        yield f"{indent}}}"
        if self.has_rope:
            yield f"{indent}head_dim = Config.from_gguf(metadata, **common).head_dim"
        yield f"{indent}return {self._class}Config.from_gguf("
        yield f"{indent}    metadata,"
        yield f"{indent}    **common,"
        for key, field in self.own.items():
            yield f"{indent}    {field}={self._getter(key)},"
        if self.has_rope:
            yield f"{indent}    # interleaved: True for llama.cpp's NORM, False for its NEOX and for rotate_half"
            pairs = not self.description.rotates_halves
            yield f"{indent}    rope=Rope.from_gguf(metadata, self.name, head_dim, interleaved={pairs}),"
        yield f"{indent})"

    def _missing(self, field: str) -> int:
        shapes = self.description.shapes
        found = {"n_ff": shapes.get("blk.0.ffn_up.weight", (0,))[0], "context_length": 4096, "n_head": 1}
        return int(found.get(field, 1))

    def _getter(self, key: str) -> str:
        value = self.description.keys[key]
        quoted = f'f"{{self.name}}.{key}"'
        if isinstance(value, list):
            kind = type(value[0]).__name__ if value and isinstance(value[0], bool | float) else "int"
            length = "n_layer" if self._is_by_layer(value) else str(len(value))
            return f"metadata.get_{kind}s({quoted}, {length}{', minimum=0' if kind == 'int' else ''})"
        minimum = ", minimum=0" if type(value) is int else ""
        return f"metadata.get_{type(value).__name__}({quoted}{minimum})"

    # --- tensors

    def tensors(self) -> Iterator[str]:
        """Body of `tensors`."""
        indent = " " * 8
        yield f"{indent}c, table = config, TensorTable()"
        yield f"{indent}n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim"
        outside = [name for name in self.description.shapes if not name.startswith("blk.")]
        for name in outside:
            shape = self._shape(name, self.description.shapes[name])
            yield from _added(f"{indent}table", name, shape, frozenset(outside))
        if not self.n_layer:
            yield f"{indent}return table"
            return
        lines = list(self._block_tensors(f"{indent}    "))
        numbered = any(re.search(r"\bi\b", line) for line in lines)
        yield f"{indent}for {'i' if numbered else '_'} in range(c.n_layer):"
        yield f"{indent}    block = table.block()"
        yield from lines
        yield f"{indent}return table"

    def _block_tensors(self, indent: str) -> Iterator[str]:
        for condition, names in self.groups():
            if condition:
                yield f"{indent}if {condition}:"
            for name in names:
                have = self.description.names(min(self.description.layers(name)))
                table = f"{indent}{'    ' if condition else ''}block"
                yield from _added(table, name, self._shape_in_blocks(name), have)

    def groups(self) -> list[tuple[str, list[str]]]:
        """Conditions on layers, "" for all, with the tensors there."""
        names = dict.fromkeys(name.split(".", 2)[2] for name in self.description.shapes if name.startswith("blk."))
        groups: dict[frozenset[int], list[str]] = {}
        for name in names:
            groups.setdefault(self.description.layers(name), []).append(name)
        return [(self._condition(layers), found) for layers, found in groups.items()]

    def _condition(self, layers: frozenset[int]) -> str:
        n = self.n_layer
        if layers == frozenset(range(n)):
            return ""
        candidates: dict[str, list[Any]] = {}
        for key, field in sorted(self.own.items(), key=lambda item: not _OF_LAYERS.search(item[0])):
            value = self.description.keys[key]
            if self._is_by_layer(value):
                candidates |= {f"c.{field}[i]": value, f"not c.{field}[i]": [not item for item in value]}
            elif type(value) is int and value > 0:
                candidates |= {
                    f"i < c.{field}": [i < value for i in range(n)],
                    f"i >= c.{field}": [i >= value for i in range(n)],
                    f"(i + 1) % c.{field} == 0": [(i + 1) % value == 0 for i in range(n)],
                    f"(i + 1) % c.{field} != 0": [(i + 1) % value != 0 for i in range(n)],
                }
        for period in range(2, 9):
            for rest in range(period):
                candidates[f"i % {period} == {rest}"] = [i % period == rest for i in range(n)]
                candidates[f"i % {period} != {rest}"] = [i % period != rest for i in range(n)]
        fitting = (text for text, holds in candidates.items() if {i for i in range(n) if holds[i]} == layers)
        return next(fitting, f"i in {sorted(layers)}")


def _added(table: str, name: str, shape: str, have: frozenset[str]) -> Iterator[str]:
    """Line that adds a tensor, a bias with its weight."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem and "." not in stem:
        yield f'{table}.add("{stem}"{shape}{", needs_bias=True" if f"{stem}.bias" in have else ""})'
    elif kind != "bias" or "." in stem or f"{stem}.weight" not in have:
        yield f'{table}.add_tensor("{name}"{shape})'


def _type(value: Any) -> str:
    if isinstance(value, list):
        return f"tuple[{type(value[0]).__name__ if value else 'int'}, ...]"
    return type(value).__name__
