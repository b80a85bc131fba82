"""Model files: GGUF headers, whole GGUF files, llama2.c checkpoints."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import gguf_builder as b
import test_llama2c
import tiny_variants
from adapters import write_adapter
from fuzz.mutations import Edit, Field, Fields, draw_edits, edited, edits, gguf_fields
from fuzz.target import Target
from llamacli import HeadDrafter, Model, TokenizerError, load_model
from llamacli.engine import Chunk, evaluate
from llamacli.engine.heads import Head
from llamacli.gguf.header import parse_header
from llamacli.kv import KVSequence
from llamacli.plugins import Plugins
from llamacli.quantization import FORMATS, TensorType
from paths import entry_points
from tiny_eagle import HEADS as TINY_HEADS
from tiny_eagle import MODELS as TINY_MODELS
from tiny_eagle import write_eagle3

BASES: dict[str, dict[str, Any]] = {
    "gqa": {"tokenizer": "spm"}, "q8_0": {}, "q4_k": {}, "moe_8_2": {}, "rope_yarn": {}, "phi3_long": {}, "gemma4": {},
    "deepseek2": {}, "mamba": {}, "rwkv7": {}, "qwen35": {}, "lfm2": {}, "gpt2": {}, "llama4": {}, "bert": {},
}  # fmt: skip
"""Options of the tiny models that are mutated, by variant."""

_HEADER_BYTES = 1 << 16
"""Bytes of a file that are kept for its header to be read, and some data."""


@functools.cache
def _base(name: str) -> tuple[bytes, Fields]:
    path = Path(f"{name}.gguf").resolve()
    data = tiny_variants.write(path, name, **BASES[name]).read_bytes()
    path.unlink()
    return data, gguf_fields(data)


@functools.cache
def _small_base() -> tuple[bytes, Fields]:
    """File with metadata of every type and a few tensors."""
    kinds = [kind for kind in b.Kind if kind is not b.Kind.ARRAY]
    values = {kind: "text" if kind is b.Kind.STRING else 1 for kind in kinds}
    pairs = [b.pair("general.architecture", b.Kind.STRING, "llama"), b.pair("general.alignment", b.Kind.U32, 32)]
    pairs += [b.pair(f"one.{kind.name}", kind, value) for kind, value in values.items()]
    pairs += [b.array_pair(f"some.{kind.name}", kind, [value] * 3) for kind, value in values.items()]
    tensors = [b.Tensor("a", [32, 4], type=TensorType.Q8_0), b.Tensor("b.weight", [3]), b.Tensor("c", [2, 2, 2, 2])]
    data = b.gguf_bytes(pairs, tensors)
    return data, gguf_fields(data)


@functools.cache
def _short_base(name: str) -> tuple[bytes, Fields]:
    data, fields = _base(name)
    return data[:_HEADER_BYTES], Fields.of(field for field in fields if field.stop <= _HEADER_BYTES)


def _read_header(case: tuple[str, list[Edit]]) -> None:
    """Parse a header, and read everything in it."""
    data, fields = _short_base(case[0]) if case[0] else _small_base()
    header = parse_header(edited(data, case[1], fields), "fuzz")
    for value in header.metadata.values():
        if not isinstance(value, bool | int | float | str):
            list(value)
    for info in header.tensors.values():
        assert info.n_bytes >= 0
        assert info.type in FORMATS


_RAW = ("bit", "byte", "cut", "drop", "repeat")
_NAMES = sorted(BASES)
_HEADER_KINDS = (*_RAW, "field", "field", "copy", "count", "length", "type", "dim", "offset", "letter", "value")
HEADERS = Target(
    cases=st.tuples(st.sampled_from(["", *_NAMES]), edits(_HEADER_KINDS)),
    draw=lambda chance: (chance.choice(_NAMES) if chance.random() < 0.2 else "", draw_edits(chance, _HEADER_KINDS)),
    start=lambda folder: _read_header,
    per_process=50_000,
)
"""Headers of GGUF files: most of a small one, one in five of a tiny model's."""


def use(model: Model) -> None:
    """Generate a token, and encode text."""
    with model.create_session() as session:
        tokens = [token for token in (1, 2, 3) if token < model.config.n_vocab]
        for token in session.generate(tokens, max_tokens=1):
            assert 0 <= token.id < model.config.n_vocab
        with contextlib.suppress(TokenizerError):  # some have no text
            model.tokenizer.decode(model.encode("Once upon a time"))


def _start_loading(folder: Path) -> Callable[[tuple[str, list[Edit]]], None]:
    plugins, path = Plugins(entry_points()), folder / "model.gguf"

    def load(case: tuple[str, list[Edit]]) -> None:
        data, fields = _base(case[0])
        path.write_bytes(edited(data, case[1], fields))
        with load_model(path, threads=1, plugins=plugins) as model:
            use(model)

    for name in BASES:
        if name not in tiny_variants.ENCODERS:
            load((name, []))  # kernels are compiled or loaded now
    return load


