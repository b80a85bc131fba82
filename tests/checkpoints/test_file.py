"""Hugging Face folders as model files: equal to llama.cpp's converter."""

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import checkpoint_cases as cases
import gguf
from llamacli import load_model
from llamacli.chat.template import ChatTemplate
from llamacli.checkpoints.file import TensorNameMap
from llamacli.conversion import file_type, unchanged, write
from llamacli.errors import ModelFormatError, UnknownArchitectureError
from llamacli.plugins import CHECKPOINTS, Plugins
from llamacli.quantization import TensorType

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "checkpoints.json").read_text())


def converted(name: str, folder: Path, plugins: Plugins) -> Path:
    case, out = cases.CASES[name], folder / f"{name}.gguf"
    kind = TensorType[case["outtype"].upper()] if "outtype" in case else None
    checkpoint = cases.write_checkpoint(folder, name)
    file = plugins.open_folder(checkpoint, kind, folder / case["base"] if "base" in case else None)
    write(unchanged(file, file_type(file.file_type)), out)
    return out


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if cases.CASES[name].get("slow") else ())
        for name in sorted(cases.COMPARED)
    ],
)
def test_equal_to_the_peer(name: str, tmp_path: Path, plugins: Plugins) -> None:
    found, expected = cases.summary(converted(name, tmp_path, plugins)), GOLDENS[name]
    differs = cases.CASES[name].get("differs", ())

    def compared(part: str, results: dict[str, dict[str, str]]) -> dict[str, str]:
        return {key: x for key, x in results[part].items() if not any(re.search(pattern, key) for pattern in differs)}

    assert compared("tensors", found) == compared("tensors", expected)
    assert compared("keys", found) == compared("keys", expected)


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "qwen3moe",
        "gemma3",
        "granite",
        "olmo3",
        "smollm3",
        "phi3",
        "gptoss_mxfp4",
        pytest.param("llama_fp8", marks=pytest.mark.slow),
        pytest.param("bailing3", marks=pytest.mark.slow),
        pytest.param("granite_switch", marks=pytest.mark.slow),
    ],
)
def test_a_folder_runs_like_its_file(name: str, tmp_path: Path, plugins: Plugins) -> None:
    path = converted(name, tmp_path, plugins)
    logits = []
    for source in (path, tmp_path / name):
        with load_model(source, plugins=plugins) as model:
            session = model.create_session()
            session.eval(model.tokenizer.encode("then in the end"))
            logits.append(session.logits)
    np.testing.assert_array_equal(*logits)


