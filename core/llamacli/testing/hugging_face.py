"""Tiny random models of Hugging Face's transformers, as the reference of results.

torch and transformers are not dependencies: whoever compares with them installs both.
"""

from __future__ import annotations

import functools
import math
import random
import re
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gguf import TENSOR_NAMES, GGMLQuantizationType, TensorNameMap
from llamacli.architecture import Architecture
from llamacli.checkpoints import Checkpoint, CheckpointFile, Conversion, Folder
from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata
from llamacli.quantization import TensorType
from llamacli.testing.models import SIGMA, write_gguf
from llamacli.testing.vocabularies import vocabulary, vocabulary_size

Array = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class HuggingFaceModel:
    """Model of transformers that an architecture is compared with.

    `config` are arguments of the configuration of `model_type`; sizes that it lacks are drawn at random, and those that
    are None are left out. `keys` are
    GGUF keys, without the architecture's name, that do not follow from the configuration: values, or functions of it.
    `tensors` are GGUF names by the original ones, both with `{}` for the block, where `gguf`'s own map has none that
    the architecture reads. `convert` are conversions by the name of the GGUF tensor in its block, such as
    `"attn_q.weight"`. With a `checkpoint`, keys and tensors are those of the saved model's folder instead, as this
    layout reads it. `exact` is the bound of the NMSE of fp32 mode against torch.
    """

    model_type: str
    config: Mapping[str, Any] = attrs.field(factory=dict)
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    tensors: Mapping[str, str] = attrs.field(factory=dict)
    convert: Mapping[str, Conversion] = attrs.field(factory=dict)
    checkpoint: Checkpoint | None = None
    exact: float = 1e-8

    def write(self, path: str | Path, *, architecture: Architecture, seed: int = 0) -> Path:
        """Write the model of a seed as GGUF; return its path.

        Raises InvalidRequestError for a tensor without a GGUF name, ImportError without torch and transformers.
        """
        config, model = _built(self, seed)
        name = architecture.name
        found, arrays = self._of_folder(config, model) if self.checkpoint else (self._metadata(config, name), {})
        values = {"general.architecture": name, **vocabulary("test"), **found}
        metadata = Metadata(
            {key: np.array(value) if isinstance(value, list) else value for key, value in values.items()}, str(path)
        )
        table = architecture.tensors(architecture.configure(metadata))
        shapes = table.shapes() | table.shapes(fused=True)
        if not self.checkpoint:
            weights = _with_stacked_experts({name: tensor.numpy() for name, tensor in _weights(model).items()})
            arrays = {
                target: array
                for source, original in weights.items()
                for target, array in self._converted(source, original, config, shapes)
            }
        tensors = {
            target: (np.ascontiguousarray(array, np.float32), GGMLQuantizationType.F32)
            for target, array in arrays.items()
        }
        own = {f"{name}.{key}" for key in self.keys}
        kept = {key: x for key, x in values.items() if not key.startswith(f"{name}.") or key in metadata.consumed | own}
        write_gguf(path, name, {key: x for key, x in kept.items() if key != "general.architecture"}, tensors)
        return Path(path)

    def run(self, tokens: Sequence[int], n_prompt: int, n_greedy: int, seed: int = 0) -> Results:
        """Run torch on tokens, and decode greedily after the first `n_prompt`."""
        import torch

        _, model = _built(self, seed)

        def logits(ids: Sequence[int]) -> Array:
            with torch.no_grad():
                return np.asarray(model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy())

        ids, gaps = list(tokens[:n_prompt]), []
        for _ in range(n_greedy):
            row = logits(ids)[-1]
            second, first = np.sort(row)[-2:]
            gaps.append(float(first - second))
            ids.append(int(row.argmax()))
        return Results(logits(tokens), ids[n_prompt:], gaps)

    def _metadata(self, config: Any, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, fields in KEYS.items():
            value = next((x for field in fields if (x := getattr(config, field, None)) is not None), None)
            if isinstance(value, bool | int | float):
                found[key] = value
        if not found.get("expert_count"):
            found = {key: value for key, value in found.items() if not key.startswith("expert_")}
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_theta" in rope:
            found["rope.freq_base"] = float(rope["rope_theta"])
        if "partial_rotary_factor" in rope:
            head_dim = found.get("attention.key_length") or found["embedding_length"] // found["attention.head_count"]
            found["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
        found |= {key: value(config) if callable(value) else value for key, value in self.keys.items()}
        return {f"{name}.{key}": value for key, value in found.items() if value is not None}

    def _of_folder(self, config: Any, model: Any) -> tuple[dict[str, Any], dict[str, Array]]:
        """Keys of the architecture, and tensors, of the model's folder."""
        assert self.checkpoint is not None
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            file = CheckpointFile(Folder(Path(folder)), attrs.evolve(self.checkpoint, vocabulary=()), TensorType.F32)
            prefix = f"{self.checkpoint.architecture}."
            keys = {key: file.metadata.peek(key) for key in file.metadata if key.startswith(prefix)}
            keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in keys.items()}
            if f"{prefix}expert_count" not in keys:
                keys = {key: value for key, value in keys.items() if not key.startswith(f"{prefix}expert_")}
            arrays = {
                name: file.data(name).view(np.float32).reshape(info.shape).copy() for name, info in file.tensors.items()
            }
        return keys | {f"{prefix}vocab_size": config.get_text_config().vocab_size}, arrays

    def _converted(
        self, source: str, array: Array, config: Any, shapes: Mapping[str, tuple[int, ...]]
    ) -> list[tuple[str, Array]]:
        target = self._target(source, array, shapes)
        parts = [(target, array)]
        if "ffn_gate_up_exps" in target and target not in shapes:  # experts' gate above up in one tensor
            gate, up = np.split(array, 2, axis=1)
            parts = [(target.replace("gate_up", "gate"), gate), (target.replace("gate_up", "up"), up)]
        found = []
        for name, part in parts:
            if convert := self.convert.get(re.sub(r"^blk\.\d+\.", "", name)):
                part = convert.apply(part, vars(config))
            shape = shapes.get(name, part.shape)
            found.append((name, part.reshape(shape) if part.size == math.prod(shape) else part))
        return found

    def _target(self, source: str, array: Array, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """GGUF name of a tensor; InvalidRequestError for none or several."""
        block = re.search(r"\.(\d+)\.", source)
        number = block[1] if block else ""
        plain = re.sub(r"\.\d+\.", ".{}.", source, count=1)
        if plain in self.tensors:
            return self.tensors[plain].replace("{}", number)
        stem, dot, kind = plain.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, dot, kind = plain, "", ""
        endings = (f"{dot}{kind}",) if kind else ("", ".weight")
        names = [name.replace("{}", number) + ending for name in _names().get(stem, ()) for ending in endings]
        candidates = list(dict.fromkeys(name for name in names if _is_read(name, shapes)))
        fitting = [name for name in candidates if math.prod(shapes.get(name, array.shape)) == array.size]
        if len(fitting or candidates) != 1:
            found = f"several GGUF names, {', '.join(candidates)}" if candidates else "no GGUF name that is read"
            raise InvalidRequestError(
                f"{plain} {array.shape} of {self.model_type} has {found}; give one in `tensors` of its HuggingFaceModel"
            )
        return (fitting or candidates)[0]


@attrs.frozen(eq=False)
class Results:
    """Results of torch.

    `logits` float32 [n_tokens, n_vocab]; `greedy` the ids decoded after the prompt, and by how much the logit of each
    was larger than the next best, `gaps`.
    """

    logits: Array
    greedy: list[int]
    gaps: list[float]


KEYS: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim", "head_dim"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.state_size": ("state_size",),
    "ssm.group_count": ("n_groups",),
}
"""GGUF keys, and the fields of configurations that they are read from."""


def sizes(seed: int) -> dict[str, Any]:
    """Sizes of a configuration, drawn at random."""
    draw = random.Random(seed)
    head_dim, n_head_kv = draw.choice([16, 32]), draw.choice([1, 2])
    n_head = n_head_kv * draw.choice([1, 2, 4])
    epsilon = draw.choice([1e-6, 1e-5])
    epsilons = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return dict.fromkeys(epsilons, epsilon) | {
        "vocab_size": vocabulary_size("test"), "max_position_embeddings": 256, "hidden_size": n_head * head_dim,
        "num_hidden_layers": draw.randint(2, 3), "intermediate_size": 32 * draw.randint(2, 5),
        "num_attention_heads": n_head, "num_key_value_heads": n_head_kv, "head_dim": head_dim,
        "moe_intermediate_size": 32 * draw.randint(1, 3), "num_experts_per_tok": draw.randint(1, 3), "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


@functools.cache
def _built(of: HuggingFaceModel, seed: int) -> tuple[Any, Any]:
    """Configuration and model of a seed; InvalidRequestError for an unknown type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        drawn = sizes(seed)
        fields = {
            key: value for key, value in (drawn | dict(of.config)).items() if value is not None or key not in drawn
        }
        config = AutoConfig.for_model(of.model_type, **fields)
    except ValueError as error:
        raise InvalidRequestError(f"transformers has no model type {of.model_type!r}: {error}") from error
    has_text = config.get_text_config() is config
    auto: Any = AutoModelForCausalLM if has_text else AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in _weights(model).items():
            noise = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode())).standard_normal(tensor.shape) * SIGMA
            tensor.mul_(1 if tensor.ndim < 2 else 0).add_(torch.from_numpy(np.asarray(noise, np.float32)))
    return config, model


def _weights(model: Any) -> dict[str, Any]:
    found: dict[int, tuple[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def _with_stacked_experts(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors with single experts, `experts.3.`, stacked as `experts.`."""
    stacks: dict[str, list[Array]] = {}
    for name, array in arrays.items():
        if (joined := re.sub(r"\.experts\.\d+\.", ".experts.", name)) != name:
            stacks.setdefault(joined, []).append(array)
    rest = {name: array for name, array in arrays.items() if not re.search(r"\.experts\.\d+\.", name)}
    return rest | {name: np.stack(parts) for name, parts in stacks.items()}


@functools.cache
def _names() -> dict[str, list[str]]:
    """GGUF names by the original ones, with `{}` for the block.

    These are the maps of all architectures of `gguf`, and those of experts that transformers 5 holds in one tensor.
    """
    found: dict[str, list[str]] = {}
    maps = [TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg]
    for names in (*maps, *TensorNameMap.arch_block_mappings_cfg.values()):
        for tensor, originals in names.items():
            for original in originals:
                found.setdefault(_with_block(original), []).append(_with_block(TENSOR_NAMES[tensor]))
    for prefix in ("model.layers.{}.mlp", "model.layers.{}.block_sparse_moe", "model.layers.{}.feed_forward"):
        found.setdefault(f"{prefix}.experts.gate_up_proj", []).append("blk.{}.ffn_gate_up_exps")
        found.setdefault(f"{prefix}.experts.down_proj", []).append("blk.{}.ffn_down_exps")
    return found


def _with_block(name: str) -> str:
    return name.replace("{bid}", "{}")


def _is_read(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """True for tensors of the table, also as `gate_up` of experts."""
    return name in shapes or ("ffn_gate_up_exps" in name and name.replace("gate_up", "gate") in shapes)
