"""LoRA adapters compared with llama.cpp's recorded results, and files that are refused."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import CASES, write_adapter
from conftest import LoadTiny, TinyGguf
from gguf import GGMLQuantizationType as Type
from llamacli import InvalidRequestError, Model, ModelFormatError, load_model
from llamacli.engine import Engine, default_engine
from llamacli.engine.adapters import Adapter, checked_adapters, key_of
from llamacli.loaders import open_model_file
from llamacli.plugins import Plugins
from llamacli.testing.models import write_gguf
from oracle.adapters import PATH, digests
from oracle.goldens import N_CTX, POSITIONS, TOKENS, nmse
from tiny_variants import VARIANTS

SLOW = {"biases", "two", "shared_expert", "softcapped", "expert_biases", "no_alpha"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
ROUNDED = {"f16": 1e-6, "q8_0": 1e-3}
"""Bounds of the error where llama.cpp rounds activations and `fp32` mode does not."""


def logits(model: Model, adapters: list[tuple[Adapter, float]]) -> np.ndarray:
    with model.create_session(n_ctx=N_CTX, adapters=adapters, reuse=False) as session:
        return session.eval(TOKENS.tolist(), all_logits=True)[POSITIONS]


@pytest.mark.parametrize("name", NAMES)
def test_adapted_models_match_llama_cpp(name: str, tiny_gguf: TinyGguf, load_tiny: LoadTiny, tmp_path: Path) -> None:
    case, path = CASES[name], tiny_gguf(CASES[name].variant)
    given = case.write(path, tmp_path)
    with np.load(PATH) as goldens:
        assert str(goldens[f"{name} sha256"]) == digests(path, given), "its writer changed: record the goldens again"
        expected = goldens[name]
    with load_tiny(case.variant) as model:
        adapters = [(model.load_adapter(file), scale) for file, scale in given]
        found, plain = logits(model, adapters), logits(model, [])
        assert nmse(expected, found) <= max(ROUNDED.get(name, 0.0), VARIANTS[case.variant].exact)
        assert nmse(expected, plain) > 1e-2, "the adapter changes too little for a test"
        without = logits(model, [(adapter, 0.0) for adapter, _ in adapters])
        np.testing.assert_array_equal(without, plain)


def _matrix(name: str) -> bool:
    return name.startswith("blk.") and "lerp" not in name


def _plain(values: Any) -> list[Any]:
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


@pytest.mark.parametrize("variant", ["deepseek2", "deepseek2_legacy", "rwkv7"])
def test_adapters_equal_merged_weights(
    variant: str, tiny_gguf: TinyGguf, load_tiny: LoadTiny, engine: Engine, plugins: Plugins, tmp_path: Path
) -> None:
    """Matrices a head and of time mixing, which llama.cpp refuses or ignores."""
    file = write_adapter(tmp_path / "a.gguf", tiny_gguf(variant), alpha=None, chosen=_matrix)
    base, changes = open_model_file(tiny_gguf(variant), []), open_model_file(file, [])
    merged = {}
    for name, info in base.tensors.items():
        array = base.data(name).view(np.float32).reshape(info.shape)
        if f"{name}.lora_a" in changes.tensors:
            a, b = (
                changes.data(part).view(np.float32).reshape(changes.tensors[part].shape)
                for part in (f"{name}.lora_a", f"{name}.lora_b")
            )
            array = array + b @ a
        merged[name] = array, Type.F32
    keys = {
        key: value if isinstance(value, str | bool | int | float) else _plain(value)
        for key, value in base.metadata.items()
    }
    write_gguf(tmp_path / "merged.gguf", keys.pop("general.architecture"), keys, merged)
    with (
        load_tiny(variant) as model,
        load_model(tmp_path / "merged.gguf", "fp32", plugins=plugins, engine=engine) as other,
    ):
        found = logits(model, [(model.load_adapter(file), 1.0)])
        assert nmse(logits(other, []), found) < 1e-10
        assert nmse(logits(model, []), found) > 1e-2


@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0"])
def test_an_adapter_changes_a_quantized_model_as_its_exact_one(
    stored: str, load_tiny: LoadTiny, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    file = write_adapter(tmp_path / "a.gguf", tiny_gguf("q8_0"), rank=32, alpha=8.0, stored=stored)
    results = []
    for mode in ("fp32", "auto"):
        with load_tiny("q8_0", mode) as model:
            results.append(logits(model, [(model.load_adapter(file), 1.0)]))
    assert nmse(*results) <= 5e-3


def test_tied_embeddings_are_adapted_and_the_output_layer_is_not(
    load_tiny: LoadTiny, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    file = write_adapter(tmp_path / "a.gguf", tiny_gguf("arcee_tied"), chosen=lambda name: name == "token_embd.weight")
    with load_tiny("arcee_tied") as model:
        adapter = model.load_adapter(file)
        changed = [tensor.name for op in model.program_with(((adapter, 1.0),)).graph.ops for tensor in op.tensors()]
        assert sum(".lora_a" in name for name in changed) == 1
        assert nmse(logits(model, []), logits(model, [(adapter, 1.0)])) > 1e-2


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    with load_model(tiny_gguf(), "fp32", plugins=plugins, engine=default_engine()) as model:
        yield model


def attention(name: str) -> bool:
    return name == "blk.0.attn_q.weight"


Q = "blk.0.attn_q.weight"
WRONG: dict[str, tuple[Mapping[str, Any], str]] = {
    "no adapter": ({"metadata": {"general.type": "model"}}, "general.type is 'model'.*'adapter'"),
    "no type": ({"metadata": {"general.type": None}}, "general.type"),
    "control vector": ({"metadata": {"adapter.type": "cvec"}}, "adapter.type is 'cvec'.*'lora'"),
    "other architecture": ({"metadata": {"general.architecture": "qwen2"}}, "general.architecture is 'qwen2'.*'llama'"),
    "alpha is text": ({"metadata": {"adapter.lora.alpha": "six"}}, "adapter.lora.alpha"),
    "aLoRA": (
        {"metadata": {"adapter.alora.invocation_tokens": [1, 2]}},
        r"adapter\.alora\.invocation_tokens.*not supported",
    ),
    "A alone": ({"tensors": {f"{Q}.lora_b": None}}, f"tensor {Q}.lora_b is missing beside {Q}.lora_a"),
    "B alone": ({"tensors": {f"{Q}.lora_a": None}}, f"tensor {Q}.lora_a is missing beside {Q}.lora_b"),
    "suffix": ({"tensors": {Q: np.ones((2, 2))}}, f"tensor {Q} ends in neither .lora_a nor .lora_b"),
    "unknown tensor": (
        {"tensors": {"blk.9.attn_q.weight.lora_a": np.ones((4, 64)), "blk.9.attn_q.weight.lora_b": np.ones((64, 4))}},
        "tensor blk.9.attn_q.weight.lora_a changes blk.9.attn_q.weight, which the model does not have",
    ),
    "shape of A": ({"tensors": {f"{Q}.lora_a": np.ones((4, 63))}}, rf"{Q}.lora_a \(4, 63\).*expected \(rank, 64\)"),
    "shape of B": ({"tensors": {f"{Q}.lora_b": np.ones((63, 4))}}, rf"{Q}.lora_b \(63, 4\).*\(64, rank\)"),
    "rank": (
        {"tensors": {f"{Q}.lora_b": np.ones((64, 5))}},
        f"tensor {Q}.lora_a has rank 4, and {Q}.lora_b has rank 5",
    ),
    "not finite": ({"tensors": {f"{Q}.lora_b": np.full((64, 4), np.nan)}}, rf"{Q}.lora_b.*NaN"),
    "vector": (
        {
            "tensors": {
                "blk.0.attn_norm.weight.lora_a": np.ones((4, 64)),
                "blk.0.attn_norm.weight.lora_b": np.ones((1, 4)),
            }
        },
        "blk.0.attn_norm.weight, which rms_norm reads: it cannot be adapted",
    ),
    "embeddings": (
        {"tensors": {"token_embd.weight.lora_a": np.ones((4, 64)), "token_embd.weight.lora_b": np.ones((128, 4))}},
        r"token_embd.weight \(128, 64\), expected \(128, rank\) and \(64, rank\)",
    ),
    "empty": ({"chosen": lambda name: False}, "the adapter has no tensors"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_fit_are_refused(
    options: Mapping[str, Any], message: str, model: Model, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    file = write_adapter(tmp_path / "wrong.gguf", tiny_gguf(), **{"chosen": attention, **options})
    with pytest.raises(ModelFormatError, match=message) as caught:
        model.load_adapter(file)
    assert "wrong.gguf" in str(caught.value)


def test_norms_of_an_adapter_are_left_out_with_a_warning(
    model: Model, tiny_gguf: TinyGguf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    norm = {"blk.0.attn_norm.weight": np.ones(64)}
    plain, normed = (
        model.load_adapter(write_adapter(tmp_path / f"{len(more)}.gguf", tiny_gguf(), chosen=attention, tensors=more))
        for more in ({}, norm)
    )
    assert "blk.0.attn_norm.weight is left out" in caplog.text
    np.testing.assert_array_equal(logits(model, [(plain, 1.0)]), logits(model, [(normed, 1.0)]))


def test_changes_of_keys_that_layers_share_are_left_out_with_a_warning(
    load_tiny: LoadTiny, tiny_gguf: TinyGguf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some layers of Gemma 3n use the keys of others."""
    path = tiny_gguf("gemma3n_shared")
    with load_tiny("gemma3n_shared") as model:
        layers = [int(name.split(".")[1]) for name in model._shapes if name.endswith("attn_k.weight")]
        read = {tensor.name for op in model.program.graph.ops for tensor in op.tensors()}
        shared = {i for i in layers if f"blk.{i}.attn_k.weight" not in read}

        def adapter(name: str, chosen: set[int]) -> Adapter:
            names = {f"blk.{i}.attn_k.weight" for i in chosen}
            return model.load_adapter(write_adapter(tmp_path / name, path, chosen=names.__contains__))

        whole, used = adapter("whole.gguf", {*layers}), adapter("used.gguf", {*layers} - shared)
        assert f"tensor blk.{min(shared)}.attn_k.weight.lora_a is left out" in caplog.text
        np.testing.assert_array_equal(logits(model, [(whole, 1.0)]), logits(model, [(used, 1.0)]))
        with pytest.raises(ModelFormatError, match="changes what the forward pass does not read"):
            adapter("none.gguf", shared)


