"""Saved states: damaged ones, and forged ones with a right checksum."""

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import tiny_variants
from fuzz.mutations import NUMBERS, Edit, edited, edits
from fuzz.target import Target
from llamacli import load_model
from llamacli.plugins import Plugins
from paths import entry_points

_PREFIX = struct.Struct("<12sII")  # magic number, version, length of the JSON header
_DIGEST_BYTES = 32
_VALUES = st.one_of(
    st.sampled_from(NUMBERS), st.floats(), st.booleans(), st.none(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(-3, 20), st.lists(st.integers(-3, 20), max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
FORGERIES = st.lists(st.tuples(st.integers(0, 10_000), _VALUES), max_size=3)
"""Places among a header's values, and what is put there."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Containers and keys of all values within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *_places(inner))]


def forged_fields(fields: Any, forgeries: Sequence[tuple[int, Any]]) -> Any:
    """Copy of a JSON value in which some values are replaced."""
    fields = copy.deepcopy(fields)
    for place, value in forgeries:
        if places := _places(fields):
            container, key = places[place % len(places)]
            container[key] = value
    return fields


def forged(state: bytes, header: Sequence[tuple[int, Any]], payload: Sequence[Edit]) -> bytes:
    """Forge a state: header values replaced, payload edited, right checksum."""
    magic, version, length = _PREFIX.unpack_from(state)
    text = json.dumps(forged_fields(json.loads(state[_PREFIX.size : _PREFIX.size + length]), header)).encode()
    body = edited(state[_PREFIX.size + length : -_DIGEST_BYTES], payload)
    content = _PREFIX.pack(magic, version, len(text)) + text + body
    return content + hashlib.sha256(content).digest()


def _start(folder: Path) -> Callable[[tuple[str, list[Edit], list[tuple[int, Any]], list[Edit]]], None]:
    plugins = Plugins(entry_points())
    models, states = {}, {}
    for name in ("gqa", "gemma4", "mamba"):
        models[name] = load_model(tiny_variants.write(folder / f"{name}.gguf", name), threads=1, plugins=plugins)
        with models[name].create_session(reuse=False) as session:
            session.eval(list(range(1, 40)))
            states[name] = session.save_state()

    def load(case: tuple[str, list[Edit], list[tuple[int, Any]], list[Edit]]) -> None:
        name, damage, header, payload = case
        state = edited(states[name], damage) if damage else forged(states[name], header, payload)
        with models[name].create_session(reuse=False) as session:
            session.eval([5, 6])
            before = session.tokens
            try:
                session.load_state(state)
            except BaseException:
                assert session.tokens == before
                session.eval([7])
                raise
            if session.n_past < session.n_ctx:
                session.eval([7])
                list(session.generate([], max_tokens=1))

    for name in models:
        load((name, [], [], []))
    return load


_RAW = ("bit", "byte", "cut", "drop", "repeat")
STATES = Target(
    cases=st.tuples(
        st.sampled_from(["gqa", "gemma4", "mamba"]),
        st.one_of(st.just([]), st.just([]), edits(_RAW, 3)),
        FORGERIES,
        st.one_of(st.just([]), edits((*_RAW[:2], *_RAW), 3)),
    ),
    start=_start,
    per_process=5000,
)
"""Saved states of sessions."""
