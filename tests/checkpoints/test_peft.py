"""PEFT adapters: equal to llama.cpp's converter, and to the changed checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest

import checkpoint_cases as cases
from llamacli import load_model
from llamacli.checkpoints import Folder, PeftAdapter
from llamacli.errors import ModelFormatError
from llamacli.plugins import Plugins

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "checkpoints.json").read_text())


def converted(adapter: Path, base: Path, out: Path, plugins: Plugins) -> Path:
    folder = Folder(base)
    PeftAdapter(adapter).write(out, plugins.checkpoint(folder), folder.config, f"{base}/config.json")
    return out


@pytest.mark.parametrize("name", sorted(cases.ADAPTERS))
def test_equal_to_the_peer(name: str, tmp_path: Path, plugins: Plugins) -> None:
    base, adapter = cases.write_checkpoint(tmp_path, name), cases.write_adapter(tmp_path, name, **cases.ADAPTERS[name])
    found = cases.summary(converted(adapter, base, tmp_path / "adapter.gguf", plugins))
    expected = GOLDENS[f"adapter of {name}"]
    assert found["tensors"] == expected["tensors"]
    assert found["keys"] == expected["keys"]


@pytest.mark.parametrize(
    ("name", "rslora", "experts"), [("llama_f32", False, ()), ("llama_f32", True, ()), ("qwen3moe", False, (0, 1, 3))]
)
def test_an_adapter_is_the_change_of_its_checkpoint(
    name: str, rslora: bool, experts: tuple[int, ...], tmp_path: Path, plugins: Plugins
) -> None:
    """Compare with a checkpoint whose matrices are W + scale * B @ A."""
    base = cases.write_checkpoint(tmp_path, name)
    adapter = cases.write_adapter(tmp_path, name, experts=experts, use_rslora=rslora)
    path = converted(adapter, base, tmp_path / "adapter.gguf", plugins)
    scale = 16 / (2 if rslora else 4)
    originals, tensors = {}, {}
    for tensor, shape in cases.shapes_of(cases.CASES[name]).items():
        values = cases.random_values(tensor, shape).astype(np.float64)
        originals[tensor] = cases.entry_of(tensor, "F32", shape)
        if cases.is_adapted(tensor, experts):
            stem = f"base_model.model.{tensor.removesuffix('.weight')}"
            b = cases.random_values(f"{stem}.lora_B.weight", (shape[0], 4)).astype(np.float64)
            values = values + scale * b @ cases.random_values(f"{stem}.lora_A.weight", (4, shape[1]))
        tensors[tensor] = ("F32", shape, cases.encoded(values.astype(np.float32), "F32"))
    logits = []
    for change in (False, True):
        cases.write_safetensors(base / "model.safetensors", tensors if change else originals)
        options = {} if change else {"lora_path": path}
        with load_model(base, "fp32", plugins=plugins, **options) as model, model.create_session() as session:
            session.eval(model.tokenizer.encode("then in the end"))
            logits.append(session.logits)
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-4)


@pytest.mark.parametrize(
    ("number", "shape", "texts"),
    [(4, (32, 4), ("an expert 4 of 4",)), (2, (16, 4), ("experts of the shapes", "(16, 4)", "(32, 4)"))],
)
def test_wrong_experts_are_named(
    number: int, shape: tuple[int, int], texts: tuple[str, ...], tmp_path: Path, plugins: Plugins
) -> None:
    base, adapter = cases.write_checkpoint(tmp_path, "qwen3moe"), cases.write_adapter(tmp_path, "qwen3moe")
    at = "base_model.model.model.layers.1.mlp.experts"
    shapes = {f"{at}.{i}.gate_proj.lora_A.weight": (4, 64) for i in (0, number)}
    shapes |= {f"{at}.0.gate_proj.lora_B.weight": (32, 4), f"{at}.{number}.gate_proj.lora_B.weight": shape}
    entries = {name: ("F32", size, bytes(4 * size[0] * size[1])) for name, size in shapes.items()}
    cases.write_safetensors(adapter / "adapter_model.safetensors", entries)
    expect(adapter, base, plugins, "layers.1.mlp.experts.gate_proj", *texts)


def expect(adapter: Path, base: Path, plugins: Plugins, *texts: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        converted(adapter, base, adapter.parent / "out.gguf", plugins)
    assert [text for text in texts if text not in str(caught.value)] == []
    assert not (adapter.parent / "out.gguf").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("alpha_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("alora_invocation_tokens", [1, 2]),
        ("lora_alpha", None),
        ("lora_alpha", True),
    ],
)
def test_fields_that_are_not_supported_are_named(field: str, value: object, tmp_path: Path, plugins: Plugins) -> None:
    base = cases.write_checkpoint(tmp_path, "qwen2")
    expect(cases.write_adapter(tmp_path, "qwen2", **{field: value}), base, plugins, "adapter_config.json", field)


def test_ranks_by_matrix_do_not_fit_rslora(tmp_path: Path, plugins: Plugins) -> None:
    base = cases.write_checkpoint(tmp_path, "qwen2")
    adapter = cases.write_adapter(tmp_path, "qwen2", use_rslora=True, rank_pattern={"q_proj": 2})
    expect(adapter, base, plugins, "use_rslora", "rank")


STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "texts"),
    [
        ({}, ("no tensors",)),
        ({f"{STEM}.lora_A.weight": (4, 64)}, ("q_proj", "no lora_B")),
        ({f"{STEM}.weight": (4, 64)}, (f"{STEM}.weight", "neither lora_A nor lora_B")),
        ({f"{STEM}.lora_A.weight": (4, 64), f"{STEM}.lora_B.weight": (64, 2)}, ("q_proj", "(4, 64)", "(64, 2)")),
        ({"own.proj.lora_A.weight": (4, 64), "own.proj.lora_B.weight": (64, 4)}, ("own.proj", "config.json")),
    ],
)
def test_wrong_tensors_are_named(
    tensors: dict[str, tuple[int, ...]], texts: tuple[str, ...], tmp_path: Path, plugins: Plugins
) -> None:
    base, adapter = cases.write_checkpoint(tmp_path, "qwen2"), cases.write_adapter(tmp_path, "qwen2")
    entries = {name: ("F32", size, bytes(4 * size[0] * size[1])) for name, size in tensors.items()}
    cases.write_safetensors(adapter / "adapter_model.safetensors", entries)
    expect(adapter, base, plugins, *texts)


def test_a_pickle_is_refused(tmp_path: Path, plugins: Plugins) -> None:
    base, adapter = cases.write_checkpoint(tmp_path, "qwen2"), cases.write_adapter(tmp_path, "qwen2")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    expect(adapter, base, plugins, "adapter_model.safetensors is missing", "pickle")


def test_the_base_of_the_configuration_is_found(tmp_path: Path) -> None:
    adapter = cases.write_adapter(tmp_path, "qwen2")
    assert PeftAdapter(adapter).base is None
    assert PeftAdapter(adapter).fields["base_model_name_or_path"] == str(cases.write_checkpoint(tmp_path, "qwen2"))
    assert PeftAdapter(adapter).base == tmp_path / "qwen2"


def test_changes_of_a_matrix_that_becomes_two(tmp_path: Path, plugins: Plugins) -> None:
    base = cases.write_checkpoint(tmp_path, "deepseek2")
    expect(cases.write_adapter(tmp_path, "deepseek2"), base, plugins, "kv_b_proj", "becomes several tensors")
