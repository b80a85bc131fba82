"""Tiny text models with mmproj files, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from gguf import GGMLQuantizationType as Type
from llamacli import Model
from llamacli.architecture import Architecture
from llamacli.chat.context import plan
from llamacli.chat.media import marked, media_inputs, with_pictures
from llamacli.chat.template import Rendering
from llamacli.inputs import Inputs
from llamacli.media.encoder import MediaEncoder, Medium
from llamacli.testing.models import write_gguf
from llamacli.testing.tiny import write_architecture
from llamacli.testing.tiny_media import PICTURES, mmproj_contents
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli_gemma.gemma3 import Gemma3
from llamacli_gemma.siglip import Gemma3Vision
from llamacli_gemma.unified import Gemma4Unified
from llamacli_gemma.vision import Gemma4Vision
from llamacli_lfm.vision import Lfm2Vision
from llamacli_llama import Llama
from llamacli_llama.idefics3 import Idefics3
from llamacli_llama.internvl import InternVl
from llamacli_llama.llava import Llava
from llamacli_llama.mistral3 import Mistral3
from llamacli_llama.pixtral import Pixtral
from llamacli_qwen import Qwen2Vl, Qwen3Vl
from llamacli_qwen.hybrid import Qwen35
from llamacli_qwen.vision import Qwen2Vision, Qwen3Vision, Qwen25Vision

N_EMBD = 64
"""Embedding length of the text models."""

SPECIAL = [
    "<bos>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<start_of_image>", "<end_of_image>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<bos>{% endif %}"
)
TYPED_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {% for line in m['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
"""Template whose messages are lists of parts, as those of models that see have it."""

THINNED = 16
"""Step between the rows in goldens of pictures whose names begin with "large"."""


@attrs.frozen
class Case:
    """Architecture of a text model, and a media encoder.

    `keys` are those of its file beside VISION, `text_keys` those of the text model; `special` are further tokens.
    """

    text: Architecture
    encoder: MediaEncoder
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    text_keys: Mapping[str, Any] = attrs.field(factory=dict)
    special: tuple[str, ...] = ()
    pictures: Mapping[str, tuple[int, int]] = attrs.field(factory=lambda: PICTURES)


_QWEN = ("<|vision_start|>", "<|vision_end|>")
_INTERNVL = tuple(f"v.blk.{i}.attn_{name}_norm.weight" for i in range(2) for name in "qk")
_LLAVA = tuple(f"mm.{i}.{kind}" for i in (1, 3, 4) for kind in ("weight", "bias"))
_GEMMA4 = {
    "patch_size": 4,
    "image_size": 200,
    "projector.scale_factor": 2,
    "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3,
}
_GEMMA4_TOKENS = ("<|image>", "<image|>")
_BIAS = ("v.patch_embd.bias",)
_BIASES = tuple(
    f"v.blk.{i}.{name}.bias"
    for i in range(2)
    for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
)
_CLAMPS = {"clamps": True, "without": (*_BIAS, *_BIASES)}
_WINDOW = {"attention.sliding_window": 16}
_LFM2 = (
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11) if row * column <= 10),
)
_IMG_END = ("[IMG_END]",)
_PIXTRAL = {"gelu": False, "silu": True, "without": ("mm.patch_merger.weight", "mm.input_norm.weight")}
_NO_SCALE = {"projector.scale_factor": None}
_SECTIONS = {"rope.dimension_sections": [4, 2, 2, 0]}
_NO_EPSILON = {"attention.layer_norm_rms_epsilon": 0.0}  # the peer does not read qwen2vl's

CASES = {
    "idefics3": Case(Llama(), Idefics3(), {"preproc_image_size": 96}),
    "idefics3 without edge": Case(Llama(), Idefics3()),
    "idefics3 swapped": Case(Llama(), Idefics3(), {"preproc_image_size": 64}, {"swapped": True}),
    "idefics3 quick": Case(Llama(), Idefics3(), {"preproc_image_size": 64, "patch_size": 4}, {"gelu": False}),
    "gemma3": Case(Gemma3(), Gemma3Vision(), text_keys={"attention.sliding_window": 16}),
    "gemma3 odd": Case(
        Gemma3(),
        Gemma3Vision(),
        {"patch_size": 7, "image_size": 84, "projector.scale_factor": 4, "embedding_length": 72},
        text_keys={"attention.sliding_window": 16},
    ),
    "idefics3 f16": Case(Llama(), Idefics3(), {"preproc_image_size": 64}, {"type": "F16"}),
    "qwen3vl": Case(
        Qwen3Vl(),
        Qwen3Vision(),
        {"spatial_merge_size": 2, "is_deepstack_layers": [True, False, True], "block_count": 3} | _NO_SCALE,
        {"fused": True},
        {"n_deepstack_layers": 2} | _SECTIONS,
        _QWEN,
    ),
    "qwen35": Case(
        Qwen35(),
        Qwen3Vision(),
        {"spatial_merge_size": 2, "is_deepstack_layers": [False] * 2, "embedding_length": 64, "attention.head_count": 4}
        | _NO_SCALE,
        {"fused": True},
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 16,
            "rope.dimension_sections": [3, 3, 2, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 64,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
            "ssm.group_count": 2,
            "full_attention_interval": 2,
        },
        _QWEN,
    ),
    "qwen2vl": Case(
        Qwen2Vl(),
        Qwen2Vision(),
        {"feed_forward_length": 192} | _NO_SCALE,
        {"gelu": False, "without": _BIAS},
        _NO_EPSILON | _SECTIONS,
        _QWEN,
    ),
    "qwen2.5vl": Case(
        Qwen2Vl(),
        Qwen25Vision(),
        {"n_wa_pattern": 2, "block_count": 3, "patch_size": 28, "image_size": 56} | _NO_SCALE,
        {"gelu": False, "silu": True, "without": _BIAS},
        _NO_EPSILON | _SECTIONS,
        _QWEN,
    ),
    "pixtral": Case(Llama(), Pixtral(), {"projector.scale_factor": None, "patch_size": 4}, _PIXTRAL, special=_IMG_END),
    "mistral3": Case(
        Mistral3(),
        Pixtral(),
        {"spatial_merge_size": 2} | _NO_SCALE,
        {"gelu": False, "silu": True},
        special=_IMG_END,
    ),
    "lfm2": Case(
        Llama(),
        Lfm2Vision(),
        {"patch_size": 16, "image_size": 64},
        special=_LFM2,
        pictures=PICTURES | {"large": (1060, 530)},
    ),
    "lfm2 without norm": Case(
        Llama(),
        Lfm2Vision(),
        {"patch_size": 16, "image_size": 64},
        {"without": ("mm.input_norm.weight", "mm.input_norm.bias")},
        special=_LFM2,
    ),
    "internvl": Case(
        Llama(), InternVl(), {"preproc_max_tiles": 4}, {"without": _INTERNVL}, special=("<img>", "</img>")
    ),
    "internvl norms": Case(Llama(), InternVl(), special=("<img>", "</img>")),
    "llava": Case(Llama(), Llava(), _NO_SCALE, {"gelu": False, "without": _LLAVA}),
    "llava tiles": Case(
        Llama(),
        Llava(),
        {"image_grid_pinpoints": [32, 64, 64, 32, 64, 64, 96, 32, 32, 96]} | _NO_SCALE,
        {"gelu": False, "without": _LLAVA},
    ),
    "llava yi": Case(Llama(), Llava(), _NO_SCALE, {"gelu": False, "without": ("mm.2.weight", "mm.2.bias")}),
    "gemma4v": Case(Gemma3(), Gemma4Vision(), _GEMMA4, _CLAMPS, _WINDOW, _GEMMA4_TOKENS),
    "gemma4v silu": Case(
        Gemma3(),
        Gemma4Vision(),
        _GEMMA4,
        {"gelu": False, "silu": True, "without": ("v.std_bias", "v.std_scale", *_BIAS)},
        _WINDOW,
        _GEMMA4_TOKENS,
    ),
    "gemma4uv": Case(
        Gemma3(),
        Gemma4Unified(),
        _GEMMA4 | {"block_count": 0, "attention.head_count": 0, "feed_forward_length": 0},
        {"convolution": False},
        _WINDOW,
        _GEMMA4_TOKENS,
    ),
    "gemma3 q8_0": Case(
        Gemma3(),
        Gemma3Vision(),
        {"embedding_length": 64, "attention.head_count": 2, "feed_forward_length": 96},
        {"type": "Q8_0"},
        {"attention.sliding_window": 16},
    ),
}
"""Cases by the name of their golden."""


def write_text(path: Path, name: str, *, typed: bool = False, special: Sequence[str] = SPECIAL) -> Path:
    """Write the text model of a case.

    With `typed`, its template takes lists of parts.
    """
    case = CASES[name]
    return write_words(path, case.text, case.text_keys, (*special, *case.special), seed=f"media {name}", typed=typed)


def write_words(
    path: Path, text: Architecture, keys: Mapping[str, Any], special: Sequence[str], *, seed: str, typed: bool = False
) -> Path:
    """Write a text model with special tokens."""
    kinds = dict.fromkeys(special, CONTROL)
    words = byte_level(["\n \n"], kinds, bos_token_id=257, eos_token_id=258, add_bos_token=False)
    words["tokenizer.ggml.tokens"][256:257] = ["\u010a\u010a"]
    n_vocab = len(words["tokenizer.ggml.tokens"])
    words |= {
        "tokenizer.ggml.merges": ["\u010a \u010a"],
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.token_type": [int(kind) for kind in words["tokenizer.ggml.token_type"]],
        "tokenizer.chat_template": TYPED_TEMPLATE if typed else TEMPLATE,
        f"{text.name}.vocab_size": n_vocab,
    }
    keys = {"embedding_length": N_EMBD, "context_length": 1024, **keys}
    return write_architecture(path, architecture=text, keys=keys, metadata=words, seed=seed)


def write_mmproj(path: Path, name: str, *, keys: Mapping[str, Any] | None = None, seed: str = "", **wrong: Any) -> Path:
    """Write the mmproj file of a case.

    Shapes are those that llama.cpp's converter writes. `wrong` are full metadata keys that the tensors do not follow.
    """
    case = CASES[name]
    options = dict(case.options)
    swapped, clamps = options.pop("swapped", False), options.pop("clamps", False)
    given = {**case.keys, **(keys or {})}
    metadata, found = mmproj_contents(case.encoder, keys=given, seed=f"{name}{seed}", **options)
    tensors: dict[str, tuple[np.ndarray, Type]] = {}
    for tensor, (array, stored) in found.items():
        if swapped:
            old, new = ("ffn_up", "ffn_down") if "ffn_up" in tensor else ("ffn_down", "ffn_up")
            tensor = tensor.replace(old, new)
        tensors[tensor] = array, stored
        if clamps and ".blk." in tensor and array.ndim == 2:
            for bound, value in (("input_min", -0.7), ("input_max", 0.9), ("output_min", -0.5), ("output_max", 0.4)):
                tensors[tensor.replace("weight", bound)] = np.array([value], np.float32), Type.F32
    write_gguf(path, "clip", metadata | wrong, tensors)
    return path


def prompt(model: Model, before: str, medium: Medium, after: str) -> Inputs:
    """Inputs of a text with a picture or sound in it."""
    encoder = model.media_encoder()
    (message,), media = marked([{"content": [medium, after]}])
    layouts = {marker: encoder.layout(one) for marker, one in media.items()}
    text = before + message["content"]
    rendering = with_pictures(Rendering(text, [text]), layouts, encoder, model.tokenizer)
    planned = plan([], rendering.parts, model.create_chat_codec().template.encode)
    inputs = media_inputs(planned.parts, 0, lambda: encoder)
    assert inputs is not None
    assert inputs.keys == planned.ids
    return inputs
