"""Codebook quantizers: their errors beside llama.cpp's, and their invariants."""

import json
from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llamacli.errors import InvalidRequestError
from llamacli.kernels.codebook_encoding import encode_codebook
from llamacli.kernels.team import Team
from llamacli.quantization import BLOCK_FORMATS, CODEBOOK_TYPES, TensorType, codebook, dequantize
from oracle import importance_quantizers as oracle

T = TensorType
GOLDEN: dict[str, dict[str, dict[str, float]]] = json.loads(oracle.GOLDEN.read_text())
KINDS = [pytest.param(kind, id=kind.name) for kind in CODEBOOK_TYPES]

MARGIN = {
    "IQ4_NL": 0.97, "IQ4_XS": 0.97, "TQ1_0": 0.72, "TQ2_0": 0.72, "MXFP4": 0.99, "NVFP4": 0.93, "IQ3_XXS": 0.92,
    "IQ3_S": 0.9, "IQ2_XXS": 0.95, "IQ2_XS": 0.95, "IQ2_S": 0.96, "IQ1_S": 0.94, "IQ1_M": 0.93,
}  # fmt: skip
"""Largest allowed quotient of our error and llama.cpp's, in the mean over random matrices."""


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(1)
    yield team
    team.close()


def packed(team: Team, kind: TensorType, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The file's bytes of float32 [n, width]."""
    book = codebook(kind)
    return book.pack(encode_codebook(team, book, x, weights)).reshape(len(x), -1)


def quantized(team: Team, kind: TensorType, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    return dequantize(packed(team, kind, x, weights), kind)


@pytest.mark.parametrize("case", oracle.KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_below_those_of_llama_cpp(team: Team, kind: TensorType, case: str) -> None:
    theirs, weights = GOLDEN[case][kind.name], oracle.weights_of(case)
    ours = {
        name: oracle.weighted_rmse(x, quantized(team, kind, x, weights), weights)
        for name, x in oracle.samples().items()
    }
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] > theirs[name] * 1.01] == []
    assert np.mean([ours[name] / theirs[name] for name in ours]) < MARGIN[kind.name]


@pytest.mark.parametrize("kind", [T.IQ4_NL, T.IQ4_XS, T.TQ2_0, T.MXFP4, T.NVFP4], ids=lambda kind: kind.name)
def test_goldens_are_the_peers(kind: TensorType) -> None:
    pytest.importorskip("llama_cpp")
    for case in oracle.KINDS:
        assert oracle.peer_errors(case, kind) == pytest.approx(GOLDEN[case][kind.name], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_lower_the_weighted_error(team: Team, kind: TensorType) -> None:
    x, weights = oracle.samples()["normal"][:4], oracle.weights_of("weighted")
    errors = [oracle.weighted_rmse(x, quantized(team, kind, x, given), weights) for given in (None, weights)]
    # A power of two is a coarse scale, which weights seldom change.
    assert errors[1] < errors[0] * (0.999 if kind is T.MXFP4 else 0.98)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_are_none(team: Team, kind: TensorType) -> None:
    x = oracle.samples()["laplace"][:2]
    for weights in (np.full(1024, 0.25, np.float32), np.zeros(1024, np.float32)):
        np.testing.assert_array_equal(packed(team, kind, x, weights), packed(team, kind, x))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_belong_to_columns(team: Team, kind: TensorType) -> None:
    """Weigh each row, and each of its blocks, by its own columns."""
    x, weights = oracle.samples()["normal"][:3], oracle.weights_of("weighted")
    assert weights is not None
    whole = quantized(team, kind, x, weights)
    for row in range(3):
        np.testing.assert_array_equal(quantized(team, kind, x[row : row + 1], weights), whole[row : row + 1])
    flipped = quantized(team, kind, x[:, ::-1].copy(), weights[::-1].copy())
    assert oracle.weighted_rmse(x[:, ::-1], flipped, weights[::-1]) == pytest.approx(
        oracle.weighted_rmse(x, whole, weights), rel=0.1
    )


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65504, max_value=65504)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_finite_numbers_stay_finite(team: Team, kind: TensorType, data: st.DataObject) -> None:
    book = codebook(kind)
    limit = min(65504.0, book.largest)
    x = np.clip(data.draw(arrays(np.float32, (1, 256), elements=finite)), -limit, limit).astype(np.float32)
    weights = data.draw(arrays(np.float32, 256, elements=st.floats(0, 1e6, width=32)))
    found = encode_codebook(team, book, x, weights)
    assert found.codes.max() < (len(book.levels) if book.grid is None else len(book.grid))
    assert found.shifts.max() < len(book.shifts)
    assert np.isfinite(dequantize(book.pack(found).reshape(1, -1), kind)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_depend_on_threads_or_neighbours(team: Team, kind: TensorType) -> None:
    x, weights = oracle.samples()["heavy"][:5, :512], np.linspace(1, 2, 512, dtype=np.float32)
    whole = packed(team, kind, x, weights)
    other = Team(3)
    np.testing.assert_array_equal(packed(other, kind, x, weights), whole)
    other.close()
    np.testing.assert_array_equal(np.concatenate([packed(team, kind, row[None], weights) for row in x]), whole)
    assert len(encode_codebook(team, codebook(kind), x[:0]).codes) == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.id not in ("MXFP4", "NVFP4")])