def test_conversion_holds_one_tensor(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "mixtral")
    file = plugins.open_folder(folder)
    largest = max(info.n_bytes for info in file.tensors.values())
    write(unchanged(file, file_type("BF16")), tmp_path / "first.gguf", threads=1)  # imports what it needs
    tracemalloc.start()
    write(unchanged(file, file_type("BF16")), tmp_path / "out.gguf", threads=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest + (1 << 18)
    assert peak < sum(info.n_bytes for info in file.tensors.values())


def edited(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def expect(folder: Path, plugins: Plugins, *texts: str, error: type[Exception] = ModelFormatError) -> None:
    with pytest.raises(error) as caught:
        plugins.open_folder(folder)
    for text in texts:
        assert text in str(caught.value)


def test_wrong_folders(tmp_path: Path, plugins: Plugins) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    expect(empty, plugins, "the folder is empty")
    (empty / "model.gguf").touch()
    expect(empty, plugins, "name the file, such as", "model.gguf")
    (empty / "adapter_config.json").touch()
    expect(empty, plugins, "PEFT adapter", "--lora")
    with pytest.raises(ModelFormatError, match="PEFT adapter"):
        load_model(empty, plugins=plugins)


@pytest.mark.parametrize(
    ("field", "value", "texts"),
    [
        ("architectures", None, ("`architectures` is None",)),
        ("architectures", [], ("`architectures` is []",)),
        ("num_hidden_layers", None, ("num_hidden_layers is missing",)),
        ("num_hidden_layers", "two", ("`n_layers` is 'two'", "expected int")),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}, ("rope_scaling", "original_max_position_embeddings")),
        ("rope_scaling", [1], ("rope_scaling is [1]",)),
        ("quantization_config", {"quant_method": "gptq"}, ("quant_method is 'gptq'", "original checkpoint")),
        ("num_hidden_layers", 1, ("has no", "model.layers.1.", "config.json of another model")),
        ("vocab_size", 100, ("token", "beyond vocab_size = 100")),
    ],
)
def test_wrong_configuration(
    field: str, value: object, texts: tuple[str, ...], tmp_path: Path, plugins: Plugins
) -> None:
    folder = cases.write_checkpoint(tmp_path, "qwen2")
    edited(folder, **{field: value})
    expect(folder, plugins, str(folder), *texts)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim": None, "hidden_size": "wide"}, "for field head_dim: TypeError"),
        ({"head_dim": None, "num_attention_heads": 0}, "for field head_dim: ZeroDivisionError"),
    ],
)
def test_defaults_of_missing_fields(fields: dict[str, object], reason: str, tmp_path: Path, plugins: Plugins) -> None:
    """Fields that a plugin computes of others, which are wrong."""
    folder = cases.write_checkpoint(tmp_path, "llama_f32")
    edited(folder, **fields)
    expect(folder, plugins, str(folder), reason)


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("mimo2", {"quantization_config": {"quant_method": "fp8", "store_dtype": "mxfp4"}}, "store_dtype is mxfp4"),
        ("maple", {"norm_topk_prob": False}, "for key vocab_size: ValueError: norm_topk_prob is False, expected True"),
        ("spark2_5", {"hidden_act": "silu"}, "for key vocab_size: ValueError: hidden_act is 'silu', expected 'gelu'"),
        ("bailing3", {"no_kda_lora": False}, "for key kda.safe_gate: ValueError: no_kda_lora is False, expected True"),
        (
            "minimax_01",
            {"layernorm_mlp_beta": 2.0},
            "residual_scale: ValueError: layernorm_*_alpha are [3.5] and betas",
        ),
        ("hunyuan_moe", {"moe_topk": [1, 2]}, "expert_used_count: ValueError: moe_topk is [1, 2], expected one number"),
        ("hy_v4", {"indexer_types": ["full", "half"]}, "ValueError: indexer_types is ['full', 'half'], expected"),
        ("hy_v4", {"mlp_layer_types": ["sparse", "dense"]}, "first_k_dense_replace None: dense blocks must come first"),
        (
            "granite_swa",
            {"layer_rope_theta": [1e4, 5e5]},
            "layer_rope_theta is [10000.0, 500000.0], expected 10000.0, or",
        ),
        ("bailing3_vl", {"mrope_section": [1, 1, 1]}, "mrope_section is [1, 1, 1], expected 8 / 2 in all"),
    ],
)
def test_refused_variants(case: str, fields: dict[str, object], reason: str, tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, case)
    edited(folder, **fields)
    expect(folder, plugins, str(folder), reason)


def test_missing_field_is_named(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "llama_f32")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    expect(folder, plugins, str(folder), "'num_attention_heads' is missing")


def test_configuration_of_another_model(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "qwen3")
    edited(folder, architectures=["MixtralForCausalLM"], num_local_experts=4)
    with pytest.raises(ModelFormatError, match=r"self_attn\.q_norm\.weight.*another model"):
        plugins.open_folder(folder)
    edited(folder, architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ModelFormatError, match=r"attn_q_norm|q_norm"):
        load_model(folder, plugins=plugins)


def test_folders_of_other_classes(tmp_path: Path, plugins: Plugins) -> None:
    """Errors for a folder of GLM under the names of other classes."""
    folder, opened, messages = cases.write_checkpoint(tmp_path, "glm4"), [], []
    classes = sorted(plugins.claimed_architectures(CHECKPOINTS))
    for name in classes:
        edited(folder, architectures=[name])
        try:
            plugins.open_folder(folder)
            opened.append(name)
        except ModelFormatError as error:
            messages.append(str(error))
    assert len(classes) > 80
    assert opened == ["Glm4ForCausalLM", "Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration"]
    assert [message for message in messages if str(folder) not in message] == []


