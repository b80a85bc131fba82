"""Choice of the prefetch distance."""

import json

import numpy as np
import pytest

from llamacli.kernels import prefetch
from llamacli.kernels.layout import BLOCK_BYTES, LINEAR
from llamacli.kernels.linear import linear
from llamacli.kernels.prefetch import DEFAULT, DISTANCES, prefetch_distance
from llamacli.kernels.registry import packing_of
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import TensorType


@pytest.fixture
def unknown_cpu(tmp_path, monkeypatch):
    """A CPU that the table lacks, and its cache folder."""
    monkeypatch.setattr(prefetch, "host", lambda: ("x86_64-unknown-linux-gnu", "unheard-of", ""))
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    return tmp_path


def trial(seconds, calls=None):
    def measure(distance):
        if calls is not None:
            calls.append(distance)
        return seconds.get(distance, 1.0)

    return measure


def test_a_known_cpu_needs_no_trial(monkeypatch):
    for cpu, distance in (("znver4", 1024), ("znver5", 8192)):
        monkeypatch.setattr(prefetch, "host", lambda cpu=cpu: ("", cpu, ""))
        assert prefetch_distance(None) == prefetch_distance(trial({2048: 0.1})) == distance


@pytest.mark.parametrize("best", DISTANCES)
def test_the_fastest_is_kept(unknown_cpu, best):
    assert prefetch_distance(trial({best: 0.5})) == best
    calls = []
    assert prefetch_distance(trial({}, calls)) == best
    assert calls == []
    (kept,) = json.loads((unknown_cpu / "prefetch.json").read_text()).values()
    assert kept == best


def test_small_differences_are_noise(unknown_cpu):
    assert prefetch_distance(trial({1024: 0.97})) == DEFAULT


def test_a_small_model_decides_nothing(unknown_cpu):
    assert prefetch_distance(None) == DEFAULT
    assert not (unknown_cpu / "prefetch.json").exists()


@pytest.mark.parametrize("kept", ["{", "[]", '{"unheard-of avx2": [7]}', "\0"])
def test_a_damaged_file_is_written_anew(unknown_cpu, kept):
    (unknown_cpu / "prefetch.json").write_text(kept)
    assert prefetch_distance(trial({2048: 0.5})) == prefetch_distance(None) == 2048


def test_a_full_or_foreign_folder_costs_a_trial_alone(unknown_cpu):
    unknown_cpu.chmod(0o500)
    try:
        assert prefetch_distance(trial({2048: 0.5})) == 2048
    finally:
        unknown_cpu.chmod(0o700)


def test_choices_of_other_cpus_stay(unknown_cpu, monkeypatch):
    prefetch_distance(trial({2048: 0.5}))
    monkeypatch.setattr(prefetch, "host", lambda: ("", "another", ""))
    prefetch_distance(trial({4096: 0.5}))
    assert sorted(json.loads((unknown_cpu / "prefetch.json").read_text()).values()) == [2048, 4096]


@pytest.mark.parametrize("kind", [TensorType.Q4_K, TensorType.Q8_0, TensorType.F16])
def test_bits_do_not_depend_on_it(kind):
    packing, random = packing_of(kind), np.random.default_rng(0)
    n_blocks, n_tiles = 512 // packing.block, 4
    tile = n_blocks * packing.n_bytes
    weight = random.integers(0x38, 0x3C, n_tiles * tile + max(DISTANCES), np.uint8)
    x = random.integers(0x38, 0x3C, (1, 16 * BLOCK_BYTES[packing.activation]), np.uint8)
    bias, outs = np.zeros(16 * n_tiles, np.float32), []
    for ahead in (0, *DISTANCES):
        out = np.zeros((1, 16 * n_tiles), np.float32)
        run_kernel(
            Team(2), linear(kind), LINEAR, n_rows=1, ahead=ahead, weight=weight, tile_bytes=tile, n_tiles=n_tiles,
            n_blocks=n_blocks, x=x, x_stride=x.strides[0], out=out, out_stride=out.strides[0], bias=bias, n_groups=1,
        )  # fmt: skip
        outs.append(out.tobytes())
    assert len(set(outs)) == 1
    assert np.frombuffer(outs[0], np.float32).any()
