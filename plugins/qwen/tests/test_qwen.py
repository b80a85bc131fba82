"""Hyperparameters and invalid files of Qwen.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_qwen import Qwen2, Qwen2Moe, Qwen2Vl, Qwen3, Qwen3Moe, Qwen3Vl, Qwen3VlMoe
from tiny_qwen import CLASSIFIERS, UNREAD, VARIANTS, write_qwen

VISION = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
NAMES = ("qwen2", "qwen2moe", "qwen3", "qwen3moe", *VISION)
MIXTURES = ("qwen2moe", "qwen3moe", "qwen3vlmoe")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins([EntryPoint(name, "llamacli_qwen", ARCHITECTURES) for name in NAMES])


@pytest.fixture
def load(plugins: Plugins, tmp_path: Path) -> Any:
    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_qwen(tmp_path / "model.gguf", architecture=architecture, **{"n_head_kv": 2} | options)
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks(
    [Qwen2(), Qwen2Moe(), Qwen2Vl(), Qwen3(), Qwen3Moe(), Qwen3Vl(), Qwen3VlMoe()],
    VARIANTS | CLASSIFIERS,
    unread=UNREAD,
    slow=pytest.mark.slow,
)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_metadata_selects_the_architecture(name: str, load: Any) -> None:
    assert load(name).arch == name


@pytest.mark.parametrize("name", NAMES)
def test_fused_projections_are_equivalent(name: str, load: Any) -> None:
    random = np.random.default_rng(0)
    parts = {"attn_q": 64, "attn_k": 32, "attn_v": 32}
    apart, fused = {}, {}
    for i in range(2):
        rows = {part: random.normal(0, 0.1, (n_out, 64)) for part, n_out in parts.items()}
        apart |= {f"blk.{i}.{part}.weight": weight for part, weight in rows.items()}
        fused[f"blk.{i}.attn_qkv.weight"] = np.concatenate(list(rows.values()))
    logits = [
        load(name, biases=False, fused=tensors is fused, tensors=tensors)
        .create_session()
        .eval([1, 2, 3], all_logits=True)
        for tensors in (apart, fused)
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", MIXTURES)
def test_default_expert_width(name: str, load: Any) -> None:
    config = load(name, n_ff=120, n_expert_used=3).config
    assert config.n_ff_expert == 40
    assert config.n_ff_shared == (120 if name == "qwen2moe" else 0)
    config = load(name, n_ff=120, n_ff_expert=64, n_ff_shared=32).config
    assert config.n_ff_expert == 64
    assert config.n_ff_shared == (32 if name == "qwen2moe" else 0)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("expert_count", 0, "'{key}' is 0; at least 1 is needed"),
        ("expert_count", None, "'{key}' is missing"),
        ("expert_used_count", 0, "'{key}' is 0; at least 1 is needed"),
        ("expert_used_count", None, "'{key}' is missing"),
        ("expert_used_count", 9, "{key} = 9 does not fit {name}.expert_count = 8"),
        ("expert_count", 4, r"blk.0.ffn_gate_inp.weight has shape (8, 64), expected (4, 64); .*{key} = 4"),
        ("expert_feed_forward_length", 7, r"blk.0.ffn_gate_exps.weight has shape .*expected (8, 7, 64); .*{key} = 7"),
    ],
)
def test_expert_counts_that_contradict_the_file(name: str, key: str, value: Any, problem: str, load: Any) -> None:
    key = f"{name}.{key}"
    pattern = ".*".join(map(re.escape, problem.format(key=key, name=name).split(".*")))
    with pytest.raises(ModelFormatError, match=pattern):
        load(name, metadata={key: value})


@pytest.mark.parametrize("name", NAMES)
def test_head_counts_that_contradict_the_file(name: str, load: Any) -> None:
    key = f"{name}.attention.head_count_kv"
    with pytest.raises(ModelFormatError, match=rf"blk.0.attn_k.weight has shape \(32, 64\).*{re.escape(key)} = 1"):
        load(name, metadata={key: 1})


@pytest.mark.parametrize("name", ["qwen2", "qwen2moe"])
def test_unexpected_query_norm(name: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor blk.0.attn_q_norm.weight \(16,\) is not one"):
        load(name, tensors={"blk.0.attn_q_norm.weight": np.ones(16)})


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("dimension_sections", None, "'{key}' is missing"),
        ("dimension_sections", "t", "'{key}' .*'t'"),
        ("dimension_sections", [4, 2, 2], "'{key}' .*4"),
        ("dimension_sections", [4, 2, 2, -1], "'{key}' .*-1"),
        (
            "dimension_sections",
            [0, 0, 0, 8],
            r"{key} = \[0, 0, 0, 8\], expected a sum of at most the head width 16 and one",
        ),
        ("dimension_sections", [8, 8, 8, 0], r"{key} = \[8, 8, 8, 0\], expected a sum of at most the head width 16"),
        ("dimension_count", 12, "{key} = 12, expected the head width 16"),
    ],
)
def test_sections_of_mrope(name: str, key: str, value: Any, problem: str, load: Any) -> None:
    key = f"{name}.rope.{key}"
    with pytest.raises(ModelFormatError, match=problem.format(key=re.escape(key))):
        load(name, metadata={key: value})


@pytest.mark.parametrize(
    ("name", "sections", "head_dim", "fixed"),
    [
        ("qwen2vl", [16, 24, 24, 0], 128, []),
        ("qwen2vl", [2, 1, 2, 3], 16, [5, 6, 7]),
        ("qwen2vl", [1, 1, 0, 1], 16, [2, 5]),
        ("qwen3vl", [24, 20, 20, 0], 128, [61, 62]),
        ("qwen3vl", [6, 5, 5, 0], 32, []),
        ("qwen3vlmoe", [2, 1, 1, 0], 16, []),
        ("qwen3vlmoe", [1, 0, 0, 1], 16, [1, 3, 5, 7]),
    ],
)
def test_pairs_that_mrope_does_not_rotate(
    name: str, sections: list[int], head_dim: int, fixed: list[int], load: Any
) -> None:
    rope = load(
        name, head_dim=head_dim, n_head=64 // head_dim or 1, n_head_kv=1, n_embd=max(64, head_dim), sections=sections
    ).config.rope
    assert [i for i, component in enumerate(rope.components) if component == 3] == fixed
    cos, sin = rope.table(range(5, 8))
    assert [i for i in range(head_dim // 2) if (cos[:, i] == 1).all() and (sin[:, i] == 0).all()] == fixed


@pytest.mark.parametrize("name", VISION)
def test_fixed_pairs_keep_the_magnitude_of_yarn(name: str, load: Any) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    keys = {f"{name}.rope.scaling.{key}": value for key, value in scaling.items()}
    rope = load(name, sections=[2, 1, 1, 3], metadata=keys).config.rope
    cos, sin = rope.table([5])
    fixed = np.array(rope.components) == 3
    assert fixed.any()
    np.testing.assert_array_equal(cos[0, fixed], rope.table([0])[0][0, 0])
    np.testing.assert_array_equal(sin[0, fixed], 0)


@pytest.mark.parametrize("name", VISION)
def test_keys_rotated_by_sections_can_be_moved(name: str, load: Any) -> None:
    tokens = list(range(3, 23))
    model = load(name, n_layer=1, sections=[2, 1, 1, 3])
    with model.create_session() as session, model.create_session() as other:
        session.eval(tokens)
        session.remove_range(0, 5)
        session.eval([7])
        other.eval([*tokens[5:], 7])
        np.testing.assert_allclose(session.logits, other.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", VISION)
def test_output_bias_is_refused(name: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor output.bias .* is not one"):
        load(name, output_bias=True)


@pytest.mark.parametrize("value", [None, -1.0, "x"])
def test_epsilon_of_qwen2vl(value: object, load: Any) -> None:
    key = "qwen2vl.attention.layer_norm_rms_epsilon"
    with pytest.raises(ModelFormatError, match=key):
        load("qwen2vl", metadata={key: value})
    assert load("qwen2vl", metadata={key: 1e-3}).config.rms_eps == pytest.approx(1e-3)
