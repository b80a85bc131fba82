"""Attention kernels: storing cells to pages and reading them."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.kernels.attention import (
    ATTENTION,
    STORE,
    attention,
    latent_attention,
    partial_bytes,
    scratch_bytes,
    store_kv,
    tiled_attention,
)
from llamacli.kernels.isa import isa
from llamacli.kernels.kv_types.types import IntegerType
from llamacli.kernels.layout import ROW
from llamacli.kernels.team import Team, run_kernel
from llamacli.kv import KV_TYPES, KVLayout, KVPool, KVSequence, KVType
from llamacli.kv.layout import KVSpec
from llamacli.ops.attention import alibi_slopes
from llamacli.testing import formulas
from llamacli.util.memory import view
from suite import examples, pairwise

THREADS = 2
INTEGERS = [name for name, kind in KV_TYPES.items() if isinstance(kind, IntegerType)]
TYPES = [*KV_TYPES, ("q8_0", "q4_1"), ("q5_0", "iq4_nl")]


def bound(make, kv_type) -> float:
    """Largest normalized mean squared error.

    Tiles round queries, keys, values and weights to bfloat16; of integers, queries and weights have 16 bits.
    """
    if make is tiled_attention:
        return 2e-4
    kind = KVType.of(kv_type)
    return 5e-8 if {kind.k, kind.v} & set(INTEGERS) else 1e-11


has_tiles = pytest.mark.skipif(isa() != "amx", reason="the instruction set in use has no tiles")
KERNELS = [attention, latent_attention, pytest.param(tiled_attention, marks=has_tiles)]
UNUSED = 0xFF
"""Byte that fills unused cells: NaN as a scale and as a float."""


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(THREADS)


def new_sequence(state: KVSpec, kv_type: str | tuple[str, str], n: int) -> KVSequence:
    sequence = KVSequence(KVPool(KVLayout.of([state], kv_type)), n)
    sequence.reserve(0, n)
    for page in pages(sequence):
        page[:] = UNUSED
    return sequence


def pages(sequence: KVSequence) -> list[np.ndarray]:
    return [view(int(page), sequence.pool.groups[0].page_bytes) for page in sequence.tables[0] if page]


def place(*spans: tuple[KVSequence, int, int]) -> np.ndarray:
    """Rows for the cells from `start` to `stop` - 1 of each sequence."""
    rows = [
        (cell, cell, some.addresses.ctypes.data, some.seq_len, stop, *[0] * (len(ROW) - 5))
        for some, start, stop in spans
        for cell in range(start, stop)
    ]
    return np.array(rows, ROW)


def run(team: Team, kernel: object, record: np.dtype, state: KVSpec, rows: np.ndarray, **params) -> None:
    in_tiles = kernel.name.endswith("_tiles")
    size = -(-scratch_bytes(state.head_dim, state.value_dim, in_tiles=in_tiles) // 64) * 64
    scratch = np.full((team.n_threads, size // 4), np.nan, np.float32)
    given = {
        "layer": 0,
        "n_head_kv": state.n_head_kv,
        "head_dim": state.head_dim,
        "value_dim": state.value_dim,
        **params,
    }
    if record is ATTENTION:
        partials = np.zeros(partial_bytes(max(state.head_dim, state.value_dim), team.n_threads), np.uint8)
        given = {"partials": partials, "partial_bytes": len(partials), **given}
    run_kernel(
        team, kernel, record, n_rows=len(rows), rows=rows, scratch=scratch, scratch_stride=size, **given
    )  # fmt: skip


def store(team: Team, rows: np.ndarray, state: KVSpec, kv_type, k: np.ndarray, v: np.ndarray) -> None:
    run(
        team,
        store_kv(KVType.of(kv_type)),
        STORE,
        state,
        rows,
        k=k,
        k_stride=4 * k[0].size,
        v=0 if state.values_in_keys else v,
        v_stride=4 * v[0].size,
    )


def special(x: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays [n, n_head, head_dim] that are hard to round, by name."""
    one = {number: x.copy() for number in (np.inf, -np.inf, np.nan)}
    for number, cells in one.items():
        cells[3, 0, -1] = cells[9, 1, 0] = number
    return {
        "usual": x, "zero": 0 * x, "the same": 0 * x + np.float32(3.7), "whole": np.rint(3 * x), "far": x + 1000,
        "denormal": x * np.float32(1e-40), "small": x * np.float32(1e-30), "fine": x * np.float32(1e-5),
        "scales overflow": x * np.float32(1e6), "squares overflow": x * np.float32(1e30),
        "sums overflow": np.sign(x) * np.float32(3e38), **{str(number): cells for number, cells in one.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    "head_dim", [80, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5, 24, 48, 112, 257))]
)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_stored_bytes_equal_numpy(kv_type: str, head_dim: int, team: Team) -> None:
    state, n, random = KVSpec(3, head_dim), 20, np.random.default_rng(head_dim)
    usual = [random.normal(size=(n, 3, head_dim)).astype(np.float32) for _ in "kv"]
    for name, k, v in zip(special(usual[0]), *(special(x).values() for x in usual), strict=True):
        mine, numpys = (new_sequence(state, kv_type, n) for _ in range(2))
        for span in (slice(0, 20), slice(3, 9), slice(9, 18)):  # some again, on what is there
            with np.errstate(over="ignore", invalid="ignore"):
                numpys.write(0, span.start, k[span], v[span])
            store(team, place((mine, span.start, span.stop)), state, kv_type, k[span].copy(), v[span].copy())
        with np.errstate(invalid="ignore"):
            cells = [np.concatenate([part.ravel() for part in some.read(0, n)]) for some in (mine, numpys)]
        np.testing.assert_array_equal(*cells, err_msg=name)
        if np.isfinite(cells[0]).all():  # the sign of a NaN is not defined
            np.testing.assert_array_equal(pages(mine), pages(numpys), err_msg=name)