def test_character_map_of_unigram(tmp_path: Path, plugins: Plugins) -> None:
    """Character map of a SentencePiece normalizer, uint8."""
    folder = cases.write_checkpoint(tmp_path, "t5encoder")
    path = folder / "spiece.model"
    path.write_bytes(path.read_bytes() + b"\x1a\x0a\x12\x08\x04\x00\x00\x00\xff\x00\x00\x00")
    found = np.asarray(plugins.open_folder(folder).metadata["tokenizer.ggml.precompiled_charsmap"])
    assert found.dtype == np.uint8
    assert found.tolist() == [4, 0, 0, 0, 255, 0, 0, 0]
    path.write_bytes(b"\x1a\x0a")
    expect(folder, plugins, "spiece.model", "no SentencePiece model")


def test_masked_modernbert(tmp_path: Path, plugins: Plugins) -> None:
    """Encoder of a folder with a head for masked tokens."""
    folder = cases.write_checkpoint(tmp_path, "modernbert")
    shapes = {f"model.{name}": shape for name, shape in cases.shapes_of(cases.CASES["modernbert"]).items()}
    shapes |= {"head.dense.weight": (64, 64), "head.norm.weight": (64,), "decoder.bias": (320,)}
    cases.write_shards(folder, {name: cases.entry_of(name, "BF16", shape) for name, shape in shapes.items()}, 1)
    edited(folder, architectures=["ModernBertForMaskedLM"])
    load_model(folder, plugins=plugins).close()
    assert not any(name.startswith(("cls", "decoder")) for name in plugins.open_folder(folder).tensors)


def test_embeddings_of_speech(tmp_path: Path, plugins: Plugins) -> None:
    """Embeddings of texts behind Qwen3-TTS's network, those of codes as they are."""
    file = plugins.open_folder(cases.write_checkpoint(tmp_path, "qwen3tts"), TensorType.F32)

    def values(name: str) -> np.ndarray:
        shape = cases.CASES["qwen3tts"]["shapes"][f"talker.{name}"]
        bits = np.frombuffer(cases.encoded(cases.random_values(f"talker.{name}", shape), "BF16"), "<u2")
        return (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape).astype(np.float64)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ values(f"text_projection.{name}.weight").T + values(f"text_projection.{name}.bias")

    hidden = linear("linear_fc1", values("model.text_embedding.weight"))
    expected = linear("linear_fc2", hidden / (1 + np.exp(-hidden)))
    found = file.data("token_embd.weight").view(np.float32)
    np.testing.assert_allclose(found[:320], expected, atol=1e-6)
    np.testing.assert_array_equal(found[320:], values("model.codec_embedding.weight"))


def test_camembert(tmp_path: Path, plugins: Plugins) -> None:
    """Folder like one of XLM-RoBERTa, with ids that tokenizer.json alone has."""
    folder = cases.write_checkpoint(tmp_path, "xlm_roberta")
    expected = plugins.open_folder(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("XLMRoberta", "Camembert"))
    (folder / "sentencepiece.bpe.model").touch()
    edited(folder, architectures=["CamembertModel"], model_type="camembert")
    found = plugins.open_folder(folder)
    assert {key: found.pair(key) for key in found.metadata} == {key: expected.pair(key) for key in expected.metadata}
    for name in expected.tensors:
        np.testing.assert_array_equal(found.data(name), expected.data(name))


def test_dense_layers_of_embeddings(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "lfm2_embedding")
    path = folder / "modules.json"
    dense = {"idx": 2, "name": "2", "path": "1_Dense", "type": "pylate.models.Dense.Dense"}
    path.write_text(json.dumps([*json.loads(path.read_text()), dense]))
    expect(folder, plugins, "embedding_length_out", "Dense of modules.json is not read")


@pytest.mark.parametrize("content", ["[", "[{}]", "[1]", '[{"type": 1, "path": ""}]', "3"])
def test_a_damaged_list_of_modules_is_named(content: str, tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "bert")
    (folder / "modules.json").write_text(content)
    expect(folder, plugins, "modules.json: no list of modules, each with type and path")


