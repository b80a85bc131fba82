"""Multi-token-prediction heads: logits, KV cache, hidden states, broken files."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_variants
from conftest import LoadTiny, TinyGguf
from llamacli import (
    ClosedError,
    Config,
    Graph,
    InvalidRequestError,
    Model,
    ModelFormatError,
    MtpHead,
    OutOfMemoryError,
    PluginError,
    load_model,
)
from llamacli.architecture import Architecture, trace_nextn
from llamacli.engine import Chunk, Engine, Span, default_engine, evaluate
from llamacli.engine.heads import nextn_head
from llamacli.generation import mtp
from llamacli.generation.mtp import HeadContext
from llamacli.gguf import open_gguf
from llamacli.graph import Param, Tensor, Value
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.plugins import Plugins
from llamacli.quantization import dequantize
from llamacli.tensor_table import Params, Weights
from llamacli.testing import formulas

HEADS: dict[str, dict[str, Any]] = {
    "glm4_nextn": {"n_layer": 1},
    "glm4moe_nextn": {"n_layer": 1, "n_dense": 0},
    "deepseek2_nextn": {"n_layer": 1, "n_dense": 0},
    "bailing_nextn": {"n_layer": 1, "n_dense": 0},
    "exaone_moe_nextn": {
        "keys": tiny_variants.VARIANTS["exaone_moe_nextn"].options["keys"]
        | {"block_count": 1, "attention.sliding_window_pattern": 0}
    },
    "qwen35_nextn": {"n_layer": 1, "interval": 1},
    "qwen35moe_nextn": {"n_layer": 1, "interval": 1},
    "qwen3next_nextn": {"n_layer": 1, "interval": 1},
}
"""Variants with a head, and options of a model that has nothing but the head's block."""

N_TOKENS = 20


def arrays(path: Path) -> dict[str, np.ndarray]:
    with open_gguf(path) as file:
        return {
            name: dequantize(file.data(name), info.type).reshape(info.shape).copy()
            for name, info in file.tensors.items()
        }