OPTIONS: list[dict] = [
    {}, {"window": 20}, {"window": 5, "softcap": 2.0, "sinks": True}, {"chunk": 12, "alibi": 8.0},
    {"n_after": 1 << 40}, {"window": 7, "n_after": 6},
]  # fmt: skip
"""Options of attention; with `n_after`, tokens see those behind them."""


def check_attention(team: Team, state: KVSpec, kv_type, options: dict, make=attention) -> None:
    """Evaluate two sequences together; their last pages end in NaN."""
    group, n_head_kv, random = 3, state.n_head_kv, np.random.default_rng(state.head_dim)
    spans = [(new_sequence(state, kv_type, stop), start, stop) for start, stop in ((90, 99), (5, 8))]
    expected, queries = [], []
    named = {name: options.get(name) for name in ("window", "softcap", "chunk", "alibi")}
    sinks = random.normal(size=n_head_kv * group).astype(np.float32) if "sinks" in options else None
    n_after = options.get("n_after", 0)
    for sequence, start, stop in spans:
        k, v = (
            random.normal(size=(stop, n_head_kv, width)).astype(np.float32)
            for width in (state.head_dim, state.value_dim)
        )
        store(team, place((sequence, 0, stop)), state, kv_type, k, v)
        q = random.normal(size=(stop - start, n_head_kv * group, state.head_dim)).astype(np.float32)
        keys, values = sequence.read(0, stop)
        cells = keys.transpose(2, 0, 1), values.transpose(1, 0, 2)
        expected.append(formulas.attention(q, *cells, 0.3, sinks=sinks, n_after=n_after, **named))
        queries.append(q)
    q = np.concatenate(queries)
    out = np.full((*q.shape[:2], state.value_dim), np.nan, np.float32)
    slopes = 0 if named["alibi"] is None else alibi_slopes(n_head_kv * group, named["alibi"]).astype(np.float32)
    run(
        team, make(KVType.of(kv_type)), ATTENTION, state, place(*spans), q=q, q_stride=4 * q[0].size, out=out,
        out_stride=4 * out[0].size, group=group, window=named["window"] or 1 << 40,
        chunk=named["chunk"] or 1 << 40, n_after=n_after, sinks=0 if sinks is None else sinks, slopes=slopes,
        scale=0.3, softcap=named["softcap"] or 0.0,
    )  # fmt: skip
    assert formulas.nmse(out, np.concatenate(expected)) < bound(make, kv_type)