def test_remote_code(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "qwen2")
    edited(folder, architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    expect(folder, plugins, "OwnForCausalLM", "auto_map", "register_checkpoints", error=UnknownArchitectureError)
    edited(folder, architectures=["Qwen2ForCausalLM"])
    plugins.open_folder(folder)


def test_wrong_tensors(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "mixtral")
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].unlink()
    expect(folder, plugins, "1 of 3 shards are missing", shards[1].name)
    shards[1].write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    expect(folder, plugins, shards[1].name, "Git LFS pointer", "git lfs pull")
    shards[1].write_bytes(whole[: len(whole) // 2])
    expect(folder, plugins, shards[1].name, "truncated")
    shards[1].write_bytes(b"")
    expect(folder, plugins, shards[1].name, "cannot read the file")
    shards[1].write_bytes(shards[0].read_bytes())
    expect(folder, plugins, "as well")
    shards[1].write_bytes(whole)
    edited(folder, num_local_experts=5)
    expect(folder, plugins, "expert 4 of 5 is missing")
    edited(folder, num_local_experts=4)
    plugins.open_folder(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | {"more": shards[0].name}}))
    expect(folder, plugins, "differ from the index", "'more'")


def test_missing_shards_without_an_index(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "mixtral")
    (folder / "model.safetensors.index.json").unlink()
    plugins.open_folder(folder)
    sorted(folder.glob("*.safetensors"))[2].unlink()
    expect(folder, plugins, "2 of 3 shards", "model-00001-of-00003.safetensors", "download the folder again")


def test_tokenizers_that_are_not_read(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "qwen2")
    (folder / "tokenizer.json").write_text('{"model": {"type": "Odd"}}')
    expect(folder, plugins, "tokenizer.json", "'Odd' (model.type)", "take a GGUF file")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    expect(folder, plugins, "own code (auto_map) is not run", "neither tokenizer.json nor tokenizer.model")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("257 'ab' 3", "line 257: 2 bytes, expected 3"),
        ("257 ab 2", "line 257: "),
        ("257", "line 257: "),
        ("", "line 257: "),
    ],
)
def test_a_damaged_vocabulary_of_rwkv_is_named(line: str, told: str, tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "rwkv6")
    path = folder / "rwkv_vocab_v20230424.txt"
    path.write_text(path.read_text("utf-8").replace("257 'th' 2", line), "utf-8")
    expect(folder, plugins, str(path), told)


@pytest.mark.parametrize(
    ("line", "told"),
    [("dGg= x", "line 257: "), ("dGg=", "line 257: "), ("?? 256", "line 257: "),
     ("dGhpbg== 256", "token 256 is not made of two before it"), ("dGg= 480", "token 480 is beyond vocab_size = 480")],
)  # fmt: skip
def test_a_damaged_vocabulary_of_qwen_is_named(line: str, told: str, tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "qwen")
    path = folder / "qwen.tiktoken"
    path.write_text(path.read_text().replace("dGg= 256", line))
    expect(folder, plugins, str(path), told)


@pytest.mark.parametrize(("case", "name"), [("rwkv6", "rwkv_vocab_v20230424.txt"), ("qwen", "qwen.tiktoken")])
def test_a_missing_vocabulary_is_named(case: str, name: str, tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, case)
    (folder / name).unlink()
    expect(folder, plugins, f"{folder}: {name} is missing")


def test_tensors_that_no_plugin_knows_by_themselves(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "llama")
    (folder / "config.json").unlink()
    expect(folder, plugins, "config.json is missing")


def test_missing_mixes_of_rwkv(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "rwkv6")
    shapes = cases.shapes_of(cases.CASES["rwkv6"])
    del shapes["rwkv.blocks.1.attention.time_maa_g"]
    cases.write_shards(folder, {name: cases.entry_of(name, "BF16", shape) for name, shape in shapes.items()}, 1)
    expect(folder, plugins, "rwkv.blocks.1.attention.time_maa_w", "(4, 1, 1, 64), expected 5 mixes")


