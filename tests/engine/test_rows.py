"""Rows of products divided among nodes against one process, for every architecture."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import Model, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.engine.rows import edges_of, rows_of
from llamacli.ops.exchange import Edges, Gathered
from llamacli.plugins import Plugins
from local_rows import LocalRows
from local_stages import TOKENS, embeddings, results
from suite import REPRESENTATIVES, slow_but
from tiny_variants import ENCODERS, VARIANTS


def native(number: int) -> Engine:
    return default_engine(1 + number)


@contextmanager
def both(
    path: Path, plugins: Plugins, shares: Sequence[int] = (1, 1), engines: Callable[[int], Engine] = native
) -> Iterator[tuple[Model, Model, LocalRows]]:
    rows = LocalRows(engines, shares)
    with (
        load_model(path, "auto", plugins=plugins, engine=engines(0)) as whole,
        load_model(path, "auto", plugins=plugins, engine=rows) as divided,
    ):
        yield whole, divided, rows
        rows.nodes.end()
        assert rows.nodes.n_exchanges


@pytest.fixture(autouse=True)
def unguarded(request: pytest.FixtureRequest) -> None:
    """Skip in guarded programs: nodes wait for each other within a batch."""
    if request.config.pluginmanager.hasplugin("llamacli.testing.guarded"):
        pytest.skip("guarded programs are compiled for each batch size")


@pytest.mark.medium
@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, VARIANTS))
def test_bits_are_those_of_one_process(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf(variant), plugins) as (whole, divided, _):
        if whole.program.needs_whole_input:
            np.testing.assert_array_equal(divided.logits(TOKENS), whole.logits(TOKENS))
            return
        for found, expected in zip(results(divided), results(whole), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.medium
@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, ENCODERS))
def test_encoders_give_equal_rows(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with both(tiny_gguf(variant), plugins) as (whole, divided, _):
        found, expected = (embeddings(model) for model in (divided, whole))
        np.testing.assert_array_equal(found, expected)


def reference(number: int) -> Engine:
    return ReferenceEngine()


@pytest.mark.parametrize("variant", ["gemma3n_shared", "mamba2", "t5"])
def test_the_reference_engine_gives_equal_bits(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    """Experts are left out: their float64 is sent as float32."""
    with both(tiny_gguf(variant), plugins, [3, 1, 2] if variant == "t5" else [1, 1], reference) as (whole, divided, _):
        for found, expected in zip(results(divided), results(whole), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("width", "shares", "expected"),
    [
        (64, [1, 1], (0, 32, 64)),
        (63, [1, 1], (0, 32, 63)),
        (32, [1, 1], None),
        (512, [3, 1], (0, 384, 512)),
        (96, [1000, 1, 1], (0, 32, 64, 96)),
        (128, [1, 1000, 1], (0, 32, 96, 128)),
    ],
)
def test_parts_are_whole_blocks_in_proportion(width: int, shares: list[int], expected: Edges | None) -> None:
    assert edges_of(width, shares) == expected


def test_results_of_a_layer_are_gathered_four_times(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    """Queries with keys and values; attention; the gated part; the layer."""
    with load_model(tiny_gguf("gqa", n_layer=3), plugins=plugins, engine=ReferenceEngine()) as model:
        graph = model.program.graph
        ops = rows_of(graph, [1, 1], 0, lambda own, _widths, *, to_first: [own, own]).ops
    gathered = [op for op in ops if isinstance(op, Gathered)]
    assert len(gathered) == 4 * 3 + 2
    assert [op.gather.to_first for op in gathered] == [False] * 13 + [True]