@pytest.mark.parametrize(("kv_type", "head_dim", "options"), pairwise(TYPES, [1, 5, 20, 32, 80, 112], OPTIONS))
def test_attention_reads_stored_cells_only(kv_type, head_dim: int, options: dict, team: Team) -> None:
    check_attention(team, KVSpec(2, head_dim), kv_type, options)


@has_tiles
@pytest.mark.parametrize(("kv_type", "head_dim", "options"), pairwise(TYPES, [1, 5, 20, 32, 80, 112], OPTIONS))
def test_attention_by_tiles(kv_type, head_dim: int, options: dict, team: Team) -> None:
    check_attention(team, KVSpec(2, head_dim), kv_type, options, tiled_attention)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (16, 24), (5, 40), (40, 1), (48, 112)])
@pytest.mark.parametrize("kv_type", TYPES, ids=str)
def test_values_of_another_width_than_keys(kv_type, head_dim: int, value_dim: int, team: Team) -> None:
    check_attention(team, KVSpec(2, head_dim, value_dim=value_dim), kv_type, {"window": 20, "sinks": True})


WIDTHS = [(16, 16), (24, 16), (96, 64), (40, 5), (16, 3), (7, 5), (112, 70)]


@pytest.mark.parametrize(("kv_type", "widths", "options"), pairwise(TYPES, WIDTHS, OPTIONS))
def test_values_in_keys(kv_type, widths: tuple[int, int], options: dict, team: Team) -> None:
    head_dim, value_dim = widths
    check_attention(
        team, KVSpec(2, head_dim, value_dim=value_dim, values_in_keys=True), kv_type, options, latent_attention
    )


@pytest.mark.parametrize("kv_type", INTEGERS)
def test_integers_are_exact_where_rounding_is(kv_type: str, team: Team) -> None:
    """Queries that are whole numbers of 16 bits, and a single cell."""
    n, random = 70, np.random.default_rng(4)
    for make, state, options in (
        (latent_attention, KVSpec(2, 7, value_dim=5, values_in_keys=True), {}),  # an odd head is not rotated
        (attention, KVSpec(2, 24), {"window": 1}),
    ):
        sequence, shape = new_sequence(state, kv_type, n), (n, 2, state.head_dim)
        k, v = (random.normal(size=shape).astype(np.float32) for _ in "kv")
        store(team, place((sequence, 0, n)), state, kv_type, k, v)
        q = np.rint(random.uniform(-32767, 32767, shape)).astype(np.float32)
        q[..., 0] = 32767
        out = np.full((n, 2, state.value_dim), np.nan, np.float32)
        run(
            team, make(KVType.of(kv_type)), ATTENTION, state, place((sequence, 0, n)), q=q, q_stride=4 * q[0].size,
            out=out, out_stride=4 * out[0].size, group=1, window=options.get("window", 1 << 40), chunk=1 << 40,
            scale=2.0**-15, softcap=0.0,
        )  # fmt: skip
        keys, values = sequence.read(0, n)
        cells = keys.transpose(2, 0, 1), values.transpose(1, 0, 2)
        assert formulas.nmse(out, formulas.attention(q, *cells, 2.0**-15, **options)) < 1e-11


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    teams = [Team(n) for n in (1, 2, 3, 6, 7, 20)]
    yield teams
    for team in teams:
        team.close()


