"""Choice of the prefetch distance."""

import json

import numpy as np
import pytest

from arm import HostFunction
from llamacli.kernels import ir, prefetch
from llamacli.kernels.isa import isa
from llamacli.kernels.layout import AHEAD, BLOCK_BYTES, LINEAR
from llamacli.kernels.linear import linear, streaming, tiled_linear
from llamacli.kernels.prefetch import DISTANCES, known_distance, tried_distance
from llamacli.kernels.register_tiles import emit_tile
from llamacli.kernels.registry import packing_of
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import TensorType


@pytest.fixture
def unknown_cpu(tmp_path, monkeypatch):
    """A CPU that the table lacks, and its cache folder."""
    monkeypatch.setattr(prefetch, "host", lambda: ("x86_64-unknown-linux-gnu", "unheard-of", ""))
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    return tmp_path


def trial(seconds):
    return lambda distance: seconds.get(distance, 1.0)


def code_of_tile(packing, ahead):
    """Assembly of a tile of one token with a constant distance."""
    return HostFunction(isa(), 8, lambda b, *args: emit_tile(b, packing, 1, *args, ir.I64(ahead))).assembly


def test_distances_of_known_cpus(monkeypatch):
    for cpu, distance in (("znver4", 1024), ("znver5", 8192)):
        monkeypatch.setattr(prefetch, "host", lambda cpu=cpu: ("", cpu, ""))
        assert known_distance() == distance


@pytest.mark.parametrize("best", DISTANCES)
def test_the_fastest_is_kept(unknown_cpu, best):
    assert known_distance() is None
    assert tried_distance(trial({best: 0.5})) == best
    assert known_distance() == best
    (kept,) = json.loads((unknown_cpu / "prefetch.json").read_text()).values()
    assert kept == best


def test_small_differences_are_noise(unknown_cpu):
    assert tried_distance(trial({1024: 0.97})) == AHEAD


@pytest.mark.parametrize("kept", ["{", "[]", '{"unheard-of avx2": [7]}', "\0"])
def test_a_damaged_file_is_written_anew(unknown_cpu, kept):
    (unknown_cpu / "prefetch.json").write_text(kept)
    assert known_distance() is None
    assert tried_distance(trial({2048: 0.5})) == known_distance() == 2048


def test_a_folder_that_cannot_be_made_costs_a_trial_alone(unknown_cpu, monkeypatch):
    (unknown_cpu / "file").touch()
    monkeypatch.setenv("LLAMACLI_CACHE", str(unknown_cpu / "file" / "cache"))
    assert tried_distance(trial({2048: 0.5})) == 2048
    assert known_distance() is None


def test_choices_of_other_cpus_stay(unknown_cpu, monkeypatch):
    tried_distance(trial({2048: 0.5}))
    monkeypatch.setattr(prefetch, "host", lambda: ("", "another", ""))
    tried_distance(trial({4096: 0.5}))
    assert sorted(json.loads((unknown_cpu / "prefetch.json").read_text()).values()) == [2048, 4096]


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_K, TensorType.IQ2_XS])
def test_the_distance_matters_to_streaming_kernels_alone(kind):
    codes = {code_of_tile(packing_of(kind), ahead) for ahead in (1 << 20, 1 << 21)}
    assert (len(codes) > 1) == (linear(kind) in streaming())


def test_some_kernels_stream():
    assert linear(TensorType.F32) in streaming()
    assert tiled_linear(TensorType.Q8_0) not in streaming()


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