def test_pickles_are_not_read(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    expect(folder, plugins, "pickle", "save_pretrained")


@pytest.mark.parametrize(
    ("tokens", "told"),
    [([0, 319], "from 0 to 320, and the model has 320"), ([-1, 0], "-1 to 1"), ([1, 0], "are equal")],
)
def test_wrong_tokens_of_a_draft_head(tmp_path: Path, plugins: Plugins, tokens: list[int], told: str) -> None:
    folder = cases.write_checkpoint(tmp_path, "eagle3")
    cases.write_safetensors(folder / "model.safetensors", {"d2t": ("I64", (2,), np.array(tokens).tobytes())})
    file = plugins.open_folder(folder, base=tmp_path / "llama3_deep")
    with pytest.raises(ModelFormatError, match=f"tensor 'd2t': ValueError: ids of tokens .*{told}"):
        file.data("d2t")


def test_tokens_of_another_type_and_layers_of_another_model(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "eagle3")
    edited(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 7])
    with pytest.raises(ModelFormatError, match=r"layers \[1, 2, 7\], and its model has 6"):
        plugins.open_folder(folder, base=tmp_path / "llama3_deep")
    edited(folder, eagle_aux_hidden_state_layer_ids=None)
    cases.write_safetensors(folder / "model.safetensors", {"d2t": ("I32", (2,), bytes(8))})
    with pytest.raises(ModelFormatError, match="'d2t' is of I32, expected I64"):
        plugins.open_folder(folder, base=tmp_path / "llama3_deep").data("d2t")


def test_draft_heads_with_a_pickle_are_refused(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "dflash")
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(ModelFormatError, match=r"dflash: tokenizer: ValueError: mask_embedding\.pt is a pickle"):
        plugins.open_folder(folder, base=tmp_path / "qwen3")


def test_float8_without_scales(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "llama")
    cases.write_safetensors(folder / "model.safetensors", {"model.norm.weight": ("F8_E4M3", (64,), bytes(64))})
    expect(folder, plugins, "model.norm.weight", "float8 without", "_scale_inv")


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (1, 2)])
def test_float8_with_scales_of_another_shape(tmp_path: Path, plugins: Plugins, shape: tuple[int, ...]) -> None:
    folder, name = cases.write_checkpoint(tmp_path, "llama_fp8"), "model.layers.0.self_attn.q_proj.weight"
    tensors = {name: ("F8_E4M3", (64, 64), bytes(64 * 64))}
    tensors[f"{name}_scale_inv"] = cases.entry_of(name, "F32", shape)
    cases.write_safetensors(folder / "model.safetensors", tensors)
    expect(folder, plugins, f"{name}_scale_inv", f"{shape}: expected (2, 2)", "(64, 64) in blocks of (32, 32)")