@pytest.mark.parametrize("make", KERNELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_results_do_not_depend_on_the_number_of_threads(kv_type: str, make, teams: list[Team]) -> None:
    """Few rows: units have fewer heads, and go to threads apart."""
    group, state, random = 7, KVSpec(2, 48, values_in_keys=make is latent_attention), np.random.default_rng(1)
    sequence = new_sequence(state, kv_type, 150)
    k, v = (random.normal(size=(150, 2, 48)).astype(np.float32) for _ in "kv")
    store(teams[0], place((sequence, 0, 150)), state, kv_type, k, v)
    for n in (1, 2, 5):
        q, outs = random.normal(size=(n, 2 * group, 48)).astype(np.float32), []
        for team in teams:
            outs.append(out := np.full(q.shape, np.nan, np.float32))
            run(
                team, make(KVType.of(kv_type)), ATTENTION, state,
                place((sequence, 150 - n, 150)), q=q, q_stride=4 * q[0].size, out=out, out_stride=4 * out[0].size,
                group=group, window=1 << 40, chunk=1 << 40, n_after=0, sinks=0, slopes=0, scale=0.3, softcap=0.0,
            )  # fmt: skip
            np.testing.assert_array_equal(out, outs[0])


LONG: list[dict] = [{}, {"window": 700, "sinks": True}, {"chunk": 800, "alibi": 8.0}, {"n_after": 1 << 40}]


@pytest.mark.parametrize("make", KERNELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("kv_type", "options"), pairwise(["f32", "f16", "q8_0", "q4_1"], LONG))
def test_chunks_of_cells_that_threads_share(kv_type: str, options: dict, make, teams: list[Team]) -> None:
    """Several chunks, with memory for their sums and without: the same bits."""
    group, n_cells, state = 12, 1300, KVSpec(1, 32, values_in_keys=make is latent_attention)
    random, sequence = np.random.default_rng(2), new_sequence(state, kv_type, n_cells)
    k, v = (random.normal(size=(n_cells, 1, 32)).astype(np.float32) for _ in "kv")
    store(teams[0], place((sequence, 0, n_cells)), state, kv_type, k, v)
    named = {name: options.get(name) for name in ("window", "chunk", "alibi")}
    sinks = random.normal(size=group).astype(np.float32) if "sinks" in options else None
    slopes = 0 if named["alibi"] is None else alibi_slopes(group, named["alibi"]).astype(np.float32)
    keys, values = sequence.read(0, n_cells)
    cells = keys.transpose(2, 0, 1), values.transpose(1, 0, 2)
    n_after = options.get("n_after", 0)
    for n in (1, 3, 70):
        q, outs = random.normal(size=(n, group, 32)).astype(np.float32), []
        for team in teams:
            for memory in ({}, {"partials": 0, "partial_bytes": 0}):
                outs.append(out := np.full((n, group, state.value_dim), np.nan, np.float32))
                run(
                    team, make(KVType.of(kv_type)), ATTENTION, state,
                    place((sequence, n_cells - n, n_cells)), q=q, q_stride=4 * q[0].size, out=out,
                    out_stride=4 * out[0].size, group=group, window=named["window"] or 1 << 40,
                    chunk=named["chunk"] or 1 << 40, n_after=n_after, sinks=0 if sinks is None else sinks,
                    slopes=slopes, scale=0.3, softcap=0.0, **memory,
                )  # fmt: skip
                np.testing.assert_array_equal(out, outs[0])
        expected = formulas.attention(q, *cells, 0.3, sinks=sinks, n_after=n_after, **named)
        assert formulas.nmse(outs[0], expected) < bound(make, kv_type)


@pytest.mark.parametrize("make", KERNELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_token_does_not_depend_on_the_others(kv_type: str, make, team: Team) -> None:
    """Nor on its place, cells behind it, and pages before its window."""
    group, n, state, random = 4, 150, KVSpec(2, 48, values_in_keys=make is latent_attention), np.random.default_rng(3)
    sequence = new_sequence(state, kv_type, n)
    k, v = (random.normal(size=(n, 2, 48)).astype(np.float32) for _ in "kv")
    store(team, place((sequence, 0, n)), state, kv_type, k, v)
    q = random.normal(size=(n, 2 * group, 48)).astype(np.float32)

    def outputs(first: int, stop: int) -> np.ndarray:
        out = np.full((stop - first, 2 * group, 48), np.nan, np.float32)
        run(
            team, make(KVType.of(kv_type)), ATTENTION, state, place((sequence, first, stop)), q=q[first:stop].copy(),
            q_stride=4 * q[0].size, out=out, out_stride=4 * out[0].size, group=group, window=70, chunk=1 << 40,
            n_after=0, sinks=0, slopes=0, scale=0.3, softcap=0.0,
        )  # fmt: skip
        return out

    whole = outputs(0, n)
    kept = sequence.tables[0].copy()
    for first, stop in ((0, 1), (1, 4), (62, 67), (90, 141), (n - 1, n)):
        sequence.tables[0][: max(0, first + 1 - 70) // 16] = 0
        np.testing.assert_array_equal(outputs(first, stop), whole[first:stop])
    sequence.tables[0][:] = kept


def padded(rows: np.ndarray, n: int) -> np.ndarray:
    """Rows [n_rows, ...] as float32 [n_rows, width], with n NaN behind each."""
    return np.pad(rows.reshape(len(rows), -1), ((0, 0), (0, n)), constant_values=np.nan)


@pytest.mark.parametrize("make", KERNELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kv_type", TYPES, ids=str)
@examples(10)
@given(data=st.data())
def test_attention_of_random_shapes_and_strides(kv_type, make, data: st.DataObject, team: Team) -> None:
    """Write cells of one of several layers, and read them."""

    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    n_head_kv, group, head_dim, n_layers = draw(1, 2), draw(1, 11), draw(1, 70), draw(1, 3)
    state = KVSpec(
        n_head_kv,
        head_dim,
        value_dim=draw(1, head_dim if make is latent_attention else 70),
        values_in_keys=make is latent_attention,
    )
    layer, spare, random = draw(0, n_layers - 1), draw(0, 5), np.random.default_rng(draw(0, 1 << 30))
    options = {
        "window": data.draw(st.sampled_from([None, 1, 5, 40])),
        "softcap": data.draw(st.sampled_from([None, 2.0])),
    }
    options["alibi"] = data.draw(st.sampled_from([None, 8.0]))
    options["chunk"], n_after = data.draw(st.sampled_from([(None, 0), (1, 0), (12, 0), (None, 3), (None, 1 << 40)]))
    sinks = random.normal(size=n_head_kv * group).astype(np.float32) if draw(0, 1) else None
    kind, spans, queries, expected = KVType.of(kv_type), [], [], []
    for _ in range(draw(1, 2)):
        stop = draw(1, 90)
        start = draw(max(0, stop - 10), stop - 1)
        sequence = KVSequence(KVPool(KVLayout.of([state] * n_layers, kv_type)), stop)
        sequence.reserve(0, stop)
        for page in pages(sequence):
            page[:] = UNUSED
        k, v = (
            random.normal(size=(stop, n_head_kv, width)).astype(np.float32) for width in (head_dim, state.value_dim)
        )
        rows, keys, values = place((sequence, 0, stop)), padded(k, spare), padded(v, 3)
        given_v = {} if make is latent_attention else {"v": values, "v_stride": values.strides[0]}
        run(
            team, store_kv(kind), STORE, state, rows, layer=layer, k=keys, k_stride=keys.strides[0],
            **{"v": 0, "v_stride": 0, **given_v},
        )  # fmt: skip
        numpys = KVSequence(KVPool(KVLayout.of([state], kv_type)), stop)
        numpys.reserve(0, stop)
        numpys.write(0, 0, k, v)
        keys, values = sequence.read(layer, stop)
        for mine, theirs in zip((keys, values), numpys.read(0, stop), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        q = random.normal(size=(stop - start, n_head_kv * group, head_dim)).astype(np.float32)
        cells = keys.transpose(2, 0, 1), values.transpose(1, 0, 2)
        expected.append(formulas.attention(q, *cells, 0.3, sinks=sinks, n_after=n_after, **options))
        spans.append((sequence, start, stop))
        queries.append(q)
    q = padded(np.concatenate(queries), spare)
    wanted = np.concatenate(expected)
    out = np.full((len(q), wanted[0].size + spare), np.nan, np.float32)
    alibi = options["alibi"]
    run(
        team, make(kind), ATTENTION, state, place(*spans), layer=layer, q=q,
        q_stride=q.strides[0], out=out, out_stride=out.strides[0], group=group, window=options["window"] or 1 << 40,
        chunk=options["chunk"] or 1 << 40, n_after=n_after, sinks=0 if sinks is None else sinks,
        slopes=0 if alibi is None else alibi_slopes(n_head_kv * group, alibi).astype(np.float32), scale=0.3,
        softcap=options["softcap"] or 0.0,
    )  # fmt: skip
    assert formulas.nmse(out[:, : wanted[0].size].reshape(wanted.shape), wanted) < bound(make, kv_type)
    assert np.isnan(out[:, wanted[0].size :]).all()
