"""Convolutions of sound in both engines against sums written out."""

import numpy as np
import pytest

from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.graph import Graph, Param, Tensor
from verbs import on_patches

RANDOM = np.random.RandomState(3)


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: tuple[int, int]) -> np.ndarray:
    """Convolve x, [times, freqs, n_in].

    The weight is [n_out, n_in, freq_taps, time_taps].
    """
    height, width = weight.shape[3], weight.shape[2]
    padded = np.pad(x, ((height // 2, height // 2), (width // 2, width // 2), (0, 0))).astype(np.float64)
    return np.array(
        [
            [
                np.einsum("tfc,ocft->o", padded[t : t + height, f : f + width], weight) + bias
                for f in range(0, x.shape[1], stride[1])
            ]
            for t in range(0, x.shape[0], stride[0])
        ]
    )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "n_in", "n_times"),
    [((2, 1), (3, 1), (1, 1), 5, 14), ((2, 1), (3, 1), (2, 1), 16, 14), ((4, 7), (3, 3), (2, 2), 3, 26)],
)
def test_sums_of_all_taps(
    engine: Engine, size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], n_in: int, n_times: int
) -> None:
    weight = RANDOM.standard_normal((32, n_in, kernel[1], kernel[0])).astype(np.float32)
    bias, arrays = RANDOM.standard_normal(32).astype(np.float32), [0]
    per_group = -(-n_times // size[0])
    rows = RANDOM.standard_normal((2 * per_group, size[0], size[1], n_in)).astype(np.float32)
    arrays = [group.reshape(-1, size[1], n_in)[:n_times] for group in np.split(rows, 2)]
    expected = [convolved(array, weight, bias, stride) for array in arrays]
    positions = np.tile(np.arange(per_group, dtype=np.int32), 2)[:, None].repeat(4, 1)
    found = on_patches(
        engine,
        lambda g, x: g.conv_2d(
            x,
            Param(Tensor("w", (32, n_in * kernel[0] * kernel[1])), Tensor("b", (32,))),
            size,
            n_times,
            kernel=kernel,
            stride=stride,
        ),
        rows.reshape(2 * per_group, -1),
        positions=positions,
        weights={"w": weight.reshape(32, -1), "b": bias},
    )
    for sequence, group in zip(expected, np.split(found, 2), strict=True):
        np.testing.assert_allclose(
            group.reshape(-1, *sequence.shape[1:])[: len(sequence)], sequence, atol=2e-5, rtol=1e-5
        )


def test_operands_that_do_not_fit() -> None:
    graph = Graph()
    x = graph.patches(20)
    for shape, size, wrong in (
        ((32, 31), (2, 1), r"w \(32, 31\), taps \(3, 3\), and width 20 of \(2, 1\)"),
        ((32, 90), (2, 0), r"w \(32, 90\), taps \(3, 3\), and width 20 of \(2, 0\)"),
        ((30, 90), (2, 1), "rows of a multiple of 16"),
    ):
        with pytest.raises(PluginError, match=f"conv_2d: .*{wrong}"):
            graph.conv_2d(x, Param(Tensor("w", shape)), size, 9)
    with pytest.raises(PluginError, match=r"conv_2d: taps \(3, 3\) and strides \(3, 1\)"):
        graph.conv_2d(x, Param(Tensor("w", (32, 90))), (2, 1), 9, stride=(3, 1))