@pytest.mark.parametrize("block", [5, "x", [0, 0], [32], [32, "a"], [32, 32, 32], {"a": 1}])
def test_float8_with_blocks_of_another_kind(tmp_path: Path, plugins: Plugins, block: object) -> None:
    folder = cases.write_checkpoint(tmp_path, "llama_fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (folder / "config.json").write_text(json.dumps(config))
    expect(folder, plugins, "config.json: quantization_config.weight_block_size is", repr(block))


def test_blocks_without_scales_and_of_other_shapes(tmp_path: Path, plugins: Plugins) -> None:
    name = "model.layers.0.mlp.experts.down_proj_"
    folder = cases.write_checkpoint(tmp_path, "gptoss_mxfp4")
    shapes = cases.shapes_of(cases.CASES["gptoss_mxfp4"])
    tensors = {tensor: cases.entry_of(tensor, "BF16", shape) for tensor, shape in shapes.items()}
    del tensors[f"{name}scales"]
    cases.write_shards(folder, tensors, 1)
    expect(folder, plugins, "model.safetensors", f"{name}blocks", f"has no '{name}scales' beside it")
    tensors[f"{name}scales"] = cases.entry_of(f"{name}scales", "BF16", (4, 64, 2))
    cases.write_shards(folder, tensors, 1)
    expect(folder, plugins, f"{name}blocks", "(4, 64, 3, 16)", "expected (4, 64, 2, 16)")


@pytest.mark.parametrize(
    ("name", "fields", "texts"),
    [
        ("dots3_note", {"use_dsa": False}, ("sliding_window_pattern", "use_dsa is False, expected True")),
        ("dots3_note", {"swa_q_lora_rank": 16}, ("swa_q_lora_rank is 16, expected 32",)),
        ("dots3_note", {"layer_types": ["full_attention"]}, ("layer_types has 1 entries, expected 2",)),
        ("glm5_next", {"mhc": False}, ("hyper_connection.count", "mhc is false")),
        ("glm5_next", {"mla_use_nope": False}, ("mla_use_nope is False",)),
        ("glm5_next", {"layer_types": []}, ("layer_types has 0 entries",)),
        ("kimi_k3", {"hidden_act": "silu"}, ("hidden_act is 'silu', expected 'situ'",)),
    ],
)
def test_fields_that_a_graph_takes_for_granted(
    name: str, fields: dict[str, object], texts: tuple[str, ...], tmp_path: Path, plugins: Plugins
) -> None:
    folder = cases.write_checkpoint(tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    expect(folder, plugins, "config.json", *texts)


def test_experts_of_four_bits_with_faults(tmp_path: Path, plugins: Plugins) -> None:
    expert = "language_model.model.layers.1.block_sparse_moe.experts.1.w1.weight"
    folder = cases.write_checkpoint(tmp_path, "kimi_k3")
    shapes = cases.shapes_of(cases.CASES["kimi_k3"])
    good = {tensor: cases.entry_of(tensor, "BF16", shape) for tensor, shape in shapes.items()}
    dtype, shape, raw = good[f"{expert}_scale"]
    cases.write_shards(folder, good | {f"{expert}_scale": ("F8_E4M3", shape, raw)}, 1)
    expect(folder, plugins, f"{expert}_scale", "F8_E4M3", "MXFP4 is read")
    cases.write_shards(folder, good | {f"{expert}_scale": (dtype, shape[::-1], raw)}, 1)
    expect(folder, plugins, f"{expert}_packed", "(64, 48)", "expected (3, 1024)")
    del good[f"{expert}_packed"], good[f"{expert}_scale"]
    cases.write_shards(folder, good | {expert: cases.entry_of(expert, "BF16", (64, 96))}, 1)
    expect(folder, plugins, expert.replace("experts.1", "experts.0"), "have different types")


def test_a_special_token_that_is_missing(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "glm4")
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|user|>", "<|you|>"))
    expect(folder, plugins, "tokenizer_config.json", "no '<|user|>'")


def test_settings_of_the_tokenizer_that_are_missing(tmp_path: Path, plugins: Plugins) -> None:
    folder = cases.write_checkpoint(tmp_path, "arctic")
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"unk_token"', '"unknown"'))
    expect(folder, plugins, f"{folder}: tokenizer: 'unk_token' is missing")


def test_names_of_one_architecture_are_not_those_of_others() -> None:
    name = "model.layers.0.post_attention_layernorm"
    before = TensorNameMap(gguf.MODEL_ARCH.LLAMA, 1).get_name(name)
    for arch in gguf.MODEL_ARCH_NAMES:
        TensorNameMap(arch, 1)
    assert TensorNameMap(gguf.MODEL_ARCH.LLAMA, 1).get_name(name) == before == "blk.0.ffn_norm"


def test_templates_of_folders_for_sound_are_of_chats(tmp_path: Path, plugins: Plugins) -> None:
    with load_model(cases.write_checkpoint(tmp_path, "qwen3asr"), plugins=plugins) as model:
        template = ChatTemplate(model.metadata["tokenizer.chat_template"], model.tokenizer)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b\n"}]
    said = "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb\n<|im_end|>\n"
    assert template.render(messages).text == said
    assert template.render(messages, add_generation_prompt=True).text == f"{said}<|im_start|>assistant\n"
