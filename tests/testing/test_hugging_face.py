"""Tiny random models of transformers, and the check against them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tiny_variants
from checkpoint_cases import CASES, TRANSFORMERS
from llamacli import InvalidRequestError
from llamacli.checkpoints import Folder
from llamacli.loaders import open_model_file
from llamacli.plugin import INTERLEAVED, MINUS_EXP, PLUS_ONE
from llamacli.plugins import installed_plugins
from llamacli.testing import ConformanceError, HuggingFaceModel, checks_of, hugging_face
from llamacli.testing.vocabularies import vocabulary_size

SIZES = {
    "vocab_size": 128, "max_position_embeddings": 256, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5, "num_local_experts": 2,
    "num_experts_per_tok": 1, "rope_parameters": {"rope_theta": 500.0},
}  # fmt: skip
LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (128, 8), "model.norm.weight": (8,), f"{LAYER}.input_layernorm.weight": (8,),
    f"{LAYER}.self_attn.q_proj.weight": (8, 8), f"{LAYER}.self_attn.k_proj.weight": (4, 8),
    f"{LAYER}.self_attn.v_proj.weight": (4, 8), f"{LAYER}.self_attn.o_proj.weight": (8, 8),
    f"{LAYER}.post_attention_layernorm.weight": (8,), f"{LAYER}.block_sparse_moe.gate.weight": (2, 8),
    f"{LAYER}.mlp.experts.gate_up_proj": (2, 12, 8), f"{LAYER}.block_sparse_moe.experts.0.w2.weight": (8, 6),
    f"{LAYER}.block_sparse_moe.experts.1.w2.weight": (8, 6),
}  # fmt: skip


class Tensor:
    """Tensor of torch, as far as the conversion needs it."""

    def __init__(self, shape: tuple[int, ...]):
        self.array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def is_floating_point(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return id(self)

    def numpy(self) -> np.ndarray:
        return self.array


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Tensors of a mixture of experts, which is what every HuggingFaceModel builds."""
    tensors = {name: Tensor(shape) for name, shape in SHAPES.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    built = SimpleNamespace(**SIZES), SimpleNamespace(state_dict=lambda: tensors)
    monkeypatch.setattr(hugging_face, "_built", lambda of, seed: built)
    return tensors


def test_file_of_a_model(original: dict[str, Tensor], tmp_path: Path) -> None:
    architecture = installed_plugins().architecture("llama")
    path = HuggingFaceModel("any", convert=INTERLEAVED).write(tmp_path / "a.gguf", architecture=architecture)
    file = open_model_file(path, [])
    assert {name: info.shape for name, info in file.tensors.items()} == {
        "token_embd.weight": (128, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate_inp.weight": (2, 8),
        "blk.0.ffn_gate_exps.weight": (2, 6, 8), "blk.0.ffn_up_exps.weight": (2, 6, 8),
        "blk.0.ffn_down_exps.weight": (2, 8, 6),
    }  # fmt: skip
    keys = {key.removeprefix("llama."): file.metadata[key] for key in file.metadata if key.startswith("llama.")}
    assert keys == {
        "vocab_size": 128, "context_length": 256, "embedding_length": 8, "block_count": 1, "feed_forward_length": 6,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 4, "attention.value_length": 4,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5), "expert_count": 2, "expert_used_count": 1,
        "rope.freq_base": 500.0,
    }  # fmt: skip

    def rows(name: str, n_columns: int) -> list[int]:
        return [int(x) // n_columns for x in file.data(name).view(np.float32).reshape(-1, n_columns)[:, 0]]

    assert rows("blk.0.attn_k.weight", 8) == [0, 2, 1, 3]
    assert rows("blk.0.ffn_gate_exps.weight", 8) == [*range(6), *range(12, 18)]
    assert rows("blk.0.ffn_up_exps.weight", 8) == [*range(6, 12), *range(18, 24)]
    assert rows("blk.0.ffn_down_exps.weight", 6) == [*range(8), *range(8)]
    file.close()


def test_names_and_keys_of_a_plugin(original: dict[str, Tensor], tmp_path: Path) -> None:
    original[f"{LAYER}.odd"] = original.pop(f"{LAYER}.input_layernorm.weight")
    model = HuggingFaceModel(
        "any",
        keys={"rope.freq_base": lambda config: config.hidden_size, "context_length": 64},
        tensors={"model.layers.{}.odd": "blk.{}.attn_norm.weight"},
        convert={"attn_norm.weight": PLUS_ONE},
    )
    path = model.write(tmp_path / "a.gguf", architecture=installed_plugins().architecture("llama"))
    file = open_model_file(path, [])
    assert (file.metadata["llama.rope.freq_base"], file.metadata["llama.context_length"]) == (8, 64)
    np.testing.assert_array_equal(file.data("blk.0.attn_norm.weight").view(np.float32).ravel(), np.arange(1, 9))
    file.close()


def test_tensor_without_a_name_is_refused(original: dict[str, Tensor], tmp_path: Path) -> None:
    original[f"{LAYER}.self_attn.odd_proj.weight"] = Tensor((3,))
    problem = r"model\.layers\.\{\}\.self_attn\.odd_proj\.weight \(3,\) of any has no GGUF name that is read; give one"
    with pytest.raises(InvalidRequestError, match=problem):
        HuggingFaceModel("any").write(tmp_path / "a", architecture=installed_plugins().architecture("llama"))


def test_rows_of_interleaved_heads() -> None:
    np.testing.assert_array_equal(
        INTERLEAVED["attn_q.weight"].apply(np.arange(12), {"num_attention_heads": 2}),
        [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11],
    )


def test_decay_rates() -> None:
    np.testing.assert_allclose(MINUS_EXP.apply(np.array([0.0, 1.0], np.float32), {}), [-1, -np.e], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_variants.TRANSFORMERS)
def test_results_of_transformers(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    models = tiny_variants.TRANSFORMERS[name]
    (check,) = (
        check
        for check in checks_of(installed_plugins().architecture(name), transformers=models)
        if check.name == "transformers"
    )
    assert len(check.models()) == 2 * len(models)
    check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")  # of torch, where a traceback looks through modules
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_folders_of_transformers(name: str, tmp_path: Path) -> None:
    """Models that transformers saves, read as folders."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    case, plugins = CASES[name], installed_plugins()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": case["architectures"], **case["config"]}))
    layout = plugins.checkpoint(Folder(tmp_path))
    drawn = dict.fromkeys(key for key in hugging_face.sizes(0) if not key.endswith("token_id"))
    size = {"vocab_size": vocabulary_size("test")}
    config = drawn | case["config"] | case.get("changed", {}) | size
    if "vocab_size_per_layer_input" in config:
        config |= {"vocab_size_per_layer_input": size["vocab_size"]}
    if text := config.get("text_config"):
        config |= {"text_config": text | size}
    kind = config.pop("model_type", case["model_type"])
    model = HuggingFaceModel(kind, config, checkpoint=layout, exact=case.get("exact", 1e-8))
    checks_of(plugins.architecture(layout.architecture), transformers=[model])[0]()


@pytest.mark.slow
def test_wrong_conversion_is_found() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    checks = checks_of(installed_plugins().architecture("llama"), transformers=[HuggingFaceModel("llama")])
    with pytest.raises(ConformanceError, match=r"llama, variant llama-0: against transformers: NMSE"):
        checks[0]()


@pytest.mark.slow
def test_unknown_model_type(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(InvalidRequestError, match="transformers has no model type 'unheard'"):
        HuggingFaceModel("unheard").write(tmp_path / "a", architecture=installed_plugins().architecture("llama"))
