"""Keys of tiny files for the tests of a skeleton."""

from __future__ import annotations

from typing import Any

from llamacli.testing.scaffold.declarations import Declarations
from llamacli.testing.scaffold.description import Description
from llamacli.testing.tiny import KEYS

_TINY = {"feed_forward_length": 32, "expert_count": 8, "expert_used": 2, "sliding_window": 8, "rank": 16, "inner": 64}
"""Sizes of tiny files, by a part of the key."""


def tiny_keys(declarations: Declarations) -> dict[str, Any]:
    """Keys of tiny files: sizes are made small, everything else is kept."""
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
    """Number of layers that shows each kind of block."""
    kinds = [description.names(i) for i in range(description.n_layer)]
    last_new = max((i for i, kind in enumerate(kinds) if kind not in kinds[:i]), default=0)
    intervals = [v for k, v in description.keys.items() if "interval" in k and type(v) is int]
    return min(8, max(2, last_new + 1, *intervals, 0))
