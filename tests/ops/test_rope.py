import math

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import Graph, ModelFormatError, Rope
from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.gguf import Metadata
from verbs import on_patches


def read(**keys: object) -> Rope:
    metadata = Metadata({"a.context_length": 4096} | {f"a.rope.{key.replace('__', '.')}": v for key, v in keys.items()})
    return Rope.from_gguf(metadata, "a", 64, interleaved=False)


def naive_table(rope: Rope, position: int, factors: np.ndarray | None = None) -> tuple[list[float], list[float]]:
    """Formulas of the papers in float64, one pair at a time."""
    cos, sin = [], []
    for pair in range(rope.n_dims // 2):
        frequency = rope.base ** (-2 * pair / rope.n_dims)
        if factors is not None:
            frequency /= float(factors[pair])
        interpolated = frequency * rope.freq_scale
        magnitude = rope.attn_factor
        if rope.ext_factor:
            rotations = rope.n_ctx_orig * rope.base ** (-2 * pair / rope.n_dims) / (2 * math.pi)
            low, high = (
                rope.n_dims * math.log(rope.n_ctx_orig / (beta * 2 * math.pi)) / (2 * math.log(rope.base))
                for beta in (rope.beta_fast, rope.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), rope.n_dims - 1)
            kept = 1 - min(1, max(0, (pair - low) / max(high - low, 0.001)))
            assert kept == 1 or rotations < rope.beta_fast * 2, "only slow pairs are interpolated"
            interpolated = interpolated * (1 - kept * rope.ext_factor) + frequency * kept * rope.ext_factor
            if rope.freq_scale < 1:
                magnitude *= 1 + 0.1 * math.log(1 / rope.freq_scale)
        cos.append(magnitude * math.cos(position * interpolated))
        sin.append(magnitude * math.sin(position * interpolated))
    return cos, sin


YARN = Rope(64, False, freq_scale=1 / 8, ext_factor=1.0, n_ctx_orig=1024)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(64, True),
        Rope(2, True),
        Rope(64, False, base=500000.0),
        Rope(64, False, freq_scale=0.25),
        Rope(64, False, attn_factor=1.3),
        YARN,
        Rope(128, False, base=150000.0, freq_scale=1 / 32, ext_factor=1.0, n_ctx_orig=4096),
        Rope(64, False, freq_scale=1.0, ext_factor=1.0, n_ctx_orig=1024),
        Rope(64, False, freq_scale=1 / 4, ext_factor=0.5, attn_factor=0.7, beta_fast=16, beta_slow=2, n_ctx_orig=64),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 100, 5000])
def test_tables_follow_the_papers(rope: Rope, position: int) -> None:
    factors = np.linspace(1, 4, rope.n_dims // 2).astype(np.float32)
    for given_factors in (None, factors):
        cos, sin = rope.table([position], given_factors)
        assert cos.dtype == sin.dtype == np.float32
        expected_cos, expected_sin = naive_table(rope, position, given_factors)
        rounding = 1e-6 * (1 + position)  # of a float32 angle of so many radians
        np.testing.assert_allclose(cos[0], expected_cos, atol=rounding)
        np.testing.assert_allclose(sin[0], expected_sin, atol=rounding)


@given(st.integers(0, 100000), st.integers(1, 40), st.data())
def test_a_position_has_one_angle(start: int, n: int, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, n - 1))
    rope = data.draw(st.sampled_from([Rope(16, True), YARN]))
    for whole, alone in zip(rope.table(range(start, start + n)), rope.table([start + i]), strict=True):
        np.testing.assert_array_equal(whole[i], alone[0])


def test_yarn_scales_the_magnitude() -> None:
    cos, sin = YARN.table([7])
    np.testing.assert_allclose(np.hypot(cos, sin), 1 + 0.1 * math.log(8), rtol=1e-6)


class TestFromGguf:
    def test_defaults(self) -> None:
        assert read() == Rope(64, False, n_ctx_orig=4096)

    def test_plain_keys(self) -> None:
        rope = read(dimension_count=32, freq_base=5e5)
        assert (rope.n_dims, rope.base) == (32, 5e5)

    def test_linear(self) -> None:
        assert read(scaling__type="linear", scaling__factor=4.0).freq_scale == 0.25
        assert read(scaling__factor=4.0).freq_scale == 0.25
        assert read(scale_linear=2.0).freq_scale == 0.5
        assert read(scale_linear=2.0, scaling__factor=8.0).freq_scale == 0.125
        assert read(scaling__factor=0.0).freq_scale == 1.0
        assert read(scaling__type="none", scaling__factor=4.0).freq_scale == 1.0

    def test_yarn(self) -> None:
        keys = {
            "scaling__type": "yarn", "scaling__factor": 16.0, "scaling__original_context_length": 2048,
            "scaling__attn_factor": 0.9, "scaling__yarn_beta_fast": 16.0, "scaling__yarn_beta_slow": 2.0,
        }  # fmt: skip
        plain = Rope(64, False, freq_scale=1 / 16, ext_factor=1.0, n_ctx_orig=2048)
        assert read(**keys) == attrs.evolve(plain, attn_factor=0.9, beta_fast=16.0, beta_slow=2.0)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("dimension_count", 66),
            ("dimension_count", 0),
            ("dimension_count", 31),
            ("freq_base", 1.0),
            ("freq_base", -1e4),
            ("freq_base", math.inf),
            ("freq_base", "1e4"),
            ("scaling__type", "dynamic"),
            ("scaling__type", 1),
            ("scaling__factor", -4.0),
            ("scale_linear", -4.0),
            ("scaling__original_context_length", 0),
            ("scaling__yarn_beta_fast", 0.0),
            ("scaling__yarn_beta_slow", -1.0),
        ],
    )
    def test_invalid_values(self, key: str, value: object) -> None:
        with pytest.raises(ModelFormatError, match=f"a.rope.{key.replace('__', '.')}"):
            read(**{key: value})


def test_axial_frequencies_begin_anew(engine: Engine) -> None:
    """Each component has the frequencies of a RoPE of half the width."""
    variant = Rope(16, interleaved=False, base=50.0, components=(1,) * 4 + (2,) * 4, axial=True)
    rows = np.random.RandomState(8).standard_normal((600, 32)).astype(np.float32)
    places = np.random.RandomState(9).randint(0, 40, (600, 4)).astype(np.int32)
    found = on_patches(engine, lambda g, x: g.rope(x, variant, 16), rows, positions=places)
    heads = rows.reshape(600, 2, 2, 8).astype(np.float64)
    angles = np.concatenate([places[:, [i]] * 50.0 ** (-np.arange(4) / 4) for i in (1, 2)], 1)[:, None]
    a, b = heads[:, :, 0], heads[:, :, 1]
    expected = np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)
    np.testing.assert_allclose(found, expected.reshape(600, 32), atol=2e-5)


@pytest.mark.parametrize("components", [(1, 2, 1, 2), (1, 1, 1, 2)])
def test_axial_components_are_whole_sections(components: tuple[int, ...]) -> None:
    graph = Graph()
    with pytest.raises(PluginError, match="rope: axial frequencies and position components"):
        graph.rope(graph.patches(16), Rope(8, interleaved=False, components=components, axial=True), 8)
