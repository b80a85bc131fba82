"""Packed copies of weights: damaged ones, and indexes with a right checksum."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import tiny_variants
from fuzz.mutations import Edit, edited, edits
from fuzz.target import Target
from fuzz.targets.states import _RAW, FORGERIES, _places
from llamacli import load_model
from llamacli.engine.packed_copies import finish_copies, folder, writing
from llamacli.engine.packed_copies.format import DATA_START, PREFIX
from llamacli.errors import FileChangedError
from llamacli.plugins import Plugins
from paths import entry_points


def _forged(copy: bytes, changes: Sequence[tuple[int, Any]]) -> bytes:
    """Forge a copy: index values replaced, right checksum."""
    magic, _, start, _ = PREFIX.unpack_from(copy)
    index = json.loads(copy[start:])
    for place, value in changes:
        places = _places(index)
        container, key = places[place % len(places)]
        container[key] = value
    text = json.dumps(index).encode()
    prefix = PREFIX.pack(magic, hashlib.sha256(text).digest(), start, len(text))
    return prefix + copy[len(prefix) : start] + text


def _start(base: Path) -> Callable[[tuple[list[Edit], list[tuple[int, Any]]]], None]:
    model, plugins = tiny_variants.write(base / "model.gguf", "gqa", type="Q8_0"), Plugins(entry_points())
    writing.MIN_BYTES = 1
    folder.cache_folder = lambda: base / "cache"  # type: ignore[attr-defined]

    def logits() -> Any:
        with load_model(model, threads=1, plugins=plugins) as loaded:
            finish_copies()
            with loaded.create_session(reuse=False) as session:
                session.eval([1, 2, 3])
                return session.logits.copy()

    expected = logits()
    (path,) = (base / "cache" / "packed").glob("*.packed")
    whole = path.read_bytes()

    def load(case: tuple[list[Edit], list[tuple[int, Any]]]) -> None:
        damage, changes = case
        path.write_bytes(edited(whole, damage) if damage else _forged(whole, changes))
        np.testing.assert_array_equal(logits(), expected)

    load(([], []))
    return load


COPIES = Target(
    cases=st.one_of(st.tuples(edits(_RAW, 3), st.just([])), st.tuples(st.just([]), FORGERIES)),
    start=_start,
    per_process=1000,
)
"""Packed copies: whatever is in the cache folder, logits are the same."""


def _start_mapped(base: Path) -> Callable[[tuple[list[Edit], bool]], None]:
    model, plugins = tiny_variants.write(base / "model.gguf", "gqa", type="Q8_0"), Plugins(entry_points())
    writing.MIN_BYTES = 1
    folder.cache_folder = lambda: base / "cache"  # type: ignore[attr-defined]

    def logits(damage: Callable[[], object] = lambda: None) -> Any:
        with load_model(model, threads=1, plugins=plugins, load="map") as loaded, loaded.create_session() as session:
            session.eval([1, 2])
            damage()
            session.eval([3, 60])
            return session.logits.copy()

    logits()
    expected = logits()  # of the copy
    (path,) = (base / "cache" / "packed").glob("*.packed")
    whole, written = path.read_bytes(), path.stat()
    data = slice(DATA_START, PREFIX.unpack_from(whole)[2])

    def use(case: tuple[list[Edit], bool]) -> None:
        changes, unseen = case
        changed = (
            whole[: data.start] + edited(whole[data], changes) + whole[data.stop :]
            if unseen
            else edited(whole, changes)
        )

        def damage() -> None:
            with path.open("r+b") as file:
                file.write(changed)
                file.truncate(len(changed))
            if unseen:
                os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))

        path.write_bytes(whole)
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
        found = logits(damage)
        if unseen:
            assert found.shape == expected.shape
            try:
                found = logits()
            except FileChangedError:  # its sums are wrong, and it is deleted
                found = logits()
        np.testing.assert_array_equal(found, expected)

    return use


MAPPED = Target(
    cases=st.one_of(st.tuples(edits(("bit", "byte"), 3), st.just(True)), st.tuples(edits(_RAW, 3), st.just(False))),
    start=_start_mapped,
    per_process=500,
)
"""Packed copies that are overwritten or cut while they are mapped: the same logits, or an error.

Half of the cases change weights and keep the file's time: the engine computes with them, and the next load finds them
by their sums.
"""