def hidden_states(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Hidden states of a text, float32 [n, n_embd]."""
    sequence = KVSequence(model.kv_pool(), len(tokens))
    chunk = Chunk(sequence, list(tokens), n_last=len(tokens))
    return evaluate(model.program_with, [chunk], hidden=True)[0]


def before(states: np.ndarray) -> np.ndarray:
    """Hidden state before each token."""
    return np.concatenate([np.zeros_like(states[:1]), states[:-1]])


def head_logits(model: Model, tokens: Sequence[int], states: np.ndarray) -> np.ndarray:
    """Logits of the head after each token of a text."""
    program = model.nextn_program()
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f32")), len(tokens))
    chunk = Chunk(sequence, list(tokens), n_last=len(tokens), hidden_in=before(states))
    return evaluate(lambda _: program, [chunk])[0]


@pytest.mark.parametrize("matrices", [False, True], ids=["shared matrices", "own matrices"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_a_model_of_the_block(
    name: str, matrices: bool, tmp_path: Path, plugins: Plugins, engine: Engine
) -> None:
    """Compare the head with a model that has its block alone.

    The embeddings of that model are what the head makes of its two inputs, computed in NumPy.
    """
    tensors, tokens = arrays(tiny_variants.write(tmp_path / "a.gguf", name)), list(range(N_TOKENS))
    n_vocab, n_embd = tensors["token_embd.weight"].shape
    block = next(key for key in tensors if "nextn" in key).partition("nextn")[0]
    if matrices:
        for i, kind in enumerate(("embed_tokens", "shared_head_head")):
            random_matrix = np.random.default_rng(i).normal(0, 0.1, (n_vocab, n_embd))
            tensors[f"{block}nextn.{kind}.weight"] = random_matrix.astype(np.float32)
    path = tiny_variants.write(tmp_path / "b.gguf", name, tensors=tensors)
    with load_model(path, "fp32", plugins=plugins, engine=engine) as model:
        eps, states = model.config.rms_eps, hidden_states(model, tokens)
        logits = head_logits(model, tokens, states)

    def part(*names: str) -> np.ndarray:
        return next(tensors[f"{name}.weight"] for name in names if f"{name}.weight" in tensors)

    head = f"{block}nextn."
    embedding = formulas.rms_norm(part(f"{head}embed_tokens", "token_embd")[tokens], part(f"{head}enorm"), eps)
    hidden = formulas.rms_norm(before(states), part(f"{head}hnorm"), eps)
    alone = {key.replace(block, "blk.0."): array for key, array in tensors.items() if key.startswith(block)}
    alone = {key: array for key, array in alone.items() if "nextn" not in key and "layer_output_norm" not in key}
    alone["token_embd.weight"] = tensors["token_embd.weight"].copy()
    alone["token_embd.weight"][tokens] = formulas.linear(np.concatenate([embedding, hidden], 1), part(f"{head}eh_proj"))
    alone["output_norm.weight"] = part(f"{block}layer_output_norm", f"{head}shared_head_norm")
    alone["output.weight"] = part(f"{head}shared_head_head", "output")
    path = tiny_variants.write(tmp_path / "c.gguf", name, n_nextn=0, tensors=alone, **HEADS[name])
    with load_model(path, "fp32", plugins=plugins, engine=engine) as model, model.create_session() as session:
        expected = session.eval(tokens, all_logits=True)
    assert expected is not None
    assert formulas.nmse(logits, expected) < 1e-9


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    """Model with a head, on kernels.

    NumPy's products depend on the number of rows.
    """
    with load_model(tiny_gguf("glm4_nextn"), plugins=plugins, engine=default_engine()) as model:
        yield model


def text_of(model: Model, seed: int, n: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.config.n_vocab, n).tolist()


def test_first_drafts_are_the_most_probable_tokens(model: Model) -> None:
    tokens = text_of(model, 1)
    states = hidden_states(model, tokens)
    best = head_logits(model, tokens, states).argmax(1)
    context = HeadContext(nextn_head(model))
    for i in range(1, len(tokens)):
        context.take(i - 1, tokens[i - 1 : i], states[i - 1 : i], 0)
        assert context.draft(tokens[: i + 1], 1, 0.0) == [best[i]]
    context.close()


def test_later_drafts_are_predicted_from_the_heads_own_states(model: Model) -> None:
    tokens, program = text_of(model, 2, 9), model.nextn_program()
    states = hidden_states(model, tokens)
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f16")), 20)
    rows, ids, expected = before(states), np.array(tokens, np.int32), []
    for _ in range(4):
        start = len(sequence.tokens)
        sequence.reserve(start, len(ids))
        spans = [Span(sequence, start, len(ids), rows)]
        logits, rows = program.forward_with_hidden(ids, spans, [1])
        sequence.commit(ids.tolist())
        expected.append(int(logits[-1].argmax()))
        ids, rows = np.array(expected[-1:], np.int32), rows[-1:]
    context = HeadContext(nextn_head(model))
    context.take(0, tokens[:-1], states[:-1], 0)
    assert context.draft(tokens, 4, 0.0) == expected
    assert context.cells == (0, tuple(tokens))
    assert context.draft(tokens, 4, 0.0) == expected
    assert context.draft(tokens, 4, 1.0) == []
    assert context.draft(tokens, 0, 0.0) == []


@pytest.mark.parametrize("seed", range(6))
def test_drafts_do_not_depend_on_batches_rejections_and_calls(model: Model, seed: int) -> None:
    choose, tokens = random.Random(seed), text_of(model, seed, 120)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model))
    wrong = np.random.default_rng(seed).normal(size=states.shape).astype(np.float32)
    n = 0
    while n < len(tokens) - 1:
        n_certain = min(choose.choice([1, 1, 2, 5, 30]), len(tokens) - 1 - n)
        n_drafted = choose.choice([0, 0, 1, 4, 20])
        n_right = choose.randrange(n_drafted + 1)  # accepted later, or not
        stop = min(n + n_certain + n_right, len(tokens) - 1)
        drafted = [(token + 1) % model.config.n_vocab for token in tokens[stop : n + n_certain + n_drafted]]
        passed = np.concatenate([states[n:stop], wrong[stop : stop + len(drafted)]])
        context.take(n, tokens[n:stop] + drafted, passed, max(0, stop + len(drafted) - n - n_certain))
        n = stop
        if choose.random() < 0.6:
            fresh = HeadContext(nextn_head(model))
            fresh.take(0, tokens[:n], states[:n], 0)
            assert context.draft(tokens[: n + 1], 3, 0.0) == fresh.draft(tokens[: n + 1], 3, 0.0)
            fresh.close()
    context.close()


def test_prompts_are_evaluated_at_once_and_short_passes_with_the_next_draft(model: Model) -> None:
    tokens = text_of(model, 3)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model))
    context.take(0, tokens[:40], states[:40], 0)
    assert context.cells == (0, tuple(tokens[:40]))
    context.take(40, tokens[40:50], states[40:50], 8)
    assert context.cells == (0, tuple(tokens[:40]))
    assert context.draft(tokens[:43], 1, 0.0)
    assert context.cells == (0, tuple(tokens[:43]))


def test_tokens_without_drafts_wait_and_are_dropped(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text_of(model, 3, 120)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model))
    context.take(0, tokens[:40], states[:40], 0)

    def take(start: int, stop: int) -> None:
        for i in range(start, stop):
            context.take(i, tokens[i : i + 1], states[i : i + 1], 0)

    with monkeypatch.context() as patch:
        patch.setattr(context, "_run", None)
        take(40, 104)
        assert context.cells == (0, tuple(tokens[:40]))
        take(104, 110)
        assert context.cells == (105, ())
    assert context.draft(tokens[:111], 2, 0.0)
    assert context.cells == (105, tuple(tokens[105:111]))


def test_after_a_gap_the_context_starts_anew(model: Model) -> None:
    tokens = text_of(model, 4)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model))
    context.take(0, tokens[:20], states[:20], 0)
    assert context.draft(tokens[:25], 3, 0.0) == []  # four hidden states are missing
    context.take(30, tokens[30:40], states[30:40], 0)
    assert len(context.draft(tokens[:41], 3, 0.0)) == 3
    assert context.cells == (30, tuple(tokens[30:41]))
    assert context.draft(tokens[:20], 3, 0.0) == []
    context.take(0, tokens[:5], states[:5], 0)
    assert len(context.draft(tokens[:6], 2, 0.0)) == 2
    assert context.cells == (0, tuple(tokens[:6]))


def test_after_a_rewind_all_cells_are_of_the_new_text(model: Model) -> None:
    tokens = text_of(model, 5)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model))
    context.take(0, tokens[:40], states[:40], 0)
    other = [*tokens[:20], *text_of(model, 6, 10)]
    context.take(20, other[20:29], hidden_states(model, other)[20:29], 0)
    assert len(context.draft(other, 2, 0.0)) == 2
    assert context.cells == (0, tuple(other))


def test_nothing_is_drafted_beyond_the_context_of_the_head(model: Model) -> None:
    tokens = text_of(model, 7)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model), 32)
    context.take(0, tokens[:30], states[:30], 0)
    assert len(context.draft(tokens[:31], 9, 0.0)) == 2
    context.take(30, tokens[30:33], states[30:33], 0)
    assert context.draft(tokens[:34], 9, 0.0) == []
    context.take(20, tokens[20:22], states[20:22], 0)
    assert len(context.draft(tokens[:23], 9, 0.0)) == 9


def test_without_memory_the_context_starts_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text_of(model, 8)
    states, context = hidden_states(model, tokens), HeadContext(nextn_head(model))

    def fail(*_: object, **__: object) -> None:
        raise OutOfMemoryError(2, 1)

    with monkeypatch.context() as patch:
        patch.setattr(mtp, "evaluate", fail)
        context.take(0, tokens[:40], states[:40], 0)
    assert context.cells == (40, ())
    context.take(40, tokens[40:42], states[40:42], 0)
    assert context.draft(tokens[:43], 2, 0.0)


@pytest.mark.parametrize("name", ["eh_proj", "enorm", "hnorm", "attn_q", "ffn_down"])
def test_a_missing_tensor_of_the_head_is_named(name: str, load_tiny: LoadTiny) -> None:
    full = f"blk.2.{'nextn.' if name in ('eh_proj', 'enorm', 'hnorm') else ''}{name}.weight"
    with load_tiny("glm4_nextn", without=[full]) as model:
        assert model.create_session().eval([1, 2]) is None
        with pytest.raises(ModelFormatError, match=rf"tensor {full} is missing, expected \("):
            MtpHead(model)


def test_a_damaged_tensor_of_the_head_is_named(tmp_path: Path, plugins: Plugins, engine: Engine) -> None:
    name = "blk.2.nextn.eh_proj.weight"
    path = tiny_variants.write(tmp_path / "m.gguf", "glm4_nextn", tensors={name: np.full((64, 128), np.nan)})
    with load_model(path, plugins=plugins, engine=engine) as model:
        with pytest.raises(ModelFormatError, match=f"tensor '{name}' has weights that are NaN"):
            MtpHead(model)
        assert model.create_session().eval([1, 2]) is None


def test_a_file_that_was_replaced_is_refused(tmp_path: Path, plugins: Plugins, engine: Engine) -> None:
    path = tiny_variants.write(tmp_path / "m.gguf", "glm4_nextn")
    with load_model(path, plugins=plugins, engine=engine) as model:
        path.unlink()
        with pytest.raises(ModelFormatError, match=r"m\.gguf"):
            MtpHead(model)
        tiny_variants.write(path, "glm4_nextn", n_layer=3)
        with pytest.raises(ModelFormatError, match="the file has changed since the model was loaded"):
            MtpHead(model)
        tiny_variants.write(path, "glm4_nextn")
        MtpHead(model).close()


def test_models_without_a_head_are_refused(load_tiny: LoadTiny) -> None:
    for variant in ("gqa", "glm4", "qwen35"):
        with load_tiny(variant) as model:
            assert not model.has_nextn
            with pytest.raises(InvalidRequestError, match=r"the model '.*' has no multi-token-prediction head"):
                MtpHead(model)


@pytest.mark.parametrize("mode", ["auto", "fp32", "q8", "q4"])
def test_heads_are_kept_in_the_mode_of_the_model(mode: str, load_tiny: LoadTiny) -> None:
    with load_tiny("glm4moe_nextn", mode, n_layer=2) as model, MtpHead(model, min_probability=0.0) as head:
        tokens = text_of(model, 1, 8)
        head.take_hidden(0, tokens[:-1], hidden_states(model, tokens)[:-1], 0)
        assert len(head.draft(tokens, 3)) == 3


def test_closing_gives_the_memory_back(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    gc.disable()
    try:
        first, second = (load_model(tiny_gguf("glm4_nextn"), plugins=plugins, threads=1) for _ in range(2))
        head = MtpHead(first)
        program = weakref.ref(first.nextn_program())
        assert second.nextn_program() is program(), "models of one file share the head"
        pool = first._nextn_pool
        assert pool is not None
        tokens = text_of(first, 1)
        head.take_hidden(0, tokens, hidden_states(first, tokens), 0)
        assert pool.n_used_bytes > 0
        head.close()
        head.close()
        assert pool.n_used_bytes == 0
        first.close()
        assert program() is not None
        second.close()
        assert program() is None
        with pytest.raises(ClosedError):
            MtpHead(first)
    finally:
        gc.enable()


class Head(Architecture):
    """Architecture with a head that a test records."""

    name = "test"

    def __init__(self, record: Callable[[Graph], Value | None]):
        self._record = record

    def configure(self, metadata: Any) -> Any: ...

    def tensors(self, config: Any) -> Any: ...

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        raise NotImplementedError

    def nextn(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        return self._record(g)


def _param(n_out: int, n_in: int) -> Param:
    return Param(Tensor(f"w{n_out}.weight", (n_out, n_in)))


def _unread(g: Graph) -> Value:
    g.previous_hidden(48)
    return g.linear(g.embed(_param(50, 48)), _param(50, 48))


def _too_wide(g: Graph) -> Value:
    return g.linear(g.previous_hidden(32), _param(50, 32))


def _with_state(g: Graph) -> Value:
    g.recurrent_state("s", 4)
    return g.linear(g.previous_hidden(48), _param(50, 48))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (lambda g: g.linear(g.embed(_param(50, 48)), _param(50, 48)), "must read g.previous_hidden"),
        (lambda g: g.previous_hidden(48), "must end in the op that computes its logits, 50 wide"),
        (_too_wide, "must have an output layer that reads 48 numbers a token"),
        (_with_state, "neither recurrent states nor an encoder"),
        (_unread, "computes what nothing reads: previous_hidden"),
    ],
)
def test_heads_that_cannot_draft_are_refused(record: Callable[[Graph], Value], problem: str) -> None:
    config = Config(
        architecture="test", n_vocab=50, context_length=9, n_embd=48, n_layer=1, n_head=1, n_head_kv=1, head_dim=48,
        n_ff=48,
    )  # fmt: skip
    weights = Weights({}, [], [Params({})])
    with pytest.raises(PluginError, match=f"nextn of 'test' .*{problem}"):
        trace_nextn(Head(record), config, weights)
    assert trace_nextn(Head(lambda g: None), config, weights) is None
    assert trace_nextn(Head(record), config, Weights({}, [])) is None