_MODEL_KINDS = (
    *_RAW[:2], "cut", "field", "copy", "value", "value", "value", "float", "float", "float", "type", "dim",
)  # fmt: skip
MODELS = Target(
    cases=st.tuples(st.sampled_from(_NAMES), edits(_MODEL_KINDS, 3)),
    draw=lambda chance: (chance.choice(_NAMES), draw_edits(chance, _MODEL_KINDS, 3)),
    start=_start_loading,
    per_process=5000,
    memory=8 << 30,
)
"""Whole models: load, generate a token, encode."""


def _start_adapters(folder: Path) -> Callable[[list[Edit]], None]:
    path, adapter = folder / "base.gguf", folder / "adapter.gguf"
    tiny_variants.write(path, "gqa")
    data = write_adapter(adapter, path).read_bytes()
    fields, model = gguf_fields(data), load_model(path, threads=1, plugins=Plugins(entry_points()))

    def load(changes: list[Edit]) -> None:
        adapter.write_bytes(edited(data, changes, fields))
        with model.create_session(adapters=[(model.load_adapter(adapter), 0.5)], reuse=False) as session:
            list(session.generate([1, 2, 3], max_tokens=1))

    load([])
    return load


_ADAPTER_KINDS = (*_RAW, "field", "copy", "value", "float", "float", "type", "dim", "letter")
ADAPTERS = Target(
    cases=edits(_ADAPTER_KINDS, 3),
    draw=lambda chance: draw_edits(chance, _ADAPTER_KINDS, 3),
    start=_start_adapters,
    per_process=10_000,
)
"""LoRA adapters: load one, and generate a token with it."""


def _start_heads(folder: Path) -> Callable[[list[Edit]], None]:
    name = next(iter(TINY_HEADS))
    variant, options = TINY_MODELS[name]
    base, path = tiny_variants.write(folder / "base.gguf", variant, **options), folder / "head.gguf"
    data = write_eagle3(path, **TINY_HEADS[name][1]).read_bytes()
    fields, model = gguf_fields(data), load_model(base, threads=1, plugins=Plugins(entry_points()))
    tokens, rows = list(range(1, 11)), []
    sequence = KVSequence(model.kv_pool(), len(tokens))
    chunk = Chunk(sequence, tokens[:-1], take_hidden=lambda _, __, states, ___, ____: rows.append(states.copy()))
    evaluate(model.program_with, [chunk])

    def load(changes: list[Edit]) -> None:
        path.write_bytes(edited(data, changes, fields))
        with contextlib.closing(model.load_draft(path)) as head:
            if isinstance(head, Head):
                with HeadDrafter(head, min_probability=0.0) as drafter:
                    drafter.take_hidden(0, tokens[:-1], rows[0], 0)
                    drafted = drafter.draft(tokens, 3)
                assert all(0 <= token < model.config.n_vocab for token in drafted)

    load([])
    return load


DRAFTS = Target(cases=edits(_ADAPTER_KINDS, 3), start=_start_heads, memory=8 << 30)
"""EAGLE-3 draft heads: load one beside its model, and draft."""


@functools.cache
def _checkpoints() -> list[bytes]:
    return [test_llama2c.v0(), test_llama2c.v0(shared=False), test_llama2c.v2(), test_llama2c.v2(group=16)]


_SIZES = [Field(at, at + 4, "value") for at in range(0, 36, 4)] + [Field(36, 37, "value"), Field(37, 41, "value")]
_CHECKPOINT_FIELDS = Fields.of([*_SIZES, *(Field(at, at + 4, "float") for at in range(256, 20_000, 400))])
_VOCABULARY_FIELDS = Fields.of(
    Field(at, at + 4, kind) for kind, start in (("value", 0), ("float", 4)) for at in range(start, 40, 4)
)


def _start_checkpoints(folder: Path) -> Callable[[tuple[int, list[Edit], list[Edit]]], None]:
    plugins, path, beside = Plugins(entry_points()), folder / "model.bin", folder / "tok270.bin"
    vocabulary = test_llama2c.vocabulary()

    def load(case: tuple[int, list[Edit], list[Edit]]) -> None:
        number, changes, others = case
        path.write_bytes(edited(_checkpoints()[number], changes, _CHECKPOINT_FIELDS))
        beside.write_bytes(edited(vocabulary, others, _VOCABULARY_FIELDS))
        with load_model(path, "fp32", threads=1, plugins=plugins) as model:
            use(model)

    for number in range(len(_checkpoints())):
        load((number, [], []))
    return load


_CHECKPOINT_KINDS = ("bit", "byte", "cut", "repeat", "field", "value", "float", "float")
_VOCABULARY_KINDS = (*_RAW, "field", "value", "float")
CHECKPOINTS = Target(
    cases=st.tuples(
        st.integers(0, 3), edits(_CHECKPOINT_KINDS, 3), st.one_of(st.just([]), edits(_VOCABULARY_KINDS, 3))
    ),
    draw=lambda chance: (
        chance.randrange(4),
        draw_edits(chance, _CHECKPOINT_KINDS, 3),
        draw_edits(chance, _VOCABULARY_KINDS, 3) if chance.random() < 0.5 else [],
    ),
    start=_start_checkpoints,
    per_process=10_000,
)
"""llama2.c checkpoints with their vocabulary."""
