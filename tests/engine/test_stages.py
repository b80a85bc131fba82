"""Pipeline stages against one process, for every architecture."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import Model, load_model
from llamacli.engine import Chunk, Engine, ReferenceEngine, default_engine, evaluate
from llamacli.engine.cutting import cut, cut_points
from llamacli.engine.stages import StagedProgram
from llamacli.errors import InvalidRequestError
from llamacli.kv import N_BATCH, KVSequence
from llamacli.plugins import Plugins
from local_stages import TOKENS, LocalStages, embeddings, results
from suite import REPRESENTATIVES, slow_but
from tiny_variants import ENCODERS, VARIANTS


@contextmanager
def both(path: Path, plugins: Plugins, engine: Callable[[], Engine] = default_engine) -> Iterator[tuple[Model, Model]]:
    with (
        load_model(path, "auto", plugins=plugins, engine=engine()) as whole,
        load_model(path, "auto", plugins=plugins, engine=LocalStages(engine)) as divided,
    ):
        assert isinstance(divided.program, StagedProgram)
        assert divided.program.stages  # one a layer that has tensors
        yield whole, divided


@pytest.mark.medium
@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, VARIANTS))
def test_bits_are_those_of_one_process(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf(variant), plugins) as (whole, divided):
        if whole.program.needs_whole_input:
            np.testing.assert_array_equal(divided.logits(TOKENS), whole.logits(TOKENS))
            return
        for found, expected in zip(results(divided), results(whole), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.medium
@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, ENCODERS))
def test_encoders_give_equal_rows(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf(variant), plugins) as (whole, divided):
        found, expected = (embeddings(model) for model in (divided, whole))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("variant", ["gemma4", "gemma3n_shared", "mamba2", "rwkv7", "t5", "t5_fewer_decoders"])
def test_the_reference_engine_gives_equal_bits(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf(variant), plugins, ReferenceEngine) as (whole, divided):
        for found, expected in zip(results(divided), results(whole), strict=True):
            np.testing.assert_array_equal(found, expected)


def advanced(model: Model, sequence: KVSequence, tokens: list[int]) -> np.ndarray:
    return evaluate(model.program_with, [Chunk(sequence, tokens)])[0]


def test_cells_of_a_begun_page_are_copied_in_all_stages(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf("gqa"), plugins) as models:
        found = []
        for model in models:
            with model.kv_cache(2, n_ctx_seq=200) as cache:
                advanced(model, cache.sequence(0), TOKENS)
                advanced(model, cache.sequence(1), TOKENS[:10])
                cache.seq_cp(0, 1, 10, 50)
                found.append(advanced(model, cache.sequence(1), [3]))
                cache.seq_cp(0, 1, 51, 60)  # after other tokens
                found.append(advanced(model, cache.sequence(1), [3]))
        np.testing.assert_array_equal(found[2:], found[:2])


def test_tokens_cannot_be_removed_in_the_middle(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf("gqa"), plugins) as (_, divided), divided.kv_cache(n_ctx_seq=200) as cache:
        advanced(divided, cache.sequence(0), TOKENS)
        with pytest.raises(InvalidRequestError, match="other pipeline stages"):
            cache.remove_range(0, 3, 9)
        assert cache.sequence(0).tokens == TOKENS
        cache.remove_range(0, 30)
        assert cache.sequence(0).tokens == TOKENS[:30]


def test_a_graph_is_cut_between_layers_only(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine()) as model:
        graph = model.program.graph
        places = cut_points(graph)
        widths = [stage.received_by(encodes=False) for stage in cut(graph, places)]
        assert widths == [0] + [model.config.n_embd] * (model.config.n_layer - 1)
        for wrong in ([0], [len(graph.ops)], [places[0]] * 2):
            with pytest.raises(InvalidRequestError, match="cannot be cut"):
                cut(graph, wrong)


def test_batches_of_a_prompt_are_in_several_stages_at_once(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    """The second is begun before the first has left the last stage."""
    prompt = [(7 * i + 3) % 90 for i in range(N_BATCH)]
    path = tiny_gguf("gqa", metadata={"llama.context_length": 2000})
    with both(path, plugins) as (whole, divided):
        begun, ended = [], []
        program = divided.program
        assert isinstance(program, StagedProgram)
        (stage,) = program.stages
        start = stage.start

        def watched(*given: Any) -> Future[list[np.ndarray]]:
            begun.append(len(ended))
            if len(begun) == 2:
                released.set()
            future: Future[list[np.ndarray]] = start(*given)
            future.add_done_callback(ended.append)
            return future

        released = threading.Event()
        stage._thread.submit(released.wait, 60)  # type: ignore[attr-defined]
        stage.start = watched  # type: ignore[method-assign]
        found, expected = (
            advanced(model, model.kv_cache(n_ctx_seq=2000).sequence(0), prompt) for model in (divided, whole)
        )
        assert begun[:2] == [0, 0]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("variant", slow_but(["gqa"], ["gqa", "gemma3", "mamba2", "rwkv7"]))
def test_prompts_of_several_batches_give_equal_bits(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    prompt = [(7 * i + 3) % 90 for i in range(3 * N_BATCH // 4)]
    with both(tiny_gguf(variant), plugins) as (whole, divided):
        assert divided.program.piece < len(prompt)  # type: ignore[attr-defined]
        with whole.create_session(n_ctx=500) as one, divided.create_session(n_ctx=500) as other:
            for text in (prompt[:300], prompt[300:]):
                np.testing.assert_array_equal(other.eval(text), one.eval(text))


@pytest.mark.parametrize("variant", ["qwen3moe", "t5", "bert"])
def test_batches_that_are_not_cut(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf(variant), plugins) as (_, divided):
        assert divided.program.piece == N_BATCH  # type: ignore[attr-defined]