def test_a_model_and_a_missing_file_are_no_adapters(model: Model, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"general\.type"):
        model.load_adapter(tiny_gguf())
    with pytest.raises(FileNotFoundError):
        model.load_adapter(tmp_path / "none.gguf")


@pytest.mark.parametrize("scale", ["1", None, True, float("nan"), float("inf"), 1j])
def test_scales_are_finite_numbers(scale: Any, model: Model, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    adapter = model.load_adapter(write_adapter(tmp_path / "a.gguf", tiny_gguf(), chosen=attention))
    with pytest.raises(InvalidRequestError, match=r"the scale of the adapter .*a\.gguf must be a finite number, not"):
        model.create_session(adapters=[(adapter, scale)])


def test_the_order_of_adapters_and_those_of_scale_0_do_not_matter(
    model: Model, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    one, two = (
        model.load_adapter(write_adapter(tmp_path / f"{seed}.gguf", tiny_gguf(), chosen=attention, seed=seed))
        for seed in "ab"
    )
    assert checked_adapters([one, (two, 2)]) == checked_adapters([(two, 2.0), (one, 1.0)])
    assert checked_adapters([(one, 0.0), (two, 2)]) == ((two, 2.0),)
    assert key_of(checked_adapters([(one, 0.0)])) == ""
    with pytest.raises(InvalidRequestError, match="there twice"):
        checked_adapters([one, (one, 0.5)])
    with pytest.raises(InvalidRequestError, match="adapters are those of load_adapter"):
        model.create_session(adapters=["a.gguf"])  # type: ignore[list-item]
