"""Embeddings, positions and bidirectional spans, against llama.cpp and themselves."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import tiny_variants
from input_cases import AFTER, BEFORE, CASES, WHOLE
from llamacli import ContextOverflowError, EmbeddingModelError, Graph, Inputs, InvalidRequestError, Model, load_model
from llamacli.engine import Chunk, Engine, ReferenceEngine, default_engine, evaluate
from llamacli.inputs import Contents
from llamacli.kv import N_BATCH, KVSequence, PrefixIndex, snapshot
from llamacli.ops.attention import Attention
from oracle.goldens import DIRECTORY, TOKENS, nmse, sha256
from tiny_variants import VARIANTS

GOLDENS = np.load(DIRECTORY / "inputs.npz")
ENGINES = {"reference": ReferenceEngine, "native": lambda: default_engine(2)}
IMAGE, PHOTO, SPAN = CASES["qwen2vl in a grid"], CASES["gqa"], CASES["gqa both ways"]

Load = Callable[..., Model]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    models = []

    def load(variant: str, engine: Engine | None = None, **options: Any) -> Model:
        path = tmp_path / f"{variant}.gguf"
        if not path.exists():
            tiny_variants.write(path, variant, dequantized=True)
        models.append(load_model(path, "fp32", engine=engine or default_engine(2), **options))
        return models[-1]

    yield load
    for model in models:
        model.close()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


def sequence_of(model: Model, n: int = 256) -> KVSequence:
    return KVSequence(model.kv_pool("f32"), n)


def rows_of(model: Model, sequence: KVSequence, inputs: Inputs | list[int]) -> np.ndarray:
    """Logits of all tokens that continue a sequence."""
    return evaluate(model.program_with, [Chunk(sequence, inputs, n_last=len(inputs))])[0]


def both_ways(graph: Graph) -> Graph:
    """Graph with attention in both directions."""
    ops = [attrs.evolve(op, causal=False) if isinstance(op, Attention) else op for op in graph.ops]
    return graph.with_ops(ops)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_peer(name: str, engine: Engine, load: Load, tmp_path: Path) -> None:
    case = CASES[name]
    model = load(case.variant, engine)
    assert sha256(tmp_path / f"{case.variant}.gguf") == str(GOLDENS[f"{name} sha256"])
    logits = rows_of(model, sequence_of(model), case.inputs(model.config.n_embd))[-1 - len(AFTER) :]
    assert nmse(GOLDENS[name], logits) <= max(1e-8, VARIANTS[case.variant].exact)


def test_logits_of_attention_in_both_directions_are_those_of_the_peer(engine: Engine, load: Load) -> None:
    model = load(WHOLE, engine, transform=both_ways)
    assert nmse(GOLDENS["whole"], model.logits(BEFORE)) <= 1e-8


@pytest.mark.parametrize("case", [IMAGE, PHOTO, SPAN], ids=["grid", "embeddings", "span"])
def test_pieces_give_the_same_bits(case: Any, engine: Engine, load: Load) -> None:
    model = load(case.variant, engine)
    whole, contents = case.inputs(model.config.n_embd), Contents()
    keys = contents.add(whole)
    expected, sequence, found = rows_of(model, sequence_of(model), whole), sequence_of(model), []
    for start, stop in ((0, 3), (3, 7), (7, 19), (19, 20), (20, 26)):
        found.append(rows_of(model, sequence, contents.slice(keys, start, stop)))
    np.testing.assert_array_equal(np.concatenate(found), expected)
    assert sequence.tokens == keys


def test_rest_of_a_span_follows_its_shared_beginning(engine: Engine, load: Load) -> None:
    model = load(SPAN.variant, engine)
    contents, sequence = Contents(), sequence_of(model)
    keys = contents.add(SPAN.inputs(model.config.n_embd))
    expected = rows_of(model, sequence, contents.slice(keys))
    sequence.truncate(12)
    np.testing.assert_array_equal(rows_of(model, sequence, contents.slice(keys, 12)), expected[12:])


@pytest.mark.parametrize("case", [IMAGE, PHOTO, SPAN], ids=["grid", "embeddings", "span"])
def test_sequences_of_all_kinds_in_one_batch(case: Any, load: Load) -> None:
    model = load(case.variant)
    inputs, ids = case.inputs(model.config.n_embd), TOKENS[:20].tolist()
    image, text = rows_of(model, sequence_of(model), inputs), rows_of(model, sequence_of(model), ids)
    work = (ids, inputs, ids, inputs)
    chunks = [Chunk(sequence_of(model), one, n_last=len(one)) for one in work]
    for rows, expected in zip(evaluate(model.program_with, chunks), (text, image) * 2, strict=True):
        np.testing.assert_array_equal(rows, expected)
    chunks = [Chunk(sequence_of(model), one, n_last=n) for one, n in zip(work, (1, 3, 0, 1), strict=True)]
    last = evaluate(model.program_with, chunks)
    for rows, expected in zip(last, (text[-1:], image[-3:], text[:0], image[-1:]), strict=True):
        np.testing.assert_array_equal(rows, expected)


def test_spans_are_not_cut_between_batches(load: Load) -> None:
    model = load("gqa")
    text = np.random.RandomState(1).randint(0, 128, N_BATCH - 5).tolist()
    rows = np.random.RandomState(2).normal(size=(N_BATCH, 64)).astype(np.float32)
    ids = [*text, *[0] * 20, 7]
    inputs = Inputs.of(
        ids, embeddings=rows[:20], rows=range(len(text), len(text) + 20), spans=[(len(text), len(ids) - 1)]
    )
    expected, sequence, contents = (
        rows_of(model, sequence_of(model, 2048), inputs),
        sequence_of(model, 2048),
        Contents(),
    )
    keys = contents.add(inputs)
    for start, stop in ((0, len(text)), (len(text), len(ids))):
        np.testing.assert_array_equal(rows_of(model, sequence, contents.slice(keys, start, stop)), expected[start:stop])
    too_long = Inputs.of([1] * (N_BATCH + 1), spans=[(0, N_BATCH + 1)])
    with pytest.raises(InvalidRequestError, match=rf"span of tokens 0 to {N_BATCH} is longer than a batch"):
        rows_of(model, sequence, too_long)
    assert sequence.tokens == keys


def test_ids_in_the_place_of_embeddings_are_not_read(engine: Engine, load: Load) -> None:
    model = load("gemma4_e", engine)
    rows = PHOTO.embeddings(model.config.n_embd)
    one, other = (rows_of(model, sequence_of(model), Inputs.of([i] * len(rows), embeddings=rows)) for i in (3, 9))
    np.testing.assert_array_equal(one, other)


def test_looked_up_rows_as_embeddings_give_the_same_bits(engine: Engine, load: Load) -> None:
    model = load("gqa", engine)
    embedding = model.program.graph.embedding
    assert embedding is not None
    ids = TOKENS[:9].tolist()
    reference = load("gqa", ReferenceEngine()).program
    rows = reference.weights[embedding.table][ids]  # type: ignore[attr-defined]
    expected = rows_of(model, sequence_of(model), ids)
    np.testing.assert_array_equal(rows_of(model, sequence_of(model), Inputs.of(embeddings=rows)), expected)


def test_given_positions_that_are_the_default_change_nothing(engine: Engine, load: Load) -> None:
    model, ids = load("qwen2vl_yarn", engine), TOKENS[:9].tolist()
    expected = rows_of(model, sequence_of(model), ids)
    for positions in (np.arange(9), np.repeat(np.arange(9)[:, None], 3, 1)):
        np.testing.assert_array_equal(rows_of(model, sequence_of(model), Inputs.of(ids, positions=positions)), expected)


def test_positions_beyond_the_context_are_relative(engine: Engine, load: Load) -> None:
    model, ids = load("gqa", engine), TOKENS[:9].tolist()
    far = rows_of(model, sequence_of(model, 16), Inputs.of(ids, positions=np.arange(9) + 3000))
    near = rows_of(model, sequence_of(model, 16), ids)
    np.testing.assert_allclose(far, near, atol=2e-3)
    gap = rows_of(model, sequence_of(model, 16), Inputs.of(ids, positions=[*range(4), *range(40, 45)]))
    assert not np.allclose(gap[-1], near[-1], atol=2e-2)


@pytest.mark.parametrize(
    ("variant", "arguments", "message"),
    [
        ("gqa", {"embeddings": np.zeros((2, 63))}, "rows of 63 numbers, and the model has embeddings of 64"),
        ("gqa", {"ids": [1, 1000]}, "token 1000 is not an id from 0 to"),
        ("gqa", {"ids": [1], "positions": [(0, 0, 0)]}, "positions have 3 components, and the model has one"),
        ("gemma3", {"ids": [1, 2], "positions": [0, 2]}, "not supported by a model with sliding windows"),
        ("gpt2", {"ids": [1, 2], "positions": [0, 5000]}, "position 5000 is beyond the"),
    ],
)
def test_inputs_that_a_model_cannot_compute(variant: str, arguments: dict[str, Any], message: str, load: Load) -> None:
    model = load(variant)
    sequence = sequence_of(model)
    rows_of(model, sequence, [3, 4])
    with pytest.raises(InvalidRequestError, match=message):
        rows_of(model, sequence, Inputs.of(**{"ids": None} | arguments))
    assert sequence.tokens == [3, 4]


class TestCache:
    """Content keys in the KV cache."""

    def test_equal_contents_share_cells(self, load: Load) -> None:
        model = load("qwen2vl")
        index, first, other = PrefixIndex(model.kv_pool("f32")), sequence_of(model), sequence_of(model)
        rows_of(model, first, IMAGE.inputs(model.config.n_embd))
        index.add(first)
        keys = IMAGE.inputs(model.config.n_embd).keys
        assert index.reuse(other, keys) == len(keys) - 1
        rows = IMAGE.embeddings(model.config.n_embd)
        rows[5] += 1
        third = sequence_of(model)
        keys = Inputs.of([*BEFORE, *[0] * len(rows)], embeddings=rows, rows=range(7, 7 + len(rows))).keys
        assert index.reuse(third, keys) == 7

    def test_saved_states_have_the_keys(self, load: Load) -> None:
        model = load("qwen2vl")
        contents, sequence, restored = Contents(), sequence_of(model), sequence_of(model)
        keys = contents.add(IMAGE.inputs(model.config.n_embd))
        expected = rows_of(model, sequence, contents.slice(keys))
        arrays, saved = contents.save(keys)
        state = snapshot.load(snapshot.dump({0: sequence}, arrays=arrays, contents=saved), sequence.pool)
        state.restore({0: restored})
        assert restored.tokens == keys
        loaded = Contents.load(state.arrays, state.extra["contents"], keys)
        restored.truncate(20)
        np.testing.assert_array_equal(rows_of(model, restored, loaded.slice(keys, 20)), expected[20:])

    @pytest.mark.parametrize("case", [IMAGE, SPAN], ids=["positions", "span"])
    def test_tokens_cannot_be_moved(self, case: Any, load: Load) -> None:
        model = load(case.variant)
        sequence = sequence_of(model)
        rows_of(model, sequence, case.inputs(model.config.n_embd))
        tokens = list(sequence.tokens)
        with pytest.raises(InvalidRequestError, match="tokens with explicit positions, or that attend to each other"):
            sequence.remove(0, 2, lambda layer, keys: keys)
        assert sequence.tokens == tokens

    @pytest.mark.parametrize("case", [IMAGE, SPAN], ids=["positions", "span"])
    def test_tokens_cannot_be_copied_behind_others(self, case: Any, load: Load) -> None:
        model = load(case.variant)
        sequence, other, same = sequence_of(model), sequence_of(model), sequence_of(model)
        rows_of(model, sequence, case.inputs(model.config.n_embd))
        rows_of(model, other, [1, 1])
        rows_of(model, same, BEFORE[:2])
        with pytest.raises(InvalidRequestError, match="tokens with explicit positions, or that attend to each other"):
            other.copy(sequence, 2, 20)
        assert other.tokens == [1, 1]
        same.copy(sequence, 2, 20)
        assert same.tokens == sequence.tokens[:20]

    def test_embeddings_can_be_moved(self, load: Load) -> None:
        model = load("gqa", ReferenceEngine())
        sequence = sequence_of(model)
        inputs = PHOTO.inputs(model.config.n_embd)
        rows_of(model, sequence, inputs)
        sequence.remove(0, 2, lambda layer, keys: model.program.shift_keys(layer, keys, 2, 256))
        assert sequence.tokens == inputs.keys[2:]


class TestLogits:
    """Model.logits."""

    def test_are_those_of_a_session(self, load: Load) -> None:
        model = load("gqa")
        with model.create_session() as session:
            np.testing.assert_array_equal(model.logits(BEFORE), session.eval(BEFORE, all_logits=True))

    def test_of_no_tokens(self, load: Load) -> None:
        model = load("gqa")
        assert model.logits([]).shape == (0, model.config.n_vocab)

    def test_limits(self, load: Load) -> None:
        model, whole = load("gqa"), load("gqa", transform=both_ways)
        model.config.n_ctx = whole.config.n_ctx = 1024
        with pytest.raises(ContextOverflowError):
            model.logits([1] * 1025)
        with pytest.raises(InvalidRequestError, match=f"attends in both directions and takes at most {N_BATCH}"):
            whole.logits([1] * (N_BATCH + 1))
        with pytest.raises(InvalidRequestError, match="token 5000 is not an id"):
            model.logits([5000])

    def test_without_an_output_layer(self, load: Load) -> None:
        model = load("gqa", transform=lambda graph: graph.without_output())
        with pytest.raises(EmbeddingModelError, match="has no logits"):
            model.logits([1])