def test_powers_of_two_change_only_the_scales(team: Team, kind: TensorType) -> None:
    x = 64 * oracle.samples()["normal"][:2]  # factors are normal float16
    np.testing.assert_array_equal(quantized(team, kind, 4 * x), 4 * quantized(team, kind, x))


@pytest.mark.parametrize("kind", [T.TQ1_0, T.TQ2_0], ids=lambda kind: kind.name)
def test_ternary_weights_stay_what_they_are(team: Team, kind: TensorType) -> None:
    trits = np.random.default_rng(0).integers(-1, 2, (4, 512))
    x = (trits * np.float32(0.03125)).astype(np.float32)
    np.testing.assert_array_equal(quantized(team, kind, x), x)


@pytest.mark.parametrize("kind", [T.MXFP4, T.NVFP4], ids=lambda kind: kind.name)
def test_numbers_of_fp4_stay_what_they_are(team: Team, kind: TensorType) -> None:
    book, random = codebook(kind), np.random.default_rng(0)
    x = (random.choice(book.levels, (4, 256)) * np.float32(0.125)).astype(np.float32)
    x[:, ::16] = 1.5  # every group uses its whole range
    np.testing.assert_array_equal(quantized(team, kind, x), x)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros(team: Team, kind: TensorType) -> None:
    assert not quantized(team, kind, np.zeros((2, 512), np.float32)).any()


def test_rows_of_partial_blocks_are_refused(team: Team) -> None:
    with pytest.raises(InvalidRequestError, match="300 numbers are not a multiple of IQ2_S's block of 256"):
        encode_codebook(team, codebook(T.IQ2_S), np.zeros(300, np.float32))


def test_a_better_search_is_noticed(team: Team) -> None:
    """The number of tries matters: fewer give larger errors."""
    book, x = codebook(T.IQ3_S), oracle.samples()["heavy"]
    errors = []
    for tries in ((1.6, 1.0, 1), book.tries):
        worse = attrs.evolve(book, tries=tries)
        raw = book.pack(encode_codebook(team, worse, x)).reshape(len(x), -1)
        errors.append(oracle.weighted_rmse(x, dequantize(raw, book.type), None))
    assert errors[1] < 0.99 * errors[0]


def test_types_are_disjoint() -> None:
    assert not {*BLOCK_FORMATS} & {*CODEBOOK_TYPES}
    assert {codebook(kind).type for kind in CODEBOOK_TYPES} == {*CODEBOOK_TYPES}
