"""Draft heads in files of their own: results, files of other models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_variants
from conftest import LoadTiny
from llamacli import (
    HeadDrafter,
    Inputs,
    InvalidRequestError,
    Model,
    ModelFormatError,
    MtpHead,
    PluginError,
    SamplingParams,
    load_model,
)
from llamacli.engine import Chunk, default_engine, evaluate
from llamacli.engine.heads import Head
from llamacli.generation.drafters import drafter_of
from llamacli.kv import KVSequence
from llamacli.ops.run import Span
from llamacli.plugins import Plugins
from llamacli.testing import formulas
from llamacli_qwen.dflash import DFlash
from oracle.goldens import DIRECTORY, TOKENS
from tiny_dflash import HEADS as BLOCK_HEADS
from tiny_eagle import HEADS, MODELS, write_eagle3
from tiny_gemma import CACHE_HEADS, write_assistant
from tiny_gemma import MODELS as CACHE_MODELS

N_TOKENS, N_DRAFT = 24, 6

WriteHead = Callable[..., Path]


@pytest.fixture
def write_head(tmp_path: Path) -> WriteHead:
    """Write a head: `write_head(**options)`."""
    return lambda **options: write_eagle3(tmp_path / "head.gguf", **options)


def head_of(model: Model, path: Path) -> Head:
    head = model.load_draft(path)
    assert isinstance(head, Head)
    return head


def passed(model: Model, tokens: list[int]) -> np.ndarray:
    """Values that the model passes of the tokens of a text."""
    rows: list[np.ndarray] = []
    sequence = KVSequence(model.kv_pool(), len(tokens))
    chunk = Chunk(sequence, tokens, take_hidden=lambda _, __, states, ___, ____: rows.append(states))
    evaluate(model.program_with, [chunk])
    return np.concatenate(rows)


@pytest.mark.parametrize("name", HEADS)
def test_states_logits_and_drafts_are_those_of_llama_cpp(name: str, load_tiny: LoadTiny, write_head: WriteHead) -> None:
    (variant, options), (_, head_options, bound) = MODELS[name], HEADS[name]
    tokens = TOKENS[:N_TOKENS].tolist()
    with np.load(DIRECTORY / "heads.npz") as golden, load_tiny(variant, dequantized=True, **options) as model:
        expected = {field: golden[f"{name} {field}"] for field in ("features", "states", "logits", "passed", "draft")}
        head = head_of(model, write_head(**head_options))
        rows = passed(model, tokens[:-1])
        sequence = head.sequence(None)
        states = head.states(rows, sequence)
        found: list[np.ndarray] = []
        chunk = Chunk(
            sequence, tokens[1:], n_last=N_TOKENS - 1, hidden_in=states,
            take_hidden=lambda _, __, states, ___, ____: found.append(states),
        )  # fmt: skip
        logits = head.logits(evaluate(lambda _: head.program, [chunk])[0])
        with HeadDrafter(head, min_probability=0.0) as drafter:
            drafter.take_hidden(0, tokens[:10], rows[:10], 0)
            drafter.take_hidden(10, tokens[10:-1], rows[10:], 0)
            draft = drafter.draft(tokens, N_DRAFT)
    features = np.concatenate([rows[:, columns] for columns in head.columns], 1)
    assert formulas.nmse(features, expected["features"]) < bound
    assert formulas.nmse(states, expected["states"]) < bound
    assert formulas.nmse(found[0], expected["passed"]) < bound
    known = np.isfinite(expected["logits"])
    assert (np.isfinite(logits) == known).all()
    assert formulas.nmse(logits[known], expected["logits"][known]) < bound
    assert draft == expected["draft"].tolist()


@pytest.mark.parametrize("name", BLOCK_HEADS)
def test_blocks_are_those_of_llama_cpp(name: str, load_tiny: LoadTiny, tmp_path: Path) -> None:
    write, options, bound = BLOCK_HEADS[name]
    tokens = TOKENS[:N_TOKENS].tolist()
    with np.load(DIRECTORY / "heads.npz") as golden, load_tiny("gqa", dequantized=True, n_layer=3) as model:
        expected = {field: golden[f"{name} {field}"] for field in ("features", "states", "logits", "draft")}
        lattice = golden.get(f"{name} lattice")
        head = head_of(model, write(tmp_path / "head.gguf", **options))
        rows, sequence = passed(model, tokens[:-1]), head.sequence(None)
        states, (length, mask, is_causal, first) = head.states(rows, sequence), head.block
        injector = head.injector
        assert injector is not None
        evaluate(lambda _: injector, [Chunk(sequence, tokens[:-1], n_last=0, hidden_in=states)])
        block = Inputs.of([tokens[-1], *[mask] * (length - 1)], spans=[] if is_causal else [(0, length)])
        hidden: list[np.ndarray] = []
        take_hidden = lambda _, __, states, ___, ____: hidden.extend(states)  # noqa: E731
        chunk = Chunk(sequence, block, n_last=length, take_hidden=take_hidden)
        logits = head.logits(evaluate(lambda _: head.program, [chunk])[0])
        before = [tokens[-1], *expected["draft"].tolist()]
        biased = [
            head.biased(row, state, token, sequence)
            for row, state, token in zip(logits[first:], hidden[first:], before, strict=False)
        ]
        if lattice is None:
            logits[first:] = biased
        with HeadDrafter(head, min_probability=0.0) as drafter:
            drafter.take_hidden(0, tokens[:18], rows[:18], 0)
            drafter.take_hidden(18, [*tokens[18:-1], 7], np.concatenate([rows[18:], rows[:1]]), 1)
            drafts = [drafter.draft(tokens, n) for n in (length, 2, length)]
    assert formulas.nmse(np.concatenate([rows[:, part] for part in head.columns], 1), expected["features"]) < bound
    assert formulas.nmse(states, expected["states"]) < bound
    known = np.isfinite(expected["logits"])
    assert (np.isfinite(logits) == known).all()
    assert formulas.nmse(logits[known], expected["logits"][known]) < bound
    assert drafts[0] == drafts[2] == expected["draft"].tolist()
    assert len(drafts[1]) == 2
    if lattice is not None:
        expect_selected(lattice[1:], biased, before, bound)


def expect_selected(lattice: np.ndarray, rows: list[np.ndarray], before: list[int], bound: float) -> None:
    """Compare the logits of candidates with llama.cpp's lattice.

    A row of it has n candidates, and n rows of their logits, each behind a candidate of the place before.
    """
    n = round(np.sqrt(lattice.shape[1] + 0.25) - 0.5)
    at = 0
    for place, row in zip(lattice, rows, strict=True):
        candidates = place[:n].astype(int)
        assert sorted(candidates) == np.flatnonzero(np.isfinite(row)).tolist()
        scores = place[n:].reshape(n, n)[at]
        assert formulas.nmse(row[candidates], scores) < bound
        at = int(scores.argmax())
    assert len(before) == len(rows) + 1


@pytest.mark.parametrize("name", CACHE_HEADS)
def test_drafts_from_the_cache_are_those_of_llama_cpp(name: str, load_tiny: LoadTiny, tmp_path: Path) -> None:
    write, options, bound = CACHE_HEADS[name]
    tokens, given = TOKENS[:N_TOKENS].tolist(), list[tuple[Any, ...]]()
    with np.load(DIRECTORY / "heads.npz") as golden, load_tiny(CACHE_MODELS[name], dequantized=True) as model:
        expected = {field: golden[f"{name} {field}"] for field in ("states", "logits", "passed", "draft")}
        head = head_of(model, write(tmp_path / "head.gguf", **options))
        sequence = KVSequence(model.kv_pool(), 128)
        chunk = Chunk(sequence, tokens[:-1], take_hidden=lambda *arguments: given.append(arguments))
        evaluate(model.program_with, [chunk])
        states = rows = given[0][2]
        found: dict[str, list[np.ndarray]] = {"logits": [], "passed": []}
        for token in [tokens[-1], *expected["draft"][:-1].tolist()]:
            inputs = Inputs.of([token], positions=[[N_TOKENS - 1]])
            span = Span(sequence, N_TOKENS - 2, 1, rows[-1:], inputs)
            logits, rows = head.program.forward_with_hidden(inputs.ids, [span], [1])
            found["logits"].append(logits[0])
            found["passed"].append(rows[0])
        with HeadDrafter(head, min_probability=0.0) as drafter:
            drafter.take_hidden(*given[0])
            drafts = [drafter.draft(tokens, n) for n in (N_DRAFT, 2, N_DRAFT)]
            assert drafter.draft(tokens[:-2], 2) == drafter.draft([*tokens, 1], 2) == []
        sequence.close()
    assert formulas.nmse(states, expected["states"]) < bound
    for field, values in found.items():
        assert formulas.nmse(np.array(values), expected[field][: len(values)]) < bound
    assert drafts[0] == drafts[2] == expected["draft"][:N_DRAFT].tolist()
    assert drafts[1] == drafts[0][:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CACHE_HEADS)
def test_texts_are_those_without_drafts_from_the_cache(
    name: str, temperature: float, plugins: Plugins, tmp_path: Path
) -> None:
    write, options, _ = CACHE_HEADS[name]
    path, params = tiny_variants.write(tmp_path / "m.gguf", CACHE_MODELS[name]), SamplingParams(temperature=temperature)
    with load_model(path, plugins=plugins, engine=default_engine()) as model:
        expected, *_ = text(model, params)
        with HeadDrafter(head_of(model, write(tmp_path / "head.gguf", **options)), 4, min_probability=0.0) as drafter:
            ids, n_drafted, _ = text(model, params, drafter)
    assert ids == expected
    assert n_drafted > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Iterator[Model]:
    """Model of three layers, on kernels."""
    path = tiny_variants.write(tmp_path_factory.mktemp("heads") / "model.gguf", "gqa", n_layer=3)
    with load_model(path, plugins=plugins, engine=default_engine()) as model:
        yield model


def text(model: Model, params: SamplingParams, drafter: HeadDrafter | None = None) -> tuple[list[int], int, int]:
    """Generated ids, with the numbers of tokens drafted and accepted."""
    with model.create_session(seed=5, reuse=False) as session:
        session.drafter = drafter
        ids = [token.id for token in session.generate(TOKENS[:9].tolist(), params, max_tokens=60, ignore_eos=True)]
        return ids, session.stats.n_drafted, session.stats.n_accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head_options", [{}, {"own": ()}], ids=["own matrices", "shared matrices"])
def test_texts_are_those_without_drafts(
    temperature: float, head_options: dict[str, Any], model: Model, write_head: WriteHead
) -> None:
    params = SamplingParams(temperature=temperature)
    expected, *_ = text(model, params)
    with HeadDrafter(head_of(model, write_head(**head_options)), 4, min_probability=0.0) as drafter:
        ids, n_drafted, _ = text(model, params, drafter)
    assert ids == expected
    assert n_drafted > 0


@pytest.mark.parametrize("name", BLOCK_HEADS)
def test_texts_are_those_without_blocks(name: str, model: Model, tmp_path: Path) -> None:
    write, options, _ = BLOCK_HEADS[name]
    params = SamplingParams(temperature=1.0)
    expected, *_ = text(model, params)
    with HeadDrafter(head_of(model, write(tmp_path / "head.gguf", **options)), 4, min_probability=0.0) as drafter:
        ids, n_drafted, _ = text(model, params, drafter)
    assert ids == expected
    assert n_drafted > 0


def test_a_bias_of_another_width_is_refused(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, options, _ = BLOCK_HEADS["dspark"]
    monkeypatch.setattr(DFlash, "bias", lambda _, g, __, weights: g.embed(weights.markov_w1))
    with pytest.raises(PluginError, match=r"draft head 'dflash': bias must be as wide as the logits"):
        model.load_draft(write(tmp_path / "head.gguf", **options))


def copying(right: float) -> dict[str, np.ndarray]:
    """Tensors of a head that passes on the input of layer 2.

    Its block adds nothing. Where that layer adds little, the head's logits are near the model's; with `right` less than
    1, numbers of the state are dropped.
    """
    fuse = np.zeros((64, 3 * 64), np.float32)
    fuse[: int(64 * right), 128 : 128 + int(64 * right)] = np.eye(int(64 * right))
    zeros = {"attn_output": (64, 64), "ffn_down": (64, 96)}
    found = {f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()}
    return found | {"fc.weight": fuse, "output_norm.weight": np.ones(64, np.float32)}


def test_acceptance_follows_the_quality_of_the_head(tmp_path: Path, plugins: Plugins, write_head: WriteHead) -> None:
    """Model whose next token depends on the last one alone."""
    random = np.random.RandomState(3)
    follows = random.permutation(128)
    table = random.standard_normal((128, 64)).astype(np.float32)
    output = np.empty_like(table)
    output[follows] = table
    silent = {
        f"blk.{i}.{name}.weight": np.zeros(shape, np.float32)
        for i in range(3)
        for name, shape in (("attn_output", (64, 64)), ("ffn_down", (64, 96)))
    }
    tensors = silent | {
        "token_embd.weight": table,
        "output.weight": output,
        "output_norm.weight": np.ones(64, np.float32),
    }
    path = tiny_variants.write(tmp_path / "model.gguf", "gqa", n_layer=3, tensors=tensors)
    # The head reads the state of the token before, and the next one's embedding only through its block, which adds
    # nothing here: a right head's output layer goes two tokens ahead of the state.
    ahead = np.empty_like(table)
    ahead[follows[follows]] = table
    shares = []
    with load_model(path, plugins=plugins, engine=default_engine()) as model:
        expected, *_ = text(model, SamplingParams(temperature=0.0))
        for right in (1.0, 0.05, 0.0):
            head = head_of(model, write_head(tensors=copying(right) | {"output.weight": ahead}))
            with HeadDrafter(head, 1, min_probability=0.0) as drafter:
                ids, n_drafted, _ = text(model, SamplingParams(temperature=0.0), drafter)
            assert ids == expected
            assert n_drafted > 0
            with HeadDrafter(head, 1, min_probability=0.0) as drafter:
                rows, drafts = passed(model, expected), []
                for i in range(1, len(expected) - 1):
                    drafter.take_hidden(i - 1, expected[i - 1 : i], rows[i - 1 : i], 0)
                    drafts += drafter.draft(expected[: i + 1], 1)
            shares.append(np.mean(np.array(drafts) == expected[2:]))
    assert shares[0] == 1.0
    assert 0.1 < shares[1] < 0.9
    assert shares[2] < 0.1


def test_a_head_beside_the_models_own(tmp_path: Path, plugins: Plugins, write_head: WriteHead) -> None:
    path = tiny_variants.write(tmp_path / "m.gguf", "glm4_nextn")
    with load_model(path, plugins=plugins, engine=default_engine()) as model, MtpHead(model) as own:
        head = head_of(model, write_head(layers=(0, 1, 2)))
        rows = passed(model, TOKENS[:9].tolist())
        assert rows.shape[1] == head.n_passed == own.head.n_passed == 4 * 64
        assert own.head.states(rows, head.sequence(None)).shape == (9, 64)
        own.take_hidden(0, TOKENS[:9].tolist(), rows, 0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"n_model": 32}, r"states of 32 numbers, and those of the model 'tiny llama' have 64"),
    "another vocabulary": ({"tokenizer": "spm"}, r"'tiny eagle' has another vocabulary than the model 'tiny llama'"),
    "no such layer": ({"layers": (0, 1, 9)}, r"does not fit the model 'tiny llama': .* all of layers .*9"),
    "no matrices of its width": (
        {"own": ("output",), "n_embd": 32},
        r"'tiny eagle' has no token_embd.weight of its own .* 32 numbers; that of the model 'tiny llama' has 64",
    ),
    "a missing tensor": ({"without": ["fc.weight"]}, r"tensor fc\.weight is missing, expected \(64, 192\)"),
    "a tensor of another shape": (
        {"tensors": {"fc.weight": np.zeros((64, 128), np.float32)}},
        r"tensor fc\.weight has shape \(64, 128\), expected \(64, 192\)",
    ),
    "damaged weights": (
        {"tensors": {"fc.weight": np.full((64, 192), np.nan, np.float32)}}, r"'draft\.fc\.weight' has weights that"
    ),
    "ids of no tokens": ({"ids": np.arange(100, 140)}, r"tensor d2t has no ids of tokens"),
    "two layers": ({"layers": (0, 1)}, r"eagle3\.target_layers"),
    "two blocks": ({"metadata": {"eagle3.block_count": 2}}, r"eagle3\.block_count = 2, and such heads have one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused(case: str, model: Model, write_head: WriteHead) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ModelFormatError, match=message):
        model.load_draft(write_head(**options))


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"conv_group_size": 48}, {}, r"dflash\.conv_group_size = 48 does not divide the width 64"),
        ({"conv_kernel_size": 0}, {}, r"'dflash\.conv_kernel_size' is 0"),
        ({}, {"d2t": np.arange(40)}, r"head\.gguf: tensor d2t has shape \(40,\), expected \(128,\)"),
        (
            {}, {"blk.0.attn_conv_base": np.zeros((3, 64), np.float32)},
            r"tensor blk\.0\.attn_conv_base has shape \(3, 64\), expected \(2, 3, 64\)",
        ),
    ],
)  # fmt: skip
def test_a_selector_that_does_not_fit_is_refused(
    keys: dict[str, Any], tensors: dict[str, np.ndarray], message: str, model: Model, tmp_path: Path
) -> None:
    write, options, _ = BLOCK_HEADS["dflash2"]
    without = [name for name in options["without"] if name not in tensors]
    changed = {"keys": options["keys"] | keys, "tensors": tensors, "without": without}
    with pytest.raises(ModelFormatError, match=message):
        model.load_draft(write(tmp_path / "head.gguf", **options | changed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_model": 48}, r"no head of a model of 64 numbers"),
        ({"window": 11}, r"layer 0 does not fit the model's cache"),
        ({"head_dim": (16, 16)}, r"layer 2 does not fit the model's cache"),
        ({"window": 1}, r"gemma4-assistant\.attention\.sliding_window = 1 sees no cached token"),
        ({"without": ["nextn.pre_projection.weight"]}, r"tensor nextn\.pre_projection\.weight is missing"),
    ],
)
def test_a_head_of_another_cache_is_refused(
    options: dict[str, Any], message: str, load_tiny: LoadTiny, tmp_path: Path
) -> None:
    with load_tiny("gemma4") as model, pytest.raises(ModelFormatError, match=message):
        model.load_draft(write_assistant(tmp_path / "head.gguf", **options))


def test_a_head_is_no_model(write_head: WriteHead, plugins: Plugins) -> None:
    with pytest.raises(ModelFormatError, match=r"'eagle3' is a draft head, no model by itself"):
        load_model(write_head(), plugins=plugins)


def test_a_head_drafts_for_its_model_only(model: Model, load_tiny: LoadTiny, write_head: WriteHead) -> None:
    with drafter_of(head_of(model, write_head())) as drafter, load_tiny("gqa") as other:
        drafter.begin(model)
        with pytest.raises(InvalidRequestError, match=r"the draft head 'tiny eagle' is that of the model 'tiny llama'"):
            drafter.begin(other)


def test_a_draft_model_is_found_out(model: Model, tmp_path: Path) -> None:
    path = tiny_variants.write(tmp_path / "draft.gguf", "gqa", n_layer=1)
    with model.load_draft(path) as draft, drafter_of(draft) as drafter:
        assert isinstance(draft, Model)
        drafter.begin(model)
