"""Random Hugging Face folders, written without transformers."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import checkpoint_models

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER, _SHORT = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
DEEPSEEK_SPLIT = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
INCLUDED = "{% include 'chat_template.jinja' %}"


# --- safetensors -----------------------------------------------------------------------------------------------------


def random_values(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Values of a tensor, by its name."""
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32) * np.float32(0.05)


def encoded(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Bytes of values in a dtype of safetensors."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write a safetensors file of dtypes, shapes and bytes by name."""
    header, offset = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def write_shards(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], n_shards: int) -> None:
    """Write tensors as shards with an index, or one file."""
    if n_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names, weight_map = list(tensors), {}
    for i in range(n_shards):
        shard = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        part = names[i * len(names) // n_shards : (i + 1) * len(names) // n_shards]
        write_safetensors(folder / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- tokenizers ------------------------------------------------------------------------------------------------------


def byte_characters() -> list[str]:
    """Characters for the 256 bytes in byte-level BPE, in GPT-2's order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


def write_bpe(
    folder: Path,
    split: str | tuple[str, ...] | None = QWEN2_SPLIT,
    *,
    ignore_merges: bool = False,
    bos: bool = False,
    kind: str = "PreTrainedTokenizerFast",
    more: Iterable[str] = (),
    chat_template: str = TEMPLATE,
) -> int:
    """Write tokenizer.json of a byte-level BPE; return the number of tokens."""
    merges = [("\u0120", "t"), ("h", "e"), ("i", "n"), ("\u0120t", "he"), ("e", "r"), ("o", "n"), ("\u0120", "a")]
    texts = [*byte_characters(), *("".join(pair) for pair in merges)]
    vocab = {text: i for i, text in enumerate(texts)}
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *more]
    tokens = [
        {"id": len(vocab) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": text not in ("<tool>", "</assistant>")}
        for i, text in enumerate(added)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": split is None}
    pre = byte_level
    if split is not None:
        isolated = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in ([split] if isinstance(split, str) else split)
        ]
        pre = {"type": "Sequence", "pretokenizers": [*isolated, byte_level]}
    post: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if bos:
        first = {"SpecialToken": {"id": added[0], "type_id": 0}}
        a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        entry = {added[0]: {"id": added[0], "ids": [tokens[0]["id"]], "tokens": [added[0]]}}
        template = {"type": "TemplateProcessing", "single": [first, a], "pair": [first, a, first, b],
                    "special_tokens": entry}  # fmt: skip
        post = {"type": "Sequence", "processors": [post, template]}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
             "vocab": vocab, "merges": [list(pair) for pair in merges]}  # fmt: skip
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
               "pre_tokenizer": pre, "post_processor": post, "decoder": byte_level, "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": kind, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "model_max_length": 256, "chat_template": chat_template, "clean_up_tokenization_spaces": False,
                "added_tokens_decoder": {str(token["id"]): {k: v for k, v in token.items() if k != "id"}
                                         for token in tokens}}  # fmt: skip
    if bos:
        settings["bos_token"] = added[0]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(texts) + len(added)


def write_unigram(folder: Path) -> int:
    """Write spiece.model of the kind Unigram; return the number of pieces."""
    pieces: list[tuple[str, float, int]] = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
    texts = ["\u2581", "\u2581the", "in", "en", *"abcdefghijklmnopqrstuvwxyz"]
    pieces += [(text, -2.0 - i / 4, 1) for i, text in enumerate(texts)]
    encoded_pieces = [
        _field(1, text.encode()) + _field(2, score) + (_field(3, kind) if kind != 1 else b"")
        for text, score, kind in pieces
    ]
    trainer = _field(3, 1) + _field(4, len(pieces)) + _field(40, 2) + _field(42, 1) + _field(43, 0)
    normalizer = _field(1, b"identity") + _field(3, 1) + _field(4, 1)
    model = b"".join(_field(1, piece) for piece in encoded_pieces) + _field(2, trainer) + _field(3, normalizer)
    (folder / "spiece.model").write_bytes(model)
    settings = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(pieces)


def write_xlm_roberta(folder: Path, *, json_only: bool) -> int:
    """Write a Unigram as tokenizer.json and sentencepiece.bpe.model, unless `json_only`.

    Returns the number of tokens.
    """
    texts = ["\u2581", "\u2581the", "in", "en", *"abcdefghijklmnopqrstuvwxyz"]
    pieces = [(text, -2.0 - i / 4) for i, text in enumerate(texts)]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    charsmap = struct.pack("<I", 1024) + bytes(1025)
    if not json_only:
        encoded_pieces = [_field(1, text.encode()) + _field(2, 0.0) + _field(3, 2 if text == "<unk>" else 3)
                          for text in ("<unk>", "<s>", "</s>")]  # fmt: skip
        encoded_pieces += [_field(1, text.encode()) + _field(2, score) for text, score in pieces]
        trainer = _field(3, 1) + _field(4, len(pieces) + 3)
        normalizer = _field(1, b"identity") + _field(3, 1) + _field(4, 1)
        model = b"".join(_field(1, piece) for piece in encoded_pieces) + _field(2, trainer) + _field(3, normalizer)
        (folder / "sentencepiece.bpe.model").write_bytes(model)
    vocab = [*((text, 0.0) for text in special), *pieces, ("<mask>", 0.0)]
    tokens = [
        {"id": i, "content": text, "single_word": False, "lstrip": text == "<mask>", "rstrip": False,
         "normalized": False, "special": True}
        for i, (text, _) in enumerate(vocab) if text in (*special, "<mask>")
    ]  # fmt: skip
    first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>"))
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    entries = {name: {"id": name, "ids": [special.index(name)], "tokens": [name]} for name in ("<s>", "</s>")}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens,
               "normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(charsmap).decode()},
               "pre_tokenizer": metaspace, "decoder": metaspace,
               "post_processor": {"type": "TemplateProcessing", "single": [first, a, last],
                                  "pair": [first, a, last, last, b, last], "special_tokens": entries},
               "model": {"type": "Unigram", "unk_id": 3, "vocab": [list(pair) for pair in vocab],
                         "byte_fallback": False}}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "XLMRobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
                "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
                "clean_up_tokenization_spaces": True, "model_max_length": 128}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab)


def write_ranked(folder: Path) -> int:
    """Write tokenizer.json of Gemma 4's BPE; return the number of tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = "\u2581abcdefghijklmnopqrstuvwxyz"
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("i", "n"), ("e", "n"), ("\u2581", "\u2581")]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [*special, *bytes_, *letters, *("".join(pair) for pair in merges)]
    added = [*special, "<|channel>", "<turn|>"]
    tokens = [
        {"id": i if text in special else len(texts) + i - len(special), "content": text, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(added)
    ]  # fmt: skip
    space = {"String": " "}
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
             "vocab": {text: i for i, text in enumerate(texts)}, "merges": [list(pair) for pair in merges]}  # fmt: skip
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens,
               "normalizer": {"type": "Replace", "pattern": space, "content": "\u2581"},
               "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
               "post_processor": None, "model": model,
               "decoder": {"type": "Sequence", "decoders": [
                   {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                   {"type": "Fuse"}]}}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
                "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
                "additional_special_tokens": ["<|channel>", "<turn|>"], "chat_template": TEMPLATE}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(texts) + len(added) - len(special)


def write_scored(folder: Path) -> None:
    """Write tokenizer.jsonl, tokens with scores and kinds."""
    special = [("<|plamo:unk|>", "UNKNOWN"), ("<|plamo:bos|>", "CONTROL"), ("<|plamo:eos|>", "CONTROL"),
               ("<|plamo:pad|>", "CONTROL"), ("<|plamo:op|>", "NORMAL")]  # fmt: skip
    tokens = [[text, 0.0, kind] for text, kind in special]
    tokens += [[f"<0x{byte:02X}>", 0.0, "BYTE"] for byte in range(256)]
    tokens += [[text, -i / 4, "NORMAL"] for i, text in enumerate((" ", "the", "in", *"abcdefghijklmnopqrstuvwxyz"))]
    lines = [json.dumps([*token, None, len(token[0]), len(token[0])]) for token in tokens]
    (folder / "tokenizer.jsonl").write_text("\n".join(lines) + "\n")
    texts = {"unk": special[0][0], "bos": special[1][0], "eos": special[2][0], "pad": special[3][0], "sep": None}
    settings = {f"{name}_token": text for name, text in texts.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def write_rwkv(folder: Path) -> None:
    """Write the vocabulary of RWKV World: bytes, and few tokens of several."""
    tokens: list[str | bytes] = [*(chr(i) for i in range(128)), *(bytes([i]) for i in range(128, 256))]
    tokens += ["th", "he", "in", " the", "\n\n", "\u0432", b"\xe4\xb8", "it's"]
    sizes = [len(token if isinstance(token, bytes) else token.encode()) for token in tokens]
    lines = [f"{i} {token!r} {size}\n" for i, (token, size) in enumerate(zip(tokens, sizes, strict=True), 1)]
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Rwkv6Tokenizer"}))


def write_tiktoken(folder: Path) -> None:
    """Write qwen.tiktoken: bytes, and merges by their ranks."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"he", b"in", b"the", b" the", b"er", b"ther", b"\xe4\xb8"]
    lines = [f"{b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (folder / "qwen.tiktoken").write_text("".join(lines))
    settings = {"tokenizer_class": "QWenTokenizer", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_word_piece(folder: Path) -> int:
    """Write tokenizer.json of a WordPiece; return the number of tokens."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [*special, *letters, *(f"##{letter}" for letter in letters), "the", "in", "##er", "then", "[unused1]"]
    tokens = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, text in enumerate(special)
    ]  # fmt: skip
    first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]"))
    a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    entries = {name: {"id": name, "ids": [special.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    post = {"type": "TemplateProcessing", "single": [first, a, last], "pair": [first, a, last, b, last],
            "special_tokens": entries}  # fmt: skip
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": {text: i for i, text in enumerate(texts)}}  # fmt: skip
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens,
               "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                              "strip_accents": None, "lowercase": True},
               "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": post,
               "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}, "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 128, "unk_token": "[UNK]",
                "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(texts)


def _field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def write_sentencepiece(
    folder: Path,
    *,
    n_words: int = 20,
    jinja: bool = False,
    added: Mapping[int, str] | None = None,
    more: Iterable[str] = (),
) -> int:
    """Write tokenizer.model, BPE with bytes; return the number of pieces.

    `added` are special tokens by their ids, which pieces may have, `more` the last pieces.
    """
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    letters = "etaoinshrdlu\u2581"
    words = [a + b for a in "\u2581aeiou" for b in letters][:n_words]
    pieces += [(text, -float(i), 1) for i, text in enumerate([*words, *letters, *"bcfgjkmpqvwxyz.,!?"])]
    pieces += [("<pad>", 0.0, 4), ("<unused0>", 0.0, 5), *((text, 0.0, 4) for text in more)]
    encoded_pieces = [
        _field(1, text.encode()) + _field(2, score) + (_field(3, kind) if kind != 1 else b"")
        for text, score, kind in pieces
    ]
    trainer = _field(3, 2) + _field(4, len(pieces)) + _field(35, 1)
    model = b"".join(_field(1, piece) for piece in encoded_pieces) + _field(2, trainer)
    model += _field(3, _field(1, b"identity") + _field(3, 1))
    (folder / "tokenizer.model").write_bytes(model)
    special = {i: text for i, (text, _, kind) in enumerate(pieces) if kind in (2, 3)} | dict(added or {})
    decoder = {str(i): {"content": text, "special": True} for i, text in special.items()}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
                "eos_token": "</s>", "unk_token": "<unk>", "added_tokens_decoder": decoder}  # fmt: skip
    if jinja:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(pieces)


# --- decoders --------------------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


def decoder_shapes(
    config: Mapping[str, Any],
    *,
    norms: Iterable[str] = ("input_layernorm", "post_attention_layernorm"),
    qk_norm: int = 0,
    biases: Iterable[str] = (),
    experts: str = "",
    shared: bool = False,
    fused: bool = False,
    gated: bool = True,
) -> Shapes:
    """Shapes of a decoder's tensors; its networks have gates if `gated`.

    `qk_norm` is the width of the norms of queries and keys; `experts` the kind of their names, "" without.
    """
    n_embd, n_ff, n_vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    n_head, n_head_kv = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    head = config.get("head_dim") or n_embd // n_head
    found: Shapes = {"model.embed_tokens.weight": (n_vocab, n_embd)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        widths = {"q": n_head * head, "k": n_head_kv * head, "v": n_head_kv * head}
        if fused:
            found[f"{layer}self_attn.qkv_proj.weight"] = (sum(widths.values()), n_embd)
        else:
            found |= {f"{layer}self_attn.{name}_proj.weight": (width, n_embd) for name, width in widths.items()}
        found |= {f"{layer}self_attn.{name}_proj.bias": (widths[name],) for name in biases if name in widths}
        found[f"{layer}self_attn.o_proj.weight"] = (n_embd, widths["q"])
        if qk_norm:
            found |= {f"{layer}self_attn.{name}_norm.weight": (qk_norm,) for name in "qk"}
        found |= {f"{layer}{name}.weight": (n_embd,) for name in norms}
        n_expert = config.get("num_local_experts") or config.get("num_experts") or 0
        width = config.get("moe_intermediate_size", n_ff)
        if experts == "mixtral":
            found[f"{layer}block_sparse_moe.gate.weight"] = (n_expert, n_embd)
            for j in range(n_expert):
                at = f"{layer}block_sparse_moe.experts.{j}."
                found |= {f"{at}w1.weight": (n_ff, n_embd), f"{at}w2.weight": (n_embd, n_ff),
                          f"{at}w3.weight": (n_ff, n_embd)}  # fmt: skip
            continue
        if experts:
            found[f"{layer}mlp.gate.weight"] = (n_expert, n_embd)
            for j in range(n_expert):
                found |= _network(f"{layer}mlp.experts.{j}.", n_embd, width)
            if shared:
                found |= _network(f"{layer}mlp.shared_expert.", n_embd, config["shared_expert_intermediate_size"])
                found[f"{layer}mlp.shared_expert_gate.weight"] = (1, n_embd)
            continue
        if fused:
            found |= {f"{layer}mlp.gate_up_proj.weight": (2 * n_ff, n_embd),
                      f"{layer}mlp.down_proj.weight": (n_embd, n_ff)}  # fmt: skip
        else:
            found |= _network(f"{layer}mlp.", n_embd, n_ff)
            if not gated:
                del found[f"{layer}mlp.gate_proj.weight"]
    found["model.norm.weight"] = (n_embd,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (n_vocab, n_embd)
    return found


def _network(prefix: str, n_embd: int, n_ff: int) -> Shapes:
    return {f"{prefix}gate_proj.weight": (n_ff, n_embd), f"{prefix}up_proj.weight": (n_ff, n_embd),
            f"{prefix}down_proj.weight": (n_embd, n_ff)}  # fmt: skip


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": 320,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


_ONE_LAYER = {"num_hidden_layers": 1}


def _eagle3(layer: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a draft head of 96 tokens."""
    found = {
        name.replace("model.layers.0", layer): (shape[0], 128) if name.endswith(("q_proj.weight", "k_proj.weight",
                                                                                 "v_proj.weight")) else shape
        for name, shape in decoder_shapes(SIZES | _ONE_LAYER).items() if ".layers." in name
    }  # fmt: skip
    return found | {
        f"{layer}.hidden_norm.weight": (64,), "d2t": (96,), "t2d": (320,), "fc.weight": (64, 192),
        "lm_head.weight": (96, 64), "norm.weight": (64,),
    }  # fmt: skip


_DFLASH: dict[str, Any] = {
    "base": "qwen3", "qk_norm": 32, "without": r"embed_tokens|lm_head", "renamed": (("model.", ""),),
    "tensors": {"fc.weight": (64, 128), "hidden_norm.weight": (64,)},
}  # fmt: skip
_BLOCK = {"block_size": 4, "mask_token_id": 7, "target_layer_ids": [0, 1]}
_MARKOV: dict[str, tuple[int, ...]] = {
    "markov_head.markov_w1.weight": (320, 8), "markov_head.markov_w2.weight": (320, 8),
    "confidence_head.proj.weight": (1, 72), "confidence_head.proj.bias": (1,),
}  # fmt: skip
_CONV: dict[str, tuple[int, ...]] = {
    "candidate_selector.predecessor_codebook": (320, 8), "candidate_selector.successor_codebook": (320, 8),
    "candidate_selector.hidden_projection.weight": (8, 64),
    **{f"layers.{i}.{branch}_conv.base_kernel": (2, 4, 64) for i in range(2) for branch in ("attention", "mlp")},
    **{f"layers.{i}.{branch}_conv.kernel_projection.weight": (2 * 4 * 64 // 16, 64)
       for i in range(2) for branch in ("attention", "mlp")},
}  # fmt: skip


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "fmt": "e4m3"}


_EYE: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "mlp_ratio": 2,
}  # fmt: skip
_SEEN = {"vision_config": _EYE}
"""Tiny encoder of pictures, of which nothing is read."""


def _case(kind: str, model_type: str, config: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Options of `write_checkpoint`: `tokenizer`, `dtype`, `shards`, and those of `decoder_shapes`.

    `changed` are fields of config.json, and the `model_type`, of the comparison with transformers. A `slow` case is as
    large as llama.cpp's converter takes for granted.
    """
    return {"architectures": [kind], "model_type": model_type, "config": SIZES | dict(config or {}), **options}


_GPTOSS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 64, "rope_theta": 150000,
    "intermediate_size": 96, "hidden_size": 64, "num_hidden_layers": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
                     "beta_slow": 1.0, "truncate": False},
}  # fmt: skip
_GPTOSS_OPTIONS: dict[str, Any] = {"tokenizer": "gpt4o", "biases": "qkv", "without": r"\.mlp\.(gate|up|down)_proj"}


def _gptoss(*, packed: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of experts, sinks and biases; `packed` ones are bytes."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        mlp = f"model.layers.{i}.mlp."
        found |= {
            f"model.layers.{i}.self_attn.sinks": (4,), f"model.layers.{i}.self_attn.o_proj.bias": (64,),
            f"{mlp}router.weight": (4, 64), f"{mlp}router.bias": (4,),
            f"{mlp}experts.gate_up_proj_bias": (4, 192), f"{mlp}experts.down_proj_bias": (4, 64),
        }  # fmt: skip
        for name, n_out, n_in in (("gate_up", 192, 64), ("down", 64, 96)):
            if packed:
                found[f"{mlp}experts.{name}_proj_blocks"] = (4, n_out, n_in // 32, 16)
                found[f"{mlp}experts.{name}_proj_scales"] = (4, n_out, n_in // 32)
            else:
                found[f"{mlp}experts.{name}_proj"] = (4, n_in, n_out)
    return found


_GLM_NORMS = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")


_GLM_MOE: dict[str, Any] = {
    "head_dim": 32, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "n_routed_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 1, "num_hidden_layers": 2,
}  # fmt: skip


_PREDICTION = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,)}
_GLM_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}


def _glm_moe() -> dict[str, tuple[int, ...]]:
    """Shapes of a dense layer, shared experts and a prediction layer."""
    sizes = SIZES | {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    last = decoder_shapes(sizes, biases="qkv", qk_norm=32, experts="qwen")
    found = {name: shape for name, shape in last.items() if ".layers.2." in name}
    found |= _network("model.layers.0.mlp.", 64, 96)
    for i in (1, 2):
        found |= _network(f"model.layers.{i}.mlp.shared_experts.", 64, 32)
        found[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = (4,)
    return found | {f"model.layers.2.{name}.weight": shape for name, shape in _PREDICTION.items()}


def _glm_seen(sizes: Mapping[str, Any], biases: str = "") -> Shapes:
    """Shapes of the text of a GLM for pictures."""
    fused = {f"model.layers.{i}.mlp.gate_up_proj.weight": (192, 64) for i in range(sizes["num_hidden_layers"])}
    shapes = decoder_shapes(sizes, biases=biases, norms=_GLM_NORMS) | fused
    return {
        name.replace("model.", "model.language_model."): shape
        for name, shape in shapes.items()
        if ".mlp.gate_proj." not in name and ".mlp.up_proj." not in name
    }


def _chatglm() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers, queries, keys and values in one matrix."""
    found: dict[str, tuple[int, ...]] = {"transformer.embedding.word_embeddings.weight": (320, 64)}
    found["transformer.rotary_pos_emb.inv_freq"] = (4,)
    for i in range(2):
        layer = f"transformer.encoder.layers.{i}."
        found |= {
            f"{layer}input_layernorm.weight": (64,), f"{layer}self_attention.query_key_value.weight": (128, 64),
            f"{layer}self_attention.query_key_value.bias": (128,), f"{layer}self_attention.dense.weight": (64, 64),
            f"{layer}post_attention_layernorm.weight": (64,), f"{layer}mlp.dense_h_to_4h.weight": (192, 64),
            f"{layer}mlp.dense_4h_to_h.weight": (64, 96),
        }  # fmt: skip
    return found | {"transformer.encoder.final_layernorm.weight": (64,), "transformer.output_layer.weight": (320, 64)}


def _deepseek(
    n_layer: int, *, rank_q: int, predicts: bool = False, indexer: bool = False, n_dense: int = 1, n_rope: int = 8
) -> dict[str, tuple[int, ...]]:
    """Shapes of latent attention and of experts behind dense layers.

    The last layer is for multi-token prediction if it `predicts`.
    """
    found: dict[str, tuple[int, ...]] = {}
    for i in range(n_layer):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        if rank_q:
            found |= {f"{attention}q_a_proj.weight": (rank_q, 64), f"{attention}q_a_layernorm.weight": (rank_q,)}
        found |= {
            f"{attention}q_{'b_' if rank_q else ''}proj.weight": (4 * (16 + n_rope), rank_q or 64),
            f"{attention}kv_a_proj_with_mqa.weight": (32 + n_rope, 64), f"{attention}kv_a_layernorm.weight": (32,),
            f"{attention}kv_b_proj.weight": (4 * 40, 32), f"{attention}o_proj.weight": (64, 4 * 24),
        }  # fmt: skip
        found |= {f"model.layers.{i}.{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
        if indexer:
            found |= {
                f"{attention}indexer.wq_b.weight": (2 * 32, 32), f"{attention}indexer.wk.weight": (32, 64),
                f"{attention}indexer.k_norm.weight": (32,), f"{attention}indexer.k_norm.bias": (32,),
                f"{attention}indexer.weights_proj.weight": (2, 64),
            }  # fmt: skip
        if i < n_dense:
            found |= _network(mlp, 64, 96)
            continue
        found[f"{mlp}gate.weight"] = (4, 64)
        if rank_q:
            found[f"{mlp}gate.e_score_correction_bias"] = (4,)
        for name in (*(f"experts.{j}" for j in range(4)), "shared_experts"):
            found |= _network(f"{mlp}{name}.", 64, 32)
    head = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,)} if predicts else {}
    return found | {f"model.layers.{n_layer - 1}.{name}.weight": shape for name, shape in head.items()}


def _hy4() -> Shapes:
    """Shapes of latent attention with streams, gates, sinks and one indexer."""
    found = {name: shape for name, shape in _deepseek(2, rank_q=32, indexer=True).items()
             if ".experts." not in name and not name.startswith("model.layers.1.self_attn.indexer")}  # fmt: skip
    found |= {
        "model.layers.1.mlp.experts.gate_up_proj": (4, 64, 64),
        "model.layers.1.mlp.experts.down_proj": (4, 64, 32),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        found |= {f"{layer}self_attn.learnable_sink_param": (4,), f"{layer}self_attn.linear_gate.weight": (96, 64)}
        for kind in ("attn", "mlp"):
            at = f"{layer}hc_{kind}_layer.hc_pre.hc_"
            found |= {f"{at}fn": (4, 128), f"{at}base": (4,), f"{at}scale": (2,)}
    at = "model.hc_head.hc_head_"
    return found | {
        f"{at}fn": (2, 128),
        f"{at}base": (2,),
        f"{at}scale": (1,),
        "model.mtp_layers.0.enorm.weight": (64,),
    }


def _glm5() -> Shapes:
    """Shapes of delta attention, of an indexer, and of a prediction layer."""
    found = _deepseek(3, rank_q=32, predicts=True, indexer=True, n_rope=0) | _kimi_linear_attention("model.layers.0.")
    found = {name: shape for name, shape in found.items()
             if not re.search(r"layers\.0\.self_attn\.(q_[ab]_|kv_|q_a_layernorm|indexer)", name)}  # fmt: skip
    for i in (0, 1):
        for kind in ("attn", "ffn"):
            at = f"model.layers.{i}.hc_{kind}_"
            found |= {f"{at}fn": (24, 256), f"{at}base": (24,), f"{at}scale": (3,)}
    for i in (1, 2):
        at = f"model.layers.{i}.self_attn.indexer.index_kpool_compress_"
        found |= {f"{at}ape": (2, 32), f"{at}gate": (32, 64)}
    return found | {"model.layers.2.shared_head.norm.weight": (64,)}


def _kimi_linear_attention(prefix: str) -> Shapes:
    """Shapes of delta attention."""
    layer = f"{prefix}self_attn."
    found: Shapes = {f"{layer}{name}_proj.weight": (64, 64) for name in "qkvo"}
    found |= {f"{layer}{name}_conv1d.weight": (64, 1, 4) for name in "qkv"}
    found |= {f"{layer}{name}_a_proj.weight": (16, 64) for name in "fg"}
    found |= {f"{layer}{name}_b_proj.weight": (64, 16) for name in "fg"}
    return found | {f"{layer}A_log": (1, 1, 4, 1), f"{layer}dt_bias": (64,), f"{layer}b_proj.weight": (4, 64),
                    f"{layer}o_norm.weight": (16,)}  # fmt: skip


def _kimi_linear() -> Shapes:
    """Shapes of a layer with delta attention, and of one with experts."""
    found = _kimi_linear_attention("model.layers.0.")
    found |= {name: shape for name, shape in _deepseek(2, rank_q=0).items() if "layers.1.self_attn" in name}
    mlp = "model.layers.1.block_sparse_moe."
    found |= {f"{mlp}gate.weight": (4, 64), f"{mlp}gate.e_score_correction_bias": (4,)}
    for i in range(4):
        found |= {f"{mlp}experts.{i}.w{j}.weight": (64, 32) if j == 2 else (32, 64) for j in (1, 2, 3)}
    return found | _network(f"{mlp}shared_experts.", 64, 32)


def _deepseek4() -> Shapes:
    """Shapes of DeepSeek-V4, with blocks of 1, 4 and 128 tokens."""
    found: Shapes = {"embed.weight": (320, 64), "norm.weight": (64,), "head.weight": (320, 64)}
    found |= {"hc_head_fn": (4, 256), "hc_head_base": (4,), "hc_head_scale": (1,)}
    for i, ratio in enumerate((0, 4, 128)):
        layer, attention, ffn = (f"layers.{i}.{name}" for name in ("", "attn.", "ffn."))
        for kind in ("attn", "ffn"):
            at = f"{layer}hc_{kind}_"
            found |= {f"{at}fn": (24, 256), f"{at}base": (24,), f"{at}scale": (3,), f"{layer}{kind}_norm.weight": (64,)}
        found |= {
            f"{attention}attn_sink": (4,), f"{attention}wq_a.weight": (48, 64), f"{attention}q_norm.weight": (48,),
            f"{attention}wq_b.weight": (256, 48), f"{attention}wkv.weight": (64, 64),
            f"{attention}kv_norm.weight": (64,), f"{attention}wo_a.weight": (64, 128),
            f"{attention}wo_b.weight": (64, 64), f"{ffn}gate.weight": (4, 64), f"{ffn}gate.bias": (4,),
            f"{ffn}gate.bias_vl": (4,),
        }  # fmt: skip
        places = {"compressor.": (64, 2 if ratio == 4 else 1)} if ratio else {}
        if ratio == 4:
            places["indexer.compressor."] = 32, 2
            found |= {f"{attention}indexer.wq_b.weight": (64, 48), f"{attention}indexer.weights_proj.weight": (2, 64)}
        for place, (width, n) in places.items():
            at = f"{attention}{place}"
            found |= {f"{at}{name}.weight": (n * width, 64) for name in ("wkv", "wgate")}
            found |= {f"{at}ape": (ratio, n * width), f"{at}norm.weight": (width,)}
        for name in (*(f"experts.{j}" for j in range(4)), "shared_experts"):
            found |= {f"{ffn}{name}.w{j}.weight": (64, 160) if j == 2 else (160, 64) for j in (1, 2, 3)}
    found["layers.0.ffn.gate.tid2eid"] = (320, 2)
    for name, (n_rows, n_in) in [x for x in found.items() if re.search(_V4_SCALED, x[0])]:
        if ".experts." in name:
            found |= {name: (n_rows, n_in // 2), f"{name[:-6]}scale": (n_rows, n_in // 32)}
        else:
            found[f"{name[:-6]}scale"] = -(-n_rows // 128), -(-n_in // 128)
    return found | {"mtp.0.e_proj.weight": (64, 64), "aligner.norm.weight": (64,), "image_newline": (64,),
                    "vision.norm.weight": (32,)}  # fmt: skip


_V4_SCALED = r"experts\..*w[123]\.weight$|attn\.(indexer\.)?w\w+\.weight$"
_V4_DTYPES = {
    r"\.experts\..*weight$": "I8", _V4_SCALED: "F8_E4M3", r"\.scale$": "F8_E8M0", r"tid2eid$": "I64",
    r"hc_|attn_sink|ape$|gate\.bias|compressor\.w": "F32",
}  # fmt: skip
"""Types of DeepSeek-V4's tensors, by patterns, of which the first counts; others are BF16."""


def _dots3() -> Shapes:
    """Shapes of an indexer, of a window, and of a prediction layer."""
    found = _deepseek(3, rank_q=32, predicts=True, indexer=True, n_dense=1)
    found = {name: shape for name, shape in found.items() if not re.search(r"layers\.[12]\.self_attn|2\.mlp", name)}
    for i in range(3):
        layer, n_head = f"model.layers.{i}.self_attn.", 4 if i == 0 else 2
        found |= {f"{layer}k_rope_only_layernorm.weight": (8,), f"{layer}g_proj.weight": (n_head, 64)}
        if i:
            found |= {
                f"{layer}q_a_proj.weight": (32, 64), f"{layer}q_a_layernorm.weight": (32,),
                f"{layer}q_b_proj.weight": (2 * 40, 32), f"{layer}kv_a_proj_with_mqa.weight": (56, 64),
                f"{layer}kv_a_layernorm.weight": (48,), f"{layer}kv_b_proj.weight": (2 * 48, 48),
                f"{layer}o_proj.weight": (64, 32),
            }  # fmt: skip
    found |= _network("model.layers.2.mlp.", 64, 96) | {"model.layers.2.shared_head.norm.weight": (64,)}
    return found | {"model.mtp.embed_tokens.weight": (320, 64)}


def _k3() -> Shapes:
    """Shapes of Kimi K3, with experts in MXFP4."""
    others = re.compile(r"\.self_attn\.(g_[ab]_proj|A_log)|\.experts\.")
    found = {name: shape for name, shape in _kimi_linear().items() if not others.search(name)}
    found["model.layers.0.self_attn.A_log"] = (4,)
    for i in range(4):
        for j, (n_rows, n_in) in enumerate(((64, 96), (96, 64), (64, 96)), 1):
            at = f"model.layers.1.block_sparse_moe.experts.{i}.w{j}.weight_"
            found |= {f"{at}packed": (n_rows, n_in // 2), f"{at}scale": (n_rows, n_in // 32)}
    mlp = "model.layers.1.block_sparse_moe."
    found |= {f"{mlp}routed_expert_down_proj.weight": (96, 64), f"{mlp}routed_expert_up_proj.weight": (64, 96),
              f"{mlp}routed_expert_norm.weight": (96,), "model.layers.0.self_attn.g_proj.weight": (64, 64),
              "model.layers.1.self_attn.g_proj.weight": (96, 64)}  # fmt: skip
    found |= _network(f"{mlp}shared_experts.", 64, 64) | _network("model.layers.0.mlp.", 64, 96)
    for i in (0, 1):
        found |= {f"model.layers.{i}.{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    for at in ("output_attn", *(f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attention", "mlp"))):
        found |= {f"model.{at}_res_norm.weight": (64,), f"model.{at}_res_proj.weight": (1, 64)}
    return found


_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 128, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_DEEPSEEK_V3 = _DEEPSEEK | {
    "q_lora_rank": 32, "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc",
}  # fmt: skip
_DEEPSEEK_MOE: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_theta": 10000, "scoring_func": "softmax",
}  # fmt: skip
_MODEL: Shapes = {
    "model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,), "lm_head.weight": (320, 64),
}  # fmt: skip
_KIMI_LINEAR: dict[str, Any] = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "num_key_value_heads": 4, "head_dim": 24, "rope_theta": 1e4, "mla_use_nope": True, "num_experts": 4,
    "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 4,
                           "short_conv_kernel_size": 4},
}  # fmt: skip
_DEEPSEEK_NETWORKS = _network("model.layers.0.mlp.", 64, 96) | _network("model.layers.1.mlp.shared_experts.", 64, 32)
_NOMIC: dict[str, Any] = {
    "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 2, "n_positions": 8192, "max_trained_positions": 2048,
    "vocab_size": 96, "type_vocab_size": 2, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
    "activation_function": "swiglu", "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
}  # fmt: skip


def _nomic() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers with gated networks."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (96, 64), "embeddings.token_type_embeddings.weight": (2, 64),
        "emb_ln.weight": (64,), "emb_ln.bias": (64,),
    }  # fmt: skip
    for i in range(2):
        layer = f"encoder.layers.{i}."
        found |= {
            f"{layer}attn.Wqkv.weight": (192, 64), f"{layer}attn.out_proj.weight": (64, 64),
            f"{layer}mlp.fc11.weight": (96, 64), f"{layer}mlp.fc12.weight": (96, 64),
            f"{layer}mlp.fc2.weight": (64, 96),
        }  # fmt: skip
        found |= {f"{layer}norm{n}.{kind}": (64,) for n in (1, 2) for kind in ("weight", "bias")}
    return found


def _inside(prefix: str, others: Iterable[str] = (), config: Mapping[str, Any] = SIZES, **options: Any) -> Shapes:
    """Shapes of a decoder below a prefix, and of other modalities' tensors."""
    text = {f"{prefix}{name}": shape for name, shape in decoder_shapes(config, **options).items()}
    return text | dict.fromkeys(others, (8, 8))


_OMNI: dict[str, Any] = SIZES | {
    "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
}  # fmt: skip
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "long_factor": [1.0 + i / 4 for i in range(8)],
    "short_factor": [1.0 + i / 64 for i in range(8)],
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "rope_theta": 1e4,
}  # fmt: skip


def _latent(*, rank_q: int) -> Shapes:
    """Shapes of two layers' latent attention."""
    found: Shapes = {}
    for i in range(2):
        at = f"model.layers.{i}.self_attn."
        if rank_q:
            found |= {f"{at}q_a_proj.weight": (rank_q, 64), f"{at}q_a_layernorm.weight": (rank_q,)}
        found |= {
            f"{at}q_{'b_' if rank_q else ''}proj.weight": (4 * 32, rank_q or 64),
            f"{at}kv_a_proj_with_mqa.weight": (48, 64), f"{at}kv_a_layernorm.weight": (32,),
            f"{at}kv_b_proj.weight": (4 * 32, 32), f"{at}o_proj.weight": (64, 64),
        }  # fmt: skip
    return found


def _refact() -> Shapes:
    """Shapes of two layers with one head of keys."""
    found: Shapes = {"transformer.wte.weight": (320, 64), "transformer.ln_f.weight": (64,), "lm_head.weight": (320, 64)}
    for i in range(2):
        names = {"ln_1": (64,), "ln_2": (64,), "attn.q": (64, 64), "attn.kv": (32, 64), "attn.c_proj": (64, 64),
                 "mlp.gate_up_proj": (512, 64), "mlp.c_proj": (64, 256)}  # fmt: skip
        found |= {f"transformer.h.{i}.{name}.weight": shape for name, shape in names.items()}
    return found


def _llada() -> Shapes:
    names = {"attn_norm": (64,), "ff_norm": (64,), "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64),
             "attn_out": (64, 64), "ff_proj": (96, 64), "up_proj": (96, 64), "ff_out": (64, 96)}  # fmt: skip
    found: Shapes = {"model.transformer.wte.weight": (320, 64)}
    for i in range(2):
        found |= {f"model.transformer.blocks.{i}.{name}.weight": shape for name, shape in names.items()}
    return found | {"model.transformer.ln_f.weight": (64,), "model.transformer.ff_out.weight": (320, 64)}


def _openelm() -> Shapes:
    """Shapes of two layers of different widths."""
    found: Shapes = {"transformer.token_embeddings.weight": (320, 64), "transformer.norm.weight": (64,)}
    for i, (n_head, n_head_kv, n_ff) in enumerate(((4, 2, 32), (6, 3, 64))):
        names = {"attn.qkv_proj": ((n_head + 2 * n_head_kv) * 16, 64), "attn.out_proj": (64, n_head * 16),
                 "attn.q_norm": (16,), "attn.k_norm": (16,), "attn_norm": (64,), "ffn_norm": (64,),
                 "ffn.proj_1": (2 * n_ff, 64), "ffn.proj_2": (64, n_ff)}  # fmt: skip
        found |= {f"transformer.layers.{i}.{name}.weight": shape for name, shape in names.items()}
    return found


def _lfm25_audio() -> Shapes:
    """Decoder of LFM2.5-Audio's codes, of a convolution and a layer with attention."""
    shapes = checkpoint_models.cases()["lfm2"]["shapes"]
    made = {f"lfm.{name.removeprefix('model.')}": shape for name, shape in shapes.items()}
    return made | {"emb.emb.weight": (16, 64), "istft.window": (8,), "lin.weight": (34, 64), "lin.bias": (34,)}


def _smallthinker() -> Shapes:
    """Shapes of two layers' routers and experts."""
    found: Shapes = {f"model.layers.{i}.block_sparse_moe.primary_router.weight": (4, 64) for i in range(2)}
    for i, j in ((i, j) for i in range(2) for j in range(4)):
        names = {"gate": (48, 64), "up": (48, 64), "down": (64, 48)}
        found |= {f"model.layers.{i}.block_sparse_moe.experts.{j}.{name}.weight": x for name, x in names.items()}
    return found


def _hunyuan_norms(n_layer: int, width: int) -> Shapes:
    return {f"model.layers.{i}.self_attn.{name}_layernorm.weight": (width,) for i in range(n_layer)
            for name in ("query", "key")}  # fmt: skip


def _hunyuan_experts() -> Shapes:
    found: Shapes = {}
    for i in range(2):
        mlp = f"model.layers.{i}.mlp."
        found |= _network(f"{mlp}shared_mlp.", 256, 96) | {f"{mlp}gate.wg.weight": (4, 256)}
        for j in range(4):
            found |= _network(f"{mlp}experts.{j}.", 256, 96)
    return found


def _hy3() -> Shapes:
    """Shapes of Hunyuan 3's experts and of its block for multi-token prediction."""
    config = SIZES | {"head_dim": 32, "num_hidden_layers": 3}
    block = "model.layers.2."
    found = {name: shape for name, shape in decoder_shapes(config, qk_norm=32).items()
             if name.startswith(block) and ".mlp." not in name}  # fmt: skip
    found |= {f"{block}eh_proj.weight": (64, 128)}
    found |= {f"{block}{name}.weight": (64,) for name in ("enorm", "hnorm", "final_layernorm")}
    for i in (1, 2):
        mlp = f"model.layers.{i}.mlp."
        found |= {f"{mlp}router.gate.weight": (4, 64), f"{mlp}expert_bias": (4,)}
        for name in ("shared_mlp", *(f"experts.{j}" for j in range(4))):
            found |= _network(f"{mlp}{name}.", 64, 32)
    return found


def _minimax() -> Shapes:
    """Shapes of a dense layer and one of experts, with an indexer."""
    config = SIZES | {"head_dim": 32, "num_local_experts": 4}
    found = decoder_shapes(config, experts="mixtral", qk_norm=32)
    found = {name: shape for name, shape in found.items() if "layers.0.block" not in name}
    at = "model.layers.1."
    found |= _network("model.layers.0.mlp.", 64, 128) | _network(f"{at}block_sparse_moe.shared_experts.", 64, 96)
    found |= {f"{at}block_sparse_moe.e_score_correction_bias": (4,), f"{at}self_attn.index_q_proj.weight": (64, 64),
              f"{at}self_attn.index_k_proj.weight": (32, 64)}  # fmt: skip
    found |= {f"{at}self_attn.index_{name}_norm.weight": (32,) for name in "qk"}
    others = {"vision_tower.patch_embedding.weight": (8, 8), "patch_merge_mlp.linear_1.weight": (8, 8)}
    return {f"language_model.{name}": shape for name, shape in found.items()} | others


def _mimo() -> Shapes:
    """Shapes of a full layer, one with experts, and three for prediction."""
    found: Shapes = {}
    for i in range(5):
        layer = f"model.layers.{i}." if i < 2 else f"model.mtp.layers.{i - 2}."
        n_head_kv = 2 if i else 1
        found |= {
            f"{layer}self_attn.q_proj.weight": (192, 64), f"{layer}self_attn.k_proj.weight": (48 * n_head_kv, 64),
            f"{layer}self_attn.v_proj.weight": (32 * n_head_kv, 64), f"{layer}self_attn.o_proj.weight": (64, 128),
            f"{layer}input_layernorm.weight": (64,),
            f"{layer}{'post_attention' if i < 2 else 'pre_mlp'}_layernorm.weight": (64,),
        }  # fmt: skip
        if i:
            found[f"{layer}self_attn.attention_sink_bias"] = (4,)
        if i > 1:
            found |= {f"{layer}{name}.weight": (64,) for name in ("enorm", "hnorm", "final_layernorm")}
            found[f"{layer}eh_proj.weight"] = (64, 128)
        if i == 1:
            found |= {f"{layer}mlp.gate.weight": (4, 64), f"{layer}mlp.gate.e_score_correction_bias": (4,)}
        for at, n_ff in ((f"experts.{j}.", 32) for j in range(4)) if i == 1 else (("", 96),):
            found |= _network(f"{layer}mlp.{at}", 64, n_ff)
    return found


def _step() -> Shapes:
    """Shapes of a full layer, one with experts, and one for prediction."""
    found = {name: shape for name, shape in decoder_shapes(SIZES).items() if ".layers." not in name}
    found["vision_model.conv1.weight"] = (8, 8)
    for i, n_head in enumerate((4, 6, 6)):
        layer = f"model.layers.{i}."
        found |= {
            f"{layer}self_attn.q_proj.weight": (32 * n_head, 64), f"{layer}self_attn.k_proj.weight": (64, 64),
            f"{layer}self_attn.v_proj.weight": (64, 64), f"{layer}self_attn.o_proj.weight": (64, 32 * n_head),
            f"{layer}self_attn.g_proj.weight": (n_head, 64), f"{layer}self_attn.q_norm.weight": (32,),
            f"{layer}self_attn.k_norm.weight": (32,), f"{layer}input_layernorm.weight": (64,),
            f"{layer}post_attention_layernorm.weight": (64,),
        }  # fmt: skip
        if i != 1:
            found |= _network(f"{layer}mlp.", 64, 96)
    at = "model.layers.1."
    found |= {f"{at}moe.gate.weight": (4, 64), f"{at}moe.router_bias": (4,), f"{at}moe.down_proj.weight": (4, 64, 32)}
    found |= {f"{at}moe.{name}_proj.weight": (4, 32, 64) for name in ("gate", "up")}
    at = "model.layers.2."
    found |= _network("model.layers.1.share_expert.", 64, 32) | {f"{at}eh_proj.weight": (64, 128)}
    found |= {f"{at}{name}.weight": (64,) for name in ("enorm", "hnorm", "transformer.shared_head.norm")}
    return found | {f"{at}transformer.shared_head.output.weight": (320, 64)}


def _talker() -> Shapes:
    """Talker of Qwen3-TTS, its code predictor and the encoder of speakers."""
    sizes = SIZES | {"head_dim": 16, "vocab_size": 3072}
    found = {f"talker.{name}": shape for name, shape in decoder_shapes(sizes, qk_norm=16).items()}
    found["talker.codec_head.weight"] = found.pop("talker.lm_head.weight")
    found["talker.model.codec_embedding.weight"] = found.pop("talker.model.embed_tokens.weight")
    for name, n_rows in (("fc1", 48), ("fc2", 64)):
        found |= {f"talker.text_projection.linear_{name}.weight": (n_rows, 48),
                  f"talker.text_projection.linear_{name}.bias": (n_rows,)}  # fmt: skip
    return found | {
        "talker.model.text_embedding.weight": (320, 48), "talker.code_predictor.lm_head.0.weight": (32, 64),
        "speaker_encoder.blocks.0.conv.weight": (8, 8, 5),
    }  # fmt: skip


def _plamo(*, mamba: bool) -> Shapes:
    """Shapes of two layers, the first with `mamba`."""
    found: Shapes = {}
    head = 16 if mamba else 32
    for i in range(2):
        layer, at = f"model.layers.layers.{i}.", f"model.layers.layers.{i}.mixer."
        found |= {f"{layer}{name}.weight": (64,)
                  for name in ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")}  # fmt: skip
        found |= {f"{layer}mlp.gate_up_proj.weight": (192, 64), f"{layer}mlp.down_proj.weight": (64, 96)}
        if mamba and i == 0:
            found |= {
                f"{at}in_proj.weight": (128, 64), f"{at}conv1d.weight": (64, 1, 4), f"{at}bcdt_proj.weight": (96, 64),
                f"{at}dt_proj.weight": (4, 64), f"{at}dt_bias": (4,), f"{at}A_log": (4,), f"{at}D": (4,),
                f"{at}dt_norm_weight": (64,), f"{at}B_norm_weight": (16,), f"{at}C_norm_weight": (16,),
                f"{at}out_proj.weight": (64, 64),
            }  # fmt: skip
            continue
        found |= {f"{at}qkv_proj.weight": (8 * head, 64), f"{at}o_proj.weight": (64, 4 * head)}
        norms = (
            {"q_weight": (4, 16), "k_weight": (2, 16)}
            if mamba
            else dict.fromkeys(("q_norm.weight", "k_norm.weight"), (32,))
        )
        found |= {f"{at}{name}": shape for name, shape in norms.items()}
    return found


def _rwkv6() -> Shapes:
    """Shapes of two layers of RWKV-6."""
    found: Shapes = {"rwkv.embeddings.weight": (320, 64), "head.weight": (320, 64)}
    norms = ["rwkv.blocks.0.pre_ln", "rwkv.ln_out"]
    for i in range(2):
        time, channel = f"rwkv.blocks.{i}.attention.", f"rwkv.blocks.{i}.feed_forward."
        found |= {f"{time}time_maa_{name}": (1, 1, 64) for name in "xwkvrg"}
        found |= {f"{channel}time_maa_{name}": (1, 1, 64) for name in "kr"}
        found |= {f"{time}{name}.weight": (64, 64) for name in ("key", "value", "receptance", "gate", "output")}
        found |= {
            f"{time}time_maa_w1": (64, 160), f"{time}time_maa_w2": (5, 32, 64), f"{time}time_decay": (1, 1, 64),
            f"{time}time_decay_w1": (64, 64), f"{time}time_decay_w2": (64, 64), f"{time}time_faaaa": (4, 16),
            f"{channel}key.weight": (224, 64), f"{channel}value.weight": (64, 224),
            f"{channel}receptance.weight": (64, 64),
        }  # fmt: skip
        norms += [f"rwkv.blocks.{i}.{name}" for name in ("ln1", "ln2", "attention.ln_x")]
    return found | {f"{name}.{kind}": (64,) for name in norms for kind in ("weight", "bias")}


def _qrwkv6() -> Shapes:
    """Shapes of the time mixes of two layers of QRWKV-6."""
    found: Shapes = {}
    for i in range(2):
        time = f"model.layers.{i}.self_attn."
        found |= {f"{time}time_maa_{name}": (1, 1, 64) for name in "xwkvrg"}
        found |= {
            f"{time}time_maa_w1": (64, 40), f"{time}time_maa_w2": (5, 8, 64), f"{time}time_decay": (1, 1, 64),
            f"{time}time_decay_w1": (64, 16), f"{time}time_decay_w2": (16, 64), f"{time}gate.weight": (64, 64),
        }  # fmt: skip
    return found


def _rwkv7() -> Shapes:
    """Shapes of two layers of RWKV-7, as flash-linear-attention names them."""
    found: Shapes = {"model.embeddings.weight": (320, 64), "lm_head.weight": (320, 64)}
    norms = ["model.layers.0.pre_norm", "model.norm"]
    for i in range(2):
        time, channel = f"model.layers.{i}.attn.", f"model.layers.{i}.ffn."
        found |= {f"{time}x_{name}": (1, 1, 64) for name in "rwkvag"}
        found |= {f"{time}{name}_proj.weight": (64, 64) for name in "rkvo"}
        for name in "wag" if i == 0 else "wavg":
            found |= {f"{time}{name}_lora.lora.0.weight": (32, 64), f"{time}{name}_lora.lora.2.weight": (64, 32)}
            found |= {f"{time}{name}_lora.lora.2.bias": (64,)} if name != "g" else {}
        found |= {
            f"{time}k_k": (64,), f"{time}k_a": (64,), f"{time}r_k": (4, 16), f"{channel}x_k": (64,),
            f"{channel}key.weight": (256, 64), f"{channel}value.weight": (64, 256),
        }  # fmt: skip
        norms += [f"model.layers.{i}.{name}" for name in ("attn_norm", "ffn_norm", "attn.g_norm")]
    return found | {f"{name}.{kind}": (64,) for name in norms for kind in ("weight", "bias")}


def _arwkv7() -> Shapes:
    """Shapes of the time mixes of two layers of ARWKV-7."""
    found: Shapes = {}
    for i in range(2):
        time = f"model.layers.{i}.self_attn.time_mixer."
        found |= {f"{time}x_x": (6, 64), f"{time}g1": (64, 128), f"{time}g2": (128, 64)}
        found |= {f"{time}{name}.weight": (64, 64) for name in ("receptance", "key", "value", "output")}
        for name, rank in (("w", 64), ("a", 64), ("v", 32)):
            found |= {f"{time}{name}0": (1, 1, 64), f"{time}{name}1": (64, rank), f"{time}{name}2": (rank, 64)}
        found |= {f"{time}k_k": (1, 1, 64), f"{time}k_a": (1, 1, 64), f"{time}r_k": (4, 16)}
        found |= {f"{time}ln_x.{kind}": (64,) for kind in ("weight", "bias")}
    return found


def _nomic_experts() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers with biases, the second with experts."""
    found = {name: shape for name, shape in _nomic().items() if ".mlp." not in name}
    for i in range(2):
        layer = f"encoder.layers.{i}."
        found |= {f"{layer}attn.Wqkv.bias": (192,), f"{layer}attn.out_proj.bias": (64,)}
    mlp = "encoder.layers.1.mlp."
    return found | {
        "embeddings.word_embeddings.weight": (40, 64),
        "encoder.layers.0.mlp.fc1.weight": (96, 64), "encoder.layers.0.mlp.fc1.bias": (96,),
        "encoder.layers.0.mlp.fc2.weight": (64, 96), "encoder.layers.0.mlp.fc2.bias": (64,),
        f"{mlp}router.layer.weight": (4, 64), f"{mlp}experts.mlp.w1": (384, 64), f"{mlp}experts.mlp.w2": (384, 64),
        f"{mlp}experts.bias": (64,),
    }  # fmt: skip


_GRANITE_SWA = {
    "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "rope_theta": 1e4,
}  # fmt: skip
_SINKS: Shapes = {f"model.layers.{i}.self_attn.sinks": (4,) for i in range(2)}


def _bamba() -> Shapes:
    """Shapes of a state space, and of a layer with attention."""
    shapes = {name: shape for name, shape in decoder_shapes(SIZES).items() if ".layers.0.self_attn" not in name}
    names = (("post_attention_layernorm", "pre_ff_layernorm"), (".mlp.", ".feed_forward."))
    for old, new in (*names, ("model.norm.", "model.final_layernorm.")):
        shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    return shapes | {
        f"model.layers.0.mamba.{name}": shape for name, shape in (
            ("A_log", (8,)), ("D", (8,)), ("dt_bias", (8,)), ("conv1d.weight", (192, 1, 4)), ("conv1d.bias", (192,)),
            ("in_proj.weight", (328, 64)), ("norm.weight", (128,)), ("out_proj.weight", (64, 128)))
    }  # fmt: skip


def _hrm() -> Shapes:
    """Shapes of two stacks of two blocks."""
    found: Shapes = {"model.embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64), "model.z_L_init": (64,)}
    for layer in (f"model.{stack}_module.layers.{i}." for stack in "LH" for i in range(2)):
        found |= {
            f"{layer}attn.gqkv_proj.weight": (256, 64), f"{layer}attn.o_proj.weight": (64, 64),
            f"{layer}mlp.gate_up_proj.weight": (192, 64), f"{layer}mlp.down_proj.weight": (64, 96),
        }  # fmt: skip
    return found


def _jais() -> Shapes:
    """Shapes of two layers with a row for each input."""
    found: Shapes = {"transformer.wte.weight": (320, 64), "lm_head.weight": (320, 64)}
    for i in range(2):
        layer = f"transformer.h.{i}."
        found |= {f"{layer}{name}.{kind}": (64,) for name in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, n_in, n_out in (
            ("attn.c_attn", 64, 192), ("attn.c_proj", 64, 64), ("mlp.c_fc", 64, 96), ("mlp.c_fc2", 64, 96),
            ("mlp.c_proj", 96, 64),
        ):  # fmt: skip
            found |= {f"{layer}{name}.weight": (n_in, n_out), f"{layer}{name}.bias": (n_out,)}
    return found | {"transformer.ln_f.weight": (64,), "transformer.ln_f.bias": (64,)}


def _jina() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers with gated networks, without positions."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (96, 64), "embeddings.token_type_embeddings.weight": (2, 64),
        "embeddings.LayerNorm.weight": (64,), "embeddings.LayerNorm.bias": (64,), "pooler.dense.weight": (64, 64),
    }  # fmt: skip
    for i in range(2):
        attention, mlp = f"encoder.layer.{i}.attention.", f"encoder.layer.{i}.mlp."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            found |= {f"{attention}{name}.weight": (64, 64), f"{attention}{name}.bias": (64,)}
        found |= {f"{attention}output.LayerNorm.{kind}": (64,) for kind in ("weight", "bias")}
        found |= {f"{mlp}layernorm.{kind}": (64,) for kind in ("weight", "bias")}
        found |= {f"{mlp}gated_layers.weight": (192, 64), f"{mlp}wo.weight": (64, 96), f"{mlp}wo.bias": (64,)}
    return found


def _pocket() -> Shapes:
    """Backbone of Pocket TTS, and of its decoders a few tensors."""
    found: Shapes = {"flow_lm.conditioner.embed.weight": (32, 64), "flow_lm.bos_emb": (8,),
                     "flow_lm.bos_before_voice": (1, 1, 64), "flow_lm.input_linear.weight": (64, 8),
                     "flow_lm.out_eos.weight": (1, 64), "mimi.quantizer.output_proj.weight": (64, 8, 1)}  # fmt: skip
    norms = ["out_norm", *(f"transformer.layers.{i}.norm{n}" for i in range(2) for n in (1, 2))]
    found |= {f"flow_lm.{norm}.{kind}": (64,) for norm in norms for kind in ("weight", "bias")}
    for i in range(2):
        for name, shape in (("self_attn.in_proj", (192, 64)), ("self_attn.out_proj", (64, 64)),
                            ("linear1", (96, 64)), ("linear2", (64, 96))):  # fmt: skip
            found[f"flow_lm.transformer.layers.{i}.{name}.weight"] = shape
    encoder = "mimi.encoder_transformer.transformer.layers.0."
    return found | {f"{encoder}norm1.weight": (64,), f"{encoder}linear1.weight": (96, 64)}


def _neo() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers and of a head for masked tokens."""
    found: dict[str, tuple[int, ...]] = {"model.encoder.weight": (96, 64), "model.layer_norm.weight": (64,)}
    for i in range(2):
        layer = f"model.transformer_encoder.{i}."
        found |= {
            f"{layer}qkv.weight": (192, 64), f"{layer}wo.weight": (64, 64), f"{layer}attention_norm.weight": (64,),
            f"{layer}ffn_norm.weight": (64,), f"{layer}ffn.w12.weight": (128, 64), f"{layer}ffn.w3.weight": (64, 64),
        }  # fmt: skip
    return found | {"decoder.weight": (96, 64), "decoder.bias": (96,)}


def _deci() -> Shapes:
    """Shapes of layers with attention, a matrix, a network alone, and nothing."""
    found: Shapes = {"model.embed_tokens.weight": (296, 64), "model.norm.weight": (64,), "lm_head.weight": (296, 64)}
    widths = {"q": 64, "k": 32, "v": 32}
    found |= {f"model.layers.0.self_attn.{name}_proj.weight": (width, 64) for name, width in widths.items()}
    found |= {f"model.layers.{name}.weight": (64, 64) for name in ("0.self_attn.o_proj", "1.self_attn.linear_attn")}
    found |= {f"model.layers.{i}.input_layernorm.weight": (64,) for i in range(2)}
    found |= {f"model.layers.{i}.post_attention_layernorm.weight": (64,) for i in range(3)}
    for i, n_ff in enumerate((256, 512, 256)):
        found |= _network(f"model.layers.{i}.mlp.", 64, n_ff)
    return found


def _arctic() -> Shapes:
    """Shapes of the networks beside experts, and of norms."""
    found: Shapes = {f"model.layers.{i}.input_layernorm.weight": (64,) for i in range(2)}
    return found | {f"model.layers.{i}.residual_mlp.w{n}.weight": (64, 64) for i in range(2) for n in (1, 2, 3)}


def _grok() -> Shapes:
    """Shapes of two layers under Grok 1's names."""
    found: Shapes = {"transformer.in_out_embed.weight": (320, 64), "transformer.rms_norm.weight": (64,)}
    for i in range(2):
        layer = f"transformer.decoder_layer.{i}."
        widths = {"query": 64, "key": 32, "value": 32, "linear": 64}
        found |= {f"{layer}multi_head_attention.{name}.weight": (width, 64) for name, width in widths.items()}
        found |= {f"{layer}rms_norm{name}.weight": (64,) for name in ("", "_1", "_2", "_3")}
        found[f"{layer}router.weight"] = (4, 64)
        for j in range(4):
            found |= {f"{layer}moe.{j}.{name}.weight": (96, 64) for name in ("linear", "linear_v")}
            found[f"{layer}moe.{j}.linear_1.weight"] = (64, 96)
    return found


_DBRX: dict[str, Any] = {
    "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "vocab_size": 320, "rope_theta": 5e5,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip


def _dbrx() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers with experts below each other."""
    found: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (320, 64), "transformer.norm_f.weight": (64,)}
    for i in range(2):
        layer = f"transformer.blocks.{i}."
        found |= {f"{layer}norm_attn_norm.norm_{n}.weight": (64,) for n in (1, 2)}
        found |= {f"{layer}norm_attn_norm.attn.Wqkv.weight": (128, 64), f"{layer}ffn.router.layer.weight": (4, 64)}
        found[f"{layer}norm_attn_norm.attn.out_proj.weight"] = (64, 64)
        found |= {f"{layer}ffn.experts.mlp.{name}": (4 * 96, 64) for name in ("w1", "v1", "w2")}
    return found | {"lm_head.weight": (320, 64)}


def _codeshell() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers with biases."""
    found: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (320, 64), "lm_head.weight": (320, 64)}
    rows = {"attn.c_attn": (128, 64), "attn.c_proj": (64, 64), "mlp.c_fc": (256, 64), "mlp.c_proj": (64, 256)}
    for i in range(2):
        layer = f"transformer.h.{i}."
        found |= {f"{layer}ln_{n}.{kind}": (64,) for n in (1, 2) for kind in ("weight", "bias")}
        found |= {f"{layer}{name}.weight": shape for name, shape in rows.items()}
        found |= {f"{layer}{name}.bias": shape[:1] for name, shape in rows.items()}
    return found | {"transformer.ln_f.weight": (64,), "transformer.ln_f.bias": (64,)}


_BAILING: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
    "norm_topk_prob": True, "first_k_dense_replace": 0, "rope_theta": 6e5,
}  # fmt: skip
_BAILING2 = _BAILING | {
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
}


def _bailing(*, second: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of attention with one matrix, and of shared experts."""
    found: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (320, 64)}
    for i in range(2):
        attention, mlp = f"model.layers.{i}.attention.", f"model.layers.{i}.mlp."
        found |= {f"{attention}query_key_value.weight": (128, 64), f"{attention}dense.weight": (64, 64)}
        if second:
            found |= {f"{attention}{name}_layernorm.weight": (16,) for name in ("query", "key")}
        if second and not i:
            found |= _network(mlp, 64, 96)
            continue
        found |= _network(f"{mlp}shared_experts.", 64, 32) | ({f"{mlp}gate.expert_bias": (4,)} if second else {})
    return found


def _grove() -> Shapes:
    """Shapes of experts that two others share, and of a bias."""
    found: Shapes = {f"model.layers.{i}.mlp.expert_bias": (4,) for i in range(2)}
    for i, j in ((i, j) for i in range(2) for j in range(2)):
        found |= _network(f"model.layers.{i}.mlp.chunk_experts.{j}.", 64, 32)
    return found


_BAILING3: dict[str, Any] = _BAILING | {
    "first_k_dense_replace": 1, "num_hidden_layers": 3, "layer_group_size": 2, "head_dim": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "short_conv_kernel_size": 4, "no_kda_lora": True,
    "kda_safe_gate": True, "kda_lower_bound": -5.0, "gated_attention_proj_granularity_type": "head_wise",
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
    "expert_swiglu_limit_list": [None, 7.0], "share_expert_swiglu_limit_list": [5.0, None, 5.0],
}  # fmt: skip


def _bailing3(*, rank_q: int) -> Shapes:
    """Shapes of delta attention in block 0, of latent attention in others.

    Block 3, for multi-token prediction, is there with compressed queries.
    """
    blocks = {name: shape for name, shape in _deepseek(4 if rank_q else 3, rank_q=rank_q, predicts=bool(rank_q)).items()
              if not re.search(r"layers\.0\.self_attn|bias|shared", name)}  # fmt: skip
    found = {name.replace("self_attn", "attention").replace("o_proj", "dense"): shape for name, shape in blocks.items()}
    delta = "model.layers.0.attention."
    found |= {f"{delta}{name}_proj.weight": (192, 64) for name in "qkvfg"}
    found |= {f"{delta}{name}_conv1d.weight": (192, 1, 4) for name in "qkv"}
    found |= {f"{delta}A_log": (4,), f"{delta}dt_bias": (192,), f"{delta}b_proj.weight": (4, 64),
              f"{delta}o_norm.weight": (48,), f"{delta}o_proj.weight": (64, 192)}  # fmt: skip
    for i in range(1, 4 if rank_q else 3):
        layer = f"model.layers.{i}."
        found |= {f"{layer}attention.g_proj.weight": (4, 64), f"{layer}mlp.gate.expert_bias": (4,)}
        found |= _network(f"{layer}mlp.shared_experts.", 64, 48)
    return found | ({"model.layers.3.final_layernorm.weight": (64,)} if rank_q else {})


_LAYERS = r"\.layers\."
_BIASES: dict[str, tuple[int, ...]] = {
    **{f"model.layers.{i}.{name}.bias": (n,) for i in range(2) for name, n in (
        ("self_attn.o_proj", 64), ("mlp.up_proj", 96), ("mlp.down_proj", 64), ("input_layernorm", 64),
        ("post_attention_layernorm", 64))},
    "model.norm.bias": (64,),
}  # fmt: skip
"""Biases of projections and norms of two layers, but for those of queries, keys and values."""
_INTERN_NAMES = (
    ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn.q_proj", "attention.wqkv"),
    ("self_attn.o_proj", "attention.wo"), ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
)  # fmt: skip
_EXAONE_NAMES = (
    ("model.embed_tokens", "transformer.wte"), ("model.layers.", "transformer.h."), ("model.norm", "transformer.ln_f"),
    ("self_attn.o_proj", "attn.attention.out_proj"), ("self_attn.", "attn.attention."), ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"), ("mlp.gate_proj", "mlp.c_fc_0"), ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
)  # fmt: skip


def _exaone_predicting(**options: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer for multi-token prediction."""
    layer = decoder_shapes(SIZES | {"head_dim": 32, "num_hidden_layers": 1}, qk_norm=32, **options)
    found = {f"mtp.{name[6:]}": shape for name, shape in layer.items() if re.match(r"model\.(layers|norm)\.", name)}
    norms = {f"mtp.pre_fc_norm_{name}.weight": (64,) for name in ("embedding", "hidden")}
    return found | norms | {"mtp.fc.weight": (64, 128)}


def _switch() -> dict[str, tuple[int, ...]]:
    """Shapes of two layers' projections, and of two adapters of them."""
    found: dict[str, tuple[int, ...]] = {"model.switch.adapter_token_ids": (2,)}
    for i in range(2):
        for name, n_in, widths in (
            ("self_attn.qkv_proj", 64, (64, 32, 32)), ("self_attn.o_proj", 64, (64,)),
            ("shared_mlp.input_linear", 64, (96, 96)), ("shared_mlp.output_linear", 96, (64,)),
        ):  # fmt: skip
            stem = f"model.layers.{i}.{name}."
            found[f"{stem}base_layer.weight"] = (sum(widths), n_in)
            for part, width in enumerate(widths):
                end = f"_slices.{part}" if len(widths) > 1 else ""
                found |= {f"{stem}lora_A{end}": (2, 1, 8, n_in), f"{stem}lora_B{end}": (2, 1, width, 8)}
    return found


def _puzzle() -> dict[str, tuple[int, ...]]:
    """Shapes of a state space, experts of two widths and attention."""
    found: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (320, 64), "model.norm_f.weight": (64,), "lm_head.weight": (320, 64),
        "mtp.layers.0.eh_proj.weight": (64, 128),
    }  # fmt: skip
    blocks: list[dict[str, tuple[int, ...]]] = [{
        "in_proj.weight": (64 + 128 + 4, 64), "conv1d.weight": (128, 1, 4), "conv1d.bias": (128,), "dt_bias": (4,),
        "A_log": (4,), "D": (4,), "norm.weight": (64,), "out_proj.weight": (64, 64),
    }]  # fmt: skip
    for n_ff in (32, 64):
        sizes: dict[str, tuple[int, ...]] = {
            "gate.weight": (4, 64), "gate.e_score_correction_bias": (4,), "fc1_latent_proj.weight": (32, 64),
            "fc2_latent_proj.weight": (64, 32), "shared_experts.up_proj.weight": (48, 64),
            "shared_experts.down_proj.weight": (64, 48),
        }  # fmt: skip
        sizes |= {f"experts.{i}.up_proj.weight": (n_ff, 32) for i in range(4)}
        blocks.append(sizes | {f"experts.{i}.down_proj.weight": (32, n_ff) for i in range(4)})
    blocks.append({f"{name}_proj.weight": (n, 64) for name, n in (("q", 128), ("k", 64), ("v", 64))})
    blocks[-1]["o_proj.weight"] = (64, 128)
    for i, block in enumerate(blocks):
        found[f"model.layers.{i}.norm.weight"] = (64,)
        found |= {f"model.layers.{i}.mixer.{name}": shape for name, shape in block.items()}
    return found


CASES: dict[str, dict[str, Any]] = {
    "llama": _case("LlamaForCausalLM", "llama", {"rope_theta": 10000.0}, tokenizer="sentencepiece"),
    "llama_int_theta": _case(
        "LlamaForCausalLM", "llama", {"rope_theta": 500000}, tokenizer="sentencepiece", jinja=True
    ),
    "llama3": _case(
        "LlamaForCausalLM", "llama",
        {"rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE, "head_dim": 16, "bos_token_id": 263,
         "eos_token_id": [265, 263], "tie_word_embeddings": True},
        tokenizer="llama3", shards=2,
    ),
    "llama_embed": _case(
        "LlamaBidirectionalModel", "llama", {"rope_theta": 500000.0}, tokenizer="llama3",
        without="lm_head", renamed=(("model.", ""),),
    ),
    "llama3_deep": _case(
        "LlamaForCausalLM", "llama", {"num_hidden_layers": 6}, tokenizer="llama3", peer=False
    ),
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "base": "llama3_deep",
        "shapes": _eagle3("midlayer"),
        "config": SIZES | _ONE_LAYER | {"draft_vocab_size": 96, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    },
    "eagle3_speculator": {
        "architectures": ["Eagle3Speculator"], "model_type": "speculators", "base": "llama3_deep",
        "shapes": _eagle3("layers.0") | {"input_norm.weight": (192,), "embed_tokens.weight": (320, 64)},
        "config": {
            "transformer_layer_config": SIZES | _ONE_LAYER | {"rope_theta": 500000.0, "head_dim": 16},
            "draft_vocab_size": 96,
            "norm_before_residual": True, "norm_before_fc": True, "target_hidden_size": 64,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
    },
    "llama_f16": _case("LlamaForCausalLM", "llama", {"rope_theta": 10000.0}, tokenizer="sentencepiece", dtype="F16"),
    "llama_f32": _case("LlamaForCausalLM", "llama", {}, tokenizer="sentencepiece", dtype="F32", outtype="f32"),
    "llama_as_f16": _case("LlamaForCausalLM", "llama", {}, tokenizer="sentencepiece", outtype="f16"),
    "llama_f32_as_bf16": _case("LlamaForCausalLM", "llama", {}, tokenizer="sentencepiece", dtype="F32", outtype="bf16"),
    "llama_biases": _case(
        "LlamaForCausalLM", "llama", {"attention_bias": True}, tokenizer="sentencepiece", biases="qkv"
    ),
    "sarashina2_vision": {
        "architectures": ["Sarashina2VisionForCausalLM"], "model_type": "sarashina2_vision",
        "tokenizer": "sentencepiece",
        "config": {"text_config": SIZES | {"model_type": "llama", "rope_theta": 1e4}},
        "shapes": _inside("llm.", ("norm.weight", "visual.merger.mlp.0.weight")),
    },
    "nanbeige": _case(
        "NanbeigeForCausalLM", "nanbeige", {"rope_theta": 7e4, "num_loops": 2, "head_dim": 32},
        tokenizer="sentencepiece",
    ),
    "internlm2": _case(
        "InternLM2ForCausalLM", "internlm2", {"rope_theta": 1e6, "vocab_size": 315, "eos_token_id": 2},
        tokenizer="sentencepiece", added={311: "<|im_end|>"}, more=("[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]", "\0"),
        renamed=_INTERN_NAMES, without=r"\.[kv]_proj\.",
        tensors={f"model.layers.{i}.attention.wqkv.weight": (128, 64) for i in range(2)},
    ),
    "internlm3": _case(
        "InternLM3ForCausalLM", "internlm3",
        {"head_dim": 32, "rope_theta": 5e7, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "eos_token_id": 2},
        tokenizer="sentencepiece", added={311: "<|im_end|>"},
    ),
    "plamo": _case(
        "PlamoForCausalLM", "plamo",
        {"hidden_size": 5120, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 40,
         "num_key_value_heads": 40, "n_shared_head": 8},
        tokenizer="sentencepiece", slow=True,
        shapes={
            "model.embed_tokens.weight": (320, 5120), "model.norm.weight": (5120,), "lm_head.weight": (320, 5120),
            **{f"model.layers.layers.0.{name}.weight": shape for name, shape in (
                ("norm", (5120,)), ("self_attn.q_proj", (5120, 5120)), ("self_attn.k_proj", (640, 5120)),
                ("self_attn.v_proj", (640, 5120)), ("self_attn.o_proj", (5120, 5120)), ("mlp.gate_proj", (32, 5120)),
                ("mlp.up_proj", (32, 5120)), ("mlp.down_proj", (5120, 32)))},
        },
    ),
    "talkie": {
        "architectures": ["TalkieForCausalLM"], "model_type": "talkie", "tokenizer": "gpt4o", "pre": "talkie",
        "config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "head_dim": 16, "max_position_embeddings": 512, "rope_theta": 1e6, "vocab_size": 320},
        "shapes": {"model.embed.weight": (320, 64), "lm_head": (320, 64), "lm_head_gain.w_g": (1,)} | {
            f"model.blocks.{i}.{name}": shape for i in range(2) for name, shape in (
                *((f"attn.attn_{kind}.weight", (64, 64)) for kind in ("query", "key", "value", "resid")),
                ("attn.head_gain.head_g", (4,)), ("attn_gain.a_g", (1,)), ("mlp_gain.a_g", (1,)),
                ("embed_skip.a_g", (1,)), ("mlp.mlp_gate.weight", (96, 64)), ("mlp.mlp_linear.weight", (96, 64)),
                ("mlp.mlp_resid.weight", (64, 96)))},
    },
    "minicpm": _case(
        "MiniCPMForCausalLM", "minicpm",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "rope_theta": 1e4, "tie_word_embeddings": True},
        tokenizer="sentencepiece",
    ),
    "minicpm4": _case(
        "MiniCPMForCausalLM", "minicpm",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "rope_theta": 1e4,
         "rope_scaling": _LONG_ROPE | {"original_max_position_embeddings": 128}},
        tokenizer="sentencepiece",
    ),
    "minicpm3": _case(
        "MiniCPM3ForCausalLM", "minicpm3",
        _LATENT | {"q_lora_rank": 48, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32,
                   "rope_scaling": _LONG_ROPE},
        tokenizer="sentencepiece", without=r"self_attn\.", tensors=_latent(rank_q=48),
        changed={"dim_model_base": 256, "rms_norm_eps": 1e-6, "rope_scaling": None},
    ),
    "plm": _case(
        "PLMForCausalLM", "plm", _LATENT | {"q_lora_rank": None, "hidden_act": "relu2", "tie_word_embeddings": True},
        tokenizer="qwen2", without=r"self_attn\.", gated=False, tensors=_latent(rank_q=0),
    ),
    "pangu": _case(
        "PanguEmbeddedForCausalLM", "PanguEmbedded", {"rope_theta": 16e6, "bias": True}, tokenizer="sentencepiece",
        biases="qkv", tensors={f"model.layers.{i}.self_attn.o_proj.bias": (64,) for i in range(2)},
    ),
    "orion": _case(
        "OrionForCausalLM", "orion", {"num_key_value_heads": 4, "rope_theta": 1e4}, tokenizer="sentencepiece",
        tensors={"model.norm.bias": (64,)}
        | {f"model.layers.{i}.{name}.bias": (64,) for i in range(2)
           for name in ("input_layernorm", "post_attention_layernorm")},
    ),
    "baichuan": _case(
        "BaichuanForCausalLM", "baichuan", {"num_key_value_heads": 4, "rope_theta": 1e4}, tokenizer="sentencepiece",
        without=r"self_attn\.[qkv]_proj",
        tensors={f"model.layers.{i}.self_attn.W_pack.weight": (192, 64) for i in range(2)},
    ),
    "bitnet": _case(
        "BitnetForCausalLM", "llama", {"rope_theta": 1e4, "tie_word_embeddings": True}, tokenizer="sentencepiece",
        tensors={f"model.layers.{i}.{name}.weight": (n,) for i in range(2)
                 for name, n in (("self_attn.inner_attn_ln", 64), ("mlp.ffn_layernorm", 96))},
    ),
    "xverse": _case(
        "XverseForCausalLM", "xverse", {"num_key_value_heads": 4, "rope_theta": 1e4, "vocab_size": 296},
        tokenizer="ranked", pre="",
    ),
    "refact": {
        "architectures": ["GPTRefactForCausalLM"], "model_type": "gpt_refact", "tokenizer": "gpt2",
        "config": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_inner": None, "vocab_size": 320,
                   "layer_norm_epsilon": 1e-5, "multi_query": True},
        "shapes": _refact(),
    },
    "openelm": {
        "architectures": ["OpenELMForCausalLM"], "model_type": "openelm", "tokenizer": "sentencepiece",
        "config": {"num_transformer_layers": 2, "model_dim": 64, "head_dim": 16, "num_query_heads": [4, 6],
                   "num_kv_heads": [2, 3], "ffn_multipliers": [0.5, 1.1], "ffn_dim_divisor": 32,
                   "rope_freq_constant": 10000, "max_context_length": 512, "vocab_size": 320,
                   "share_input_output_layers": True},
        "shapes": _openelm(),
    },
    "spark2_5": _case(
        "Spark2_5ForCausalLM", "spark2_5",
        {"head_dim": 32, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
         "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "hidden_act": "gelu",
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
        tokenizer="qwen2", without=r"self_attn\.[qkv]_proj",
        tensors={f"model.layers.{i}.self_attn.{name}_proj.weight": (n, 64) for i in range(2)
                 for name, n in (("q_k_v", 256), ("g", 4))},
    ),
    "smallthinker": _case(
        "SmallThinkerForCausalLM", "smallthinker",
        {"head_dim": 32, "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 48,
         "moe_primary_router_apply_softmax": False, "rope_theta": 1.5e6, "sliding_window_layout": [0, 1],
         "sliding_window_size": 4096, "rope_layout": [0, 1]},
        tokenizer="qwen2", without=r"\.mlp\.", tensors=_smallthinker(),
    ),
    "maple": _case(
        "MapleForCausalLM", "maple",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32, "sliding_window": 64,
         "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e6, "partial_rotary_factor": 0.5,
         "nope_on_global_attention": True, "norm_topk_prob": True},
        tokenizer="qwen2", qk_norm=32, experts="qwen",
    ),
    "deci": _case(
        "DeciLMForCausalLM", "nemotron-nas",
        {"num_hidden_layers": 4, "intermediate_size": None, "num_key_value_heads": None, "vocab_size": 296,
         "rope_theta": 5e5, "block_configs": [
             {"attention": {"n_heads_in_group": n, "replace_with_linear": linear}, "ffn": {"ffn_mult": width}}
             for n, linear, width in ((2, False, 1.5), (None, True, 7.0), (None, False, 1.5), (None, False, None))]},
        tokenizer="ranked", pre="", shapes=_deci(),
    ),
    "deci_7b": _case(
        "DeciLMForCausalLM", "deci", {"vocab_size": 296, "num_key_value_heads_per_layer": [2, 2], "rope_theta": 1e4},
        tokenizer="ranked", pre="",
    ),
    "grok": _case(
        "Grok1ForCausalLM", "grok-1",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_theta": 1e4,
         "embedding_multiplier_scale": 78.38367176906169, "output_multiplier_scale": 0.5773502691896257},
        tokenizer="sentencepiece", shapes=_grok(),
    ),
    "grok2": _case(
        "Grok1ForCausalLM", "grok-2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_theta": 208533496.0,
         "moe_intermediate_size": 96, "final_logit_softcapping": 50, "attn_logit_softcapping": 25.0,
         "rope_type": "original", "scaling_factor": 16.0, "original_max_position_embeddings": 128,
         "extrapolation_factor": 1.0, "attn_factor": 1.0, "beta_fast": 8, "beta_slow": 1, "attn_temperature_len": 128,
         "embedding_multiplier_scale": 90.5, "output_multiplier_scale": 0.5},
        tokenizer="qwen2", jinja=True, pre="grok-2", experts="mixtral",
        norms=("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"),
        tensors=_network("model.layers.0.mlp.", 64, 96) | _network("model.layers.1.mlp.", 64, 96),
    ),
    "arctic": _case(
        "ArcticForCausalLM", "arctic",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4}, tokenizer="sentencepiece",
        added={309: "<|im_end|>"}, experts="mixtral", norms=("post_attention_layernorm", "residual_layernorm"),
        tensors=_arctic(),
    ),
    "llama_fp8": _case(
        "LlamaForCausalLM", "llama", {"rope_theta": 1e4, "quantization_config": FP8},
        tokenizer="sentencepiece", fp8=True,
    ),
    "llava": _case(
        "LlavaForConditionalGeneration", "llava",
        {"head_dim": 32, "text_config": SIZES | {"model_type": "mistral", "head_dim": 32, "rope_theta": 1e9},
         "vision_config": {"model_type": "pixtral", "hidden_size": 32}},
        tokenizer="sentencepiece",
        renamed=(("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
        tensors={"vision_tower.ln_pre.weight": (32,), "multi_modal_projector.linear_1.weight": (64, 32)},
    ),
    "smolvlm": _case(
        "SmolVLMForConditionalGeneration", "smolvlm",
        {"text_config": SIZES | {"model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "rope_theta": 1e5}},
        tokenizer="sentencepiece",
        renamed=(("model.", "model.text_model."),),
        tensors={"model.vision_model.post_layernorm.weight": (32,),
                 "model.connector.modality_projection.proj.weight": (64, 32)}, changed=_SEEN,
    ),
    "janus": _case(
        "JanusForConditionalGeneration", "janus",
        {"text_config": SIZES | {"model_type": "llama", "rope_theta": 1e4}},
        tokenizer="llama3", renamed=(("model.", "model.language_model."),),
        tensors={"model.vision_model.post_layernorm.weight": (32,), "model.aligner.fc1.weight": (64, 32),
                 "model.vqmodel.quantize.embedding.weight": (32, 8), "model.generation_head.proj_out.weight": (64, 64)},
        changed=_SEEN | {"vq_config": {"embed_dim": 4, "num_embeddings": 16, "base_channels": 32, "num_res_blocks": 1,
                                       "channel_multiplier": [1, 1], "latent_channels": 8, "projection_dim": 64}},
    ),
    "qwen3moe_fp8": _case(
        "Qwen3MoeForCausalLM", "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "rope_theta": 1e6, "head_dim": 32,
         "quantization_config": FP8},
        tokenizer="qwen2", qk_norm=32, experts="qwen", fp8=True,
    ),
    "mistral": _case(
        "MistralForCausalLM", "mistral", {"rope_theta": 1e6, "head_dim": 32, "sliding_window": None},
        tokenizer="sentencepiece", generation={"temperature": 0.7, "top_p": 0.95, "top_k": 40},
    ),
    "mixtral": _case(
        "MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
        tokenizer="sentencepiece", experts="mixtral", shards=3,
    ),
    "qwen": {
        "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "tokenizer": "tiktoken", "pre": "qwen2",
        "config": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "kv_channels": 16, "layer_norm_epsilon": 1e-6, "max_position_embeddings": 512,
                   "rotary_emb_base": 10000, "rotary_pct": 1.0, "seq_length": 512, "vocab_size": 480},
        "shapes": {"transformer.wte.weight": (480, 64), "transformer.ln_f.weight": (64,), "lm_head.weight": (480, 64)}
        | {f"transformer.h.{i}.{name}": shape for i in range(2) for name, shape in (
            ("ln_1.weight", (64,)), ("ln_2.weight", (64,)), ("attn.c_attn.weight", (192, 64)),
            ("attn.c_attn.bias", (192,)), ("attn.c_proj.weight", (64, 64)), ("mlp.w1.weight", (96, 64)),
            ("mlp.w2.weight", (96, 64)), ("mlp.c_proj.weight", (64, 96)))},
        "differs": (r"layer_norm_rms_epsilon$",),
    },
    "qwen2": _case("Qwen2ForCausalLM", "qwen2", {"rope_theta": 1e6}, tokenizer="qwen2", biases="qkv"),
    "qwen2_yarn": _case(
        "Qwen2ForCausalLM", "qwen2", {"rope_theta": 1e6, "rope_scaling": _YARN}, tokenizer="qwen2", biases="qkv",
        generation={"temperature": 0.7, "repetition_penalty": 1.05},
    ),
    "qwen2audio": {
        "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "tokenizer": "qwen2",
        "config": {"text_config": SIZES | {"model_type": "qwen2", "rope_theta": 1e6}, "audio_config": {"d_model": 32}},
        "shapes": _inside(
            "language_model.", ("audio_tower.conv1.weight", "multi_modal_projector.linear.weight"), biases="qkv"
        ),
    },
    "qwen25omni": {
        "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "tokenizer": "qwen2",
        "config": {"thinker_config": {
            "model_type": "qwen2_5_omni_thinker", "text_config": SIZES | {
                "model_type": "qwen2_5_omni_text", "rope_theta": 1e6, "rope_scaling": {
                    "type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}}}},
        "shapes": _inside(
            "thinker.", ("thinker.visual.merger.weight", "thinker.audio_tower.conv1.weight", "talker.codec_head.weight",
                         "token2wav.code2wav_bigvgan_model.conv_pre.weight"), biases="qkv",
        ),
    },
    "qwen3asr": {
        "architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr", "tokenizer": "qwen2",
        "differs": (r"^tokenizer\.chat_template$",),
        "config": {"thinker_config": {"text_config": SIZES | {
            "head_dim": 32, "rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}}}},
        "shapes": _inside(
            "thinker.", ("thinker.audio_tower.conv_out.weight",), SIZES | {"head_dim": 32}, qk_norm=32
        ),
    },
    "qwen3omni": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe", "tokenizer": "qwen2",
        "config": {"thinker_config": {"text_config": _OMNI}},
        "shapes": _inside(
            "thinker.", ("thinker.visual.merger.ln_q.weight", "thinker.audio_tower.conv_out.weight",
                         "code2wav.decoder.0.conv.weight", "talker.codec_head.weight"), _OMNI,
            qk_norm=32, experts="qwen",
        ),
    },
    "qwen2moe": _case(
        "Qwen2MoeForCausalLM", "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 1e6,
         "shared_expert_intermediate_size": 64},
        tokenizer="qwen2", biases="qkv", experts="qwen", shared=True,
    ),
    "qwen3": _case("Qwen3ForCausalLM", "qwen3", {"rope_theta": 1e6, "head_dim": 32}, tokenizer="qwen2", qk_norm=32),
    "dflash": _case(
        "DFlashDraftModel", "qwen3",
        {"rope_theta": 1e6, "head_dim": 32, "dflash_config": _BLOCK, "use_sliding_window": True, "sliding_window": 64,
         "layer_types": ["sliding_attention", "full_attention"], "rope_is_neox_style": False, "is_causal": False},
        **_DFLASH,
    ),
    "dflash2": _case(
        "DFlash2DraftModel", "qwen3",
        {"rope_theta": 1e6, "head_dim": 32, "has_embed_tokens": False, "partial_rotary_factor": 0.5,
         "dflash_config": _BLOCK | {
             "conv_kernel_size": 4, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4, "causal": True,
             "output_multiplier": 0.5, "final_logit_softcapping": 30, "input_embedding_scale": 8.0, "use_swa": True,
             "swa_window_size": 32, "attention_value_scale": 0.75}},
        **_DFLASH | {"base": "qwen3vl", "without": "lm_head", "tensors": _DFLASH["tensors"] | _CONV},
    ),
    "gemma4_dspark": {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_dspark", "base": "gemma4",
        "config": SIZES | {
            "vocab_size": 296, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
            "attention_k_eq_v": True, "layer_types": ["full_attention"] * 2,
            "final_logit_softcapping": None, "dflash_config": _BLOCK, "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        },
        "shapes": {
            name.removeprefix("model."): shape
            for name, shape in decoder_shapes(
                SIZES | {"head_dim": 32, "num_key_value_heads": 1}, norms=_SANDWICH, qk_norm=32
            ).items()
            if not re.search("embed_tokens|lm_head|v_proj", name)
        } | _DFLASH["tensors"] | _MARKOV | {f"layers.{i}.layer_scalar": (1,) for i in range(2)}
        | {name: (296, 8) for name in _MARKOV if ".markov_w" in name},
    },
    "muse_glimmer_assistant": _case(
        "MuseGlimmerAssistantModel", "muse_glimmer_assistant",
        {"rope_theta": 1e6, "head_dim": 32, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2} | _BLOCK,
        **_DFLASH | {
            "base": "muse_glimmer", "renamed": (),
            "tensors": {"fc.weight": (64, 128), "model.hidden_norm.weight": (64,)},
        },
    ),
    "dspark": _case(
        "Qwen3DSparkModel", "qwen3", {"rope_theta": 1e6, "head_dim": 32} | _BLOCK,
        **_DFLASH | {"without": "embed_tokens", "tensors": _DFLASH["tensors"] | _MARKOV},
    ),
    "dspark_speculator": {
        "architectures": ["DSparkSpeculator"], "model_type": "speculators", **_DFLASH,
        "tensors": _DFLASH["tensors"] | _MARKOV | {
            "d2t": (96,), "t2d": (320,), "lm_head.weight": (96, 64), "markov_head.markov_w2.weight": (96, 8),
        },
        "config": SIZES | {
            "transformer_layer_config": SIZES | {"rope_theta": 1e6, "head_dim": 32}, "draft_vocab_size": 96,
            "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 7, "head_dim": 32,
        },
    },
    "qwen3_embedding": _case(
        "Qwen3ForCausalLM", "qwen3", {"rope_theta": 1e6, "head_dim": 32}, tokenizer="qwen2", qk_norm=32,
        pooling="lasttoken",
    ),
    "qwen3_tied": _case(
        "Qwen3ForCausalLM", "qwen3", {"rope_theta": 1e6, "head_dim": 32, "tie_word_embeddings": True},
        tokenizer="qwen2", qk_norm=32, shards=2,
    ),
    "qwen3moe": _case(
        "Qwen3MoeForCausalLM", "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 1e6, "head_dim": 32,
         "norm_topk_prob": True},
        tokenizer="qwen2", qk_norm=32, experts="qwen",
    ),
    "granite": _case(
        "GraniteForCausalLM", "granite",
        {"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "logits_scaling": 8.0, "rope_theta": 1e4},
        tokenizer="gpt2",
    ),
    "granite_swa": _case(
        "GraniteSWAForCausalLM", "granite_swa",
        _GRANITE_SWA | {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"],
                        "no_rope_layers": [0, 1]},
        tokenizer="gpt2", tensors=_SINKS, changed={"no_rope_layers": None, "layer_rope_theta": [0.0, 1e4]},
    ),
    "granite_swa_moe": _case(
        "GraniteMoeSWAForCausalLM", "granitemoe_swa",
        _GRANITE_SWA | {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
                        "shared_intermediate_size": 48},
        tokenizer="gpt2", without=r"\.mlp\.",
        tensors=_SINKS | {
            f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in (
                ("block_sparse_moe.router.weight", (4, 64)),
                ("block_sparse_moe.experts.gate_up_proj", (4, 192, 64)),
                ("block_sparse_moe.experts.down_proj", (4, 64, 96)),
                ("shared_mlp.input_linear.weight", (96, 64)), ("shared_mlp.output_linear.weight", (64, 48)))},
    ),
    "nemotron_puzzle": {
        "architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle",
        "config": SIZES | {
            "num_hidden_layers": 9, "head_dim": 32, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
            "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 4, "n_shared_experts": 1, "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "num_nextn_predict_layers": 1,
            "block_configs": [{"block_type": "mamba"}, *(
                {"block_type": "moe", "moe_intermediate_size": n_ff, "num_experts_per_tok": n}
                for n_ff, n in ((32, 2), (64, 3))), {"block_type": "attention"}]},
        "tokenizer": "llama3_merged", "shapes": _puzzle(), "differs": (r"\.ssm_a$",),
    },
    "lfm2_unmasked": checkpoint_models.cases()["lfm2_embedding"] | {"architectures": ["Lfm2BidirectionalModel"]},
    "granite_switch": _case(
        "GraniteSwitchForCausalLM", "granite_switch",
        _GRANITE_SWA | {"num_hidden_layers": 3, "num_experts_per_tok": 10, "num_local_experts": 0, "head_dim": 16,
                        "shared_intermediate_size": 96, "num_adapters": 2, "max_lora_rank": 8, "tie_word_embeddings":
                        True, "adapter_token_ids": [270, 271], "adapter_substitute_token_ids": [80, 81]},
        tokenizer="gpt2", without=r"\.layers\.2\.|\.mlp\.|_proj", tensors=_switch(),
    ),
    "bamba": _case(
        "BambaForCausalLM", "bamba",
        {"vocab_size": 317, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
         "mamba_d_head": 16, "mamba_d_conv": 4, "mamba_expand": 2, "rope_theta": 1e4, "attn_rotary_emb": 8},
        tokenizer="gpt2", shapes=_bamba(), differs=(r"\.ssm_a$", r"\.attn_[qk]\.weight$"),
    ),
    "rnd1": _case(
        "RND1", "rnd1",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 1e6, "head_dim": 32,
         "mask_token_id": 266},
        tokenizer="qwen2", qk_norm=32, experts="qwen",
    ),
    "llada": {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "tokenizer": "qwen2", "pre": "llada-moe",
        "config": {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 96,
                   "max_sequence_length": 512, "vocab_size": 320, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
                   "mask_token_id": 266},
        "shapes": _llada(),
    },
    "llada_moe": _case(
        "LLaDAMoEModelLM", "llada",
        {"num_experts": 4, "num_experts_per_tok": 2, "expert_intermediate_size": 32, "moe_intermediate_size": 32,
         "dense_intermediate_size": 128, "rope_theta": 5e4},
        tokenizer="qwen2", pre="llada-moe", qk_norm=16, experts="qwen",
    ),
    "hrm": {
        "architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text", "tokenizer": "qwen2", "shapes": _hrm(),
        "config": SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 2, "num_layers_per_stack": 2, "H_cycles": 2,
                           "L_cycles": 1, "head_dim": 16, "embedding_scale": 8.0, "prefix_lm": False},
    },
    "maincoder": _case(
        "MaincoderForCausalLM", "maincoder", {"head_dim": 16, "rope_theta": 1e6}, tokenizer="qwen2", qk_norm=16
    ),
    "olmo2": _case(
        "Olmo2ForCausalLM", "olmo2", {"num_key_value_heads": 4, "rope_theta": 5e5}, tokenizer="llama3_merged",
        norms=_SANDWICH[1::2], qk_norm=64,
    ),
    "olmo3": _case(
        "Olmo3ForCausalLM", "olmo3",
        {"num_key_value_heads": 4, "rope_theta": 5e5, "sliding_window": 64, "num_hidden_layers": 5},
        tokenizer="llama3_merged", norms=_SANDWICH[1::2], qk_norm=64,
    ),
    "olmoe": _case(
        "OlmoeForCausalLM", "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "rope_theta": 1e4},
        tokenizer="llama3_merged", qk_norm=64, experts="qwen",
    ),
    "ernie": _case(
        "Ernie4_5ForCausalLM", "ernie4_5", {"head_dim": 32, "rope_theta": 5e5, "tie_word_embeddings": True},
        tokenizer="sentencepiece",
    ),
    "paddleocr": _case(
        "PaddleOCRVLForConditionalGeneration", "paddleocr_vl_raw",
        {"head_dim": 16, "rope_theta": 5e5, "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}},
        tokenizer="sentencepiece", tensors={"mlp_AR.linear_1.weight": (64, 128), "visual.vision_model.x.bias": (32,)},
        changed=_SEEN | {"model_type": "paddleocr_vl"},
    ),
    "cohere2": _case(
        "Cohere2ForCausalLM", "cohere2",
        {"logit_scale": 0.25, "sliding_window": 64, "rotary_pct": 1.0, "layer_norm_eps": 1e-5, "rope_theta": 5e4,
         "tie_word_embeddings": True},
        tokenizer="gpt2", norms=("input_layernorm",),
    ),
    "cohere2moe": _case(
        "Cohere2MoeForCausalLM", "cohere2_moe",
        {"head_dim": 16, "layer_norm_eps": 1e-5, "rms_norm_eps": None, "logit_scale": 0.25, "sliding_window": 64,
         "rope_theta": 5e4, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4,
         "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "prefix_dense_intermediate_size": 128, "expert_selection_fn": "sigmoid", "norm_topk_prob": True,
         "tie_word_embeddings": True},
        tokenizer="gpt2", experts="qwen", norms=("input_layernorm",), without=r"layers\.0\.mlp",
        tensors=_network("model.layers.0.mlp.", 64, 128) | _network("model.layers.1.mlp.shared_experts.", 64, 96)
        | {f"model.layers.1.mlp.experts.{j}.{name}_proj.weight": shape for j in range(4)
           for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))},
    ),
    "seed_oss": _case(
        "SeedOssForCausalLM", "seed_oss", {"head_dim": 32, "rope_theta": 1e7}, tokenizer="qwen2", biases="qkv"
    ),
    "exaone": _case(
        "ExaoneForCausalLM", "exaone3",
        {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu", "rope_theta": 1e4,
         "rms_norm_eps": None, "tie_word_embeddings": True},
        tokenizer="gpt2", renamed=_EXAONE_NAMES, differs=(r"layer_norm_rms_epsilon$",),
    ),
    "exaone45": _case(
        "Exaone4_5_ForConditionalGeneration", "exaone4_5_raw",
        {"head_dim": 32, "rope_theta": 1e6, "num_nextn_predict_layers": 1, "sliding_window": 64,
         "sliding_window_pattern": "LLLG"},
        tokenizer="gpt2", pre="exaone4", norms=_SANDWICH[1::2], qk_norm=32,
        tensors=_exaone_predicting(norms=_SANDWICH[1::2]) | {"model.visual.merger.ln_q.weight": (32,)},
    ),
    "exaonemoe": _case(
        "ExaoneMoEForCausalLM", "exaone_moe",
        {"head_dim": 32, "rope_theta": 1e6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
         "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
         "sliding_window": 64, "sliding_window_pattern": 4},
        tokenizer="gpt2", qk_norm=32, experts="qwen", without=r"layers\.0\.mlp\.",
        tensors=_network("model.layers.0.mlp.", 64, 96) | _network("model.layers.1.mlp.shared_experts.", 64, 32)
        | _exaone_predicting() | {"model.layers.1.mlp.gate.e_score_correction_bias": (4,)},
    ),
    "dbrx": {
        "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "tokenizer": "llama3_merged",
        "config": _DBRX, "shapes": _dbrx(), "differs": (r"ffn_gate_inp\.weight$",),
    },
    "dream": _case(
        "DreamModel", "Dream", {"rope_theta": 1e6, "mask_token_id": 264, "max_position_embeddings": 2048},
        tokenizer="qwen2", biases="qkv",
    ),
    "bailing": _case(
        "BailingMoeForCausalLM", "bailing_moe", _BAILING | {"norm_head": True}, tokenizer="qwen2", pre="bailingmoe",
        experts="qwen", without=r"self_attn|embed_tokens", tensors=_bailing(),
    ),
    "bailing2": _case(
        "BailingMoeV2ForCausalLM", "bailing_moe_v2", _BAILING2 | {"partial_rotary_factor": 0.5}, tokenizer="qwen2",
        pre="bailingmoe2", experts="qwen", without=r"self_attn|embed_tokens|layers\.0\.mlp",
        tensors=_bailing(second=True),
    ),
    "grovemoe": _case(
        "GroveMoeForCausalLM", "grove_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 1e7, "head_dim": 32},
        tokenizer="qwen2", qk_norm=32, experts="qwen", tensors=_grove(),
    ),
    "bailing3": _case(
        "BailingMoeV3ForCausalLM", "bailing_moe_v3", _BAILING3 | {"q_lora_rank": 32, "num_nextn_predict_layers": 1},
        tokenizer="qwen2", pre="bailingmoe2", without=_LAYERS, tensors=_bailing3(rank_q=32), differs=(r"\.ssm_a$",),
    ),
    "bailing3_vl": _case(
        "BailingMoeV3VLForConditionalGeneration", "bailing_moe_v3_vl", _BAILING3 | {"mrope_section": [2, 1, 1]},
        tokenizer="qwen2", pre="bailingmoe2", without=_LAYERS, differs=(r"\.ssm_a$",),
        tensors=_bailing3(rank_q=0) | {"linear_proj.0.weight": (64, 32), "visual.blocks.0.norm1.weight": (32,)},
    ),
    "sarvam": _case(
        "SarvamMoEForCausalLM", "sarvam", _BAILING2, tokenizer="ranked", pre="sarvam-moe", dtype="F32", outtype="f32",
        experts="qwen", without=r"self_attn|embed_tokens|layers\.0\.mlp", tensors=_bailing(second=True),
    ),
    "codeshell": {
        "architectures": ["CodeShellForCausalLM"], "model_type": "codeshell", "tokenizer": "gpt2",
        "config": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-5,
                   "num_query_groups": 2, "vocab_size": 320, "n_inner": 256},
        "shapes": _codeshell(),
    },
    "jais": {
        "architectures": ["JAISLMHeadModel"], "model_type": "jais", "tokenizer": "gpt2", "pre": "jais",
        "shapes": _jais(),
        "config": {"n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 2, "n_positions": 512, "vocab_size": 320,
                   "activation_function": "swiglu", "position_embedding_type": "alibi", "layer_norm_epsilon": 1e-5,
                   "mup_embeddings_scale": 9.5, "mup_output_alpha": 2.25, "mup_width_scale": 0.125},
    },
    "rugpt3xl": _case(
        "RuGPT3XLForCausalLM", "rugpt3xl",
        {"num_key_value_heads": 4, "layer_norm_eps": 1e-5, "rms_norm_eps": None}, tokenizer="gpt2", biases="qkv",
        gated=False,
        tensors=_BIASES | {"model.embed_positions.weight": (512, 64)},
    ),
    "jais2": _case(
        "Jais2ForCausalLM", "jais2",
        {"num_key_value_heads": 4, "layer_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "relu2"},
        tokenizer="gpt2", biases="qkv", gated=False,
        tensors=_BIASES,
    ),
    "rwkv6": {
        "architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6", "tokenizer": "rwkv", "shapes": _rwkv6(),
        "config": {"hidden_size": 64, "intermediate_size": None, "num_hidden_layers": 2, "head_size": 16,
                   "num_attention_heads": 64, "layer_norm_epsilon": 1e-5, "rescale_every": 1, "vocab_size": 320,
                   "bos_token_id": 0, "eos_token_id": 0},
        "differs": (r"chat_template$",),
    },
    "rwkv6qwen2": _case(
        "RWKV6Qwen2ForCausalLM", "rwkv6qwen2",
        {"rope_theta": 1e6, "lora_rank_tokenshift": 8, "lora_rank_decay": 16, "num_key_value_heads": 2},
        tokenizer="qwen2", biases="qkv", tensors=_qrwkv6(),
    ),
    "rwkv7": {
        "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "tokenizer": "rwkv", "shapes": _rwkv7(),
        "config": {"hidden_size": 64, "intermediate_size": None, "num_hidden_layers": 2, "head_dim": 16,
                   "norm_eps": 1e-5, "vocab_size": 320, "decay_low_rank_dim": 32, "a_low_rank_dim": 32,
                   "v_low_rank_dim": 32, "gate_low_rank_dim": None},
        "differs": (r"chat_template$",),
    },
    "arwkv7": _case(
        "RwkvHybridForCausalLM", "rwkv_hybrid",
        {"rope_theta": 1e6, "head_size": 16, "wkv_version": 7, "wkv_has_gate": True},
        tokenizer="qwen2", without=r"self_attn\.._proj\.", tensors=_arwkv7(),
    ),
    "mamba_lm": {
        "architectures": ["MambaLMHeadModel"], "model_type": "mamba", "tokenizer": "gpt2", "pre": "olmo",
        "config": {"d_model": 64, "n_layer": 2, "vocab_size": 317, "ssm_cfg": {}, "rms_norm": True,
                   "pad_vocab_size_multiple": 8},
        "shapes": {"backbone.embedding.weight": (320, 64), "backbone.norm_f.weight": (64,)} | {
            f"backbone.layers.{i}.{name}": shape for i in range(2) for name, shape in (
                ("norm.weight", (64,)), ("mixer.A_log", (128, 16)), ("mixer.D", (128,)),
                ("mixer.conv1d.weight", (128, 1, 4)), ("mixer.conv1d.bias", (128,)),
                ("mixer.in_proj.weight", (256, 64)), ("mixer.x_proj.weight", (36, 128)),
                ("mixer.dt_proj.weight", (128, 4)), ("mixer.dt_proj.bias", (128,)),
                ("mixer.out_proj.weight", (64, 128)))},
        "differs": (r"\.ssm_a$",),
    },
    "arcee": _case(
        "ArceeForCausalLM", "arcee", {"rope_theta": 1e4, "hidden_act": "relu2"}, tokenizer="llama3", gated=False
    ),
    "phi2": _case(
        "PhiForCausalLM", "phi",
        {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "rope_theta": 1e4,
         "intermediate_size": 256, "hidden_act": "gelu_new"},
        tokenizer="gpt2", norms=("input_layernorm",), biases="qkv", gated=False,
        renamed=((".o_proj", ".dense"), ("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2"),
                 ("model.norm", "model.final_layernorm")),
        tensors={"model.final_layernorm.bias": (64,), "lm_head.bias": (320,)},
    ),
    "phi3": _case(
        "Phi3ForCausalLM", "phi3",
        {"rope_theta": 1e4, "original_max_position_embeddings": 512, "sliding_window": 200},
        tokenizer="sentencepiece", fused=True,
    ),
    "phi3_long": _case(
        "Phi3ForCausalLM", "phi3",
        {"rope_theta": 1e4, "original_max_position_embeddings": 128, "sliding_window": None, "num_key_value_heads": 4,
         "rope_scaling": {"type": "longrope", "long_factor": [1.0 + i / 4 for i in range(8)],
                          "short_factor": [1.0 + i / 64 for i in range(8)]}},
        tokenizer="sentencepiece", fused=True,
    ),
    "phi4": _case(
        "Phi3ForCausalLM", "phi3",
        {"rope_theta": 250000.0, "original_max_position_embeddings": 512, "sliding_window": None},
        tokenizer="phi4", fused=True,
    ),
    "glm4": _case(
        "Glm4ForCausalLM", "glm4", {"head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        tokenizer="glm", biases="qkv", norms=_GLM_NORMS, without=r"\.mlp\.(gate|up)_proj",
        tensors={f"model.layers.{i}.mlp.gate_up_proj.weight": (192, 64) for i in range(2)},
    ),
    "glm4moe": _case(
        "Glm4MoeForCausalLM", "glm4_moe",
        _GLM_MOE, tokenizer="glm", biases="qkv", qk_norm=32, experts="qwen", without=r"layers\.0\.mlp\.",
        tensors=_glm_moe(),
    ),
    "cogvlm": _case(
        "CogVLMForCausalLM", "cogvlm_raw", {"num_key_value_heads": 4}, tokenizer="llama3",
        without=r"self_attn\.[qkvo]_proj|\.mlp\.",
        tensors={f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in (
            ("self_attn.language_expert_query_key_value", (192, 64)), ("self_attn.language_expert_dense", (64, 64)),
            ("self_attn.vision_expert_dense", (64, 64)), ("mlp.language_mlp.gate_proj", (96, 64)),
            ("mlp.language_mlp.up_proj", (96, 64)), ("mlp.language_mlp.down_proj", (64, 96)))}
        | {"model.vision.boi": (1, 1, 64)},
    ),
    "glm45v": _case(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe",
        {"text_config": SIZES | _GLM_MOE | {"model_type": "glm4v_moe_text", "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}}},
        tokenizer="glm",
        shapes={name.replace("model.", "model.language_model."): shape for name, shape in (
            decoder_shapes(SIZES | _GLM_MOE, biases="qkv", qk_norm=32, experts="qwen") | _glm_moe()).items()
            if "layers.0.mlp.gate." not in name and "layers.0.mlp.experts" not in name}
        | {"model.visual.post_layernorm.weight": (32,)}, changed=_SEEN,
    ),
    "glm4v": _case(
        "Glm4vForConditionalGeneration", "glm4v",
        {"text_config": SIZES | {"model_type": "glm4v_text", "rope_parameters": _GLM_SECTIONS}}, tokenizer="glm",
        shapes=_glm_seen(SIZES, "qkv") | {"model.visual.post_layernorm.weight": (1536,)}, changed=_SEEN,
    ),
    "glm_ocr": _case(
        "GlmOcrForConditionalGeneration", "glm_ocr",
        {"text_config": SIZES | {"head_dim": 32, "num_nextn_predict_layers": 1, "model_type": "glm_ocr_text",
                                 "rope_parameters": _GLM_SECTIONS | {"mrope_section": [8, 4, 4],
                                                                     "partial_rotary_factor": 1.0}}},
        tokenizer="glm", shapes=_glm_seen(SIZES | {"head_dim": 32, "num_hidden_layers": 3})
        | {f"model.language_model.layers.2.{name}.weight": shape for name, shape in _PREDICTION.items()},
        changed=_SEEN,
    ),
    "solar_open": _case(
        "SolarOpenForCausalLM", "solar_open",
        _GLM_MOE | {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0},
        tokenizer="solar", experts="qwen",
        tensors={name: shape for i in range(2) for name, shape in (
            _network(f"model.layers.{i}.mlp.shared_experts.", 64, 32)
            | {f"model.layers.{i}.mlp.gate.e_score_correction_bias": (4,)}).items()},
    ),
    "chatglm": _case(
        "ChatGLMModel", "chatglm",
        {"padded_vocab_size": 320, "ffn_hidden_size": 96, "num_layers": 2, "num_hidden_layers": 2, "seq_length": 512,
         "kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 2, "rope_ratio": 500,
         "layernorm_epsilon": 1.5625e-7, "add_qkv_bias": True},
        tokenizer="chatglm", without="^(model|lm_head)", tensors=_chatglm(),
    ),
    "deepseek2": _case(
        "DeepseekV2ForCausalLM", "deepseek_v2",
        _DEEPSEEK | {"q_lora_rank": None, "scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1,
                     "topk_group": 1, "norm_topk_prob": False, "topk_method": "greedy"},
        tokenizer="deepseek", without=_LAYERS, tensors=_deepseek(2, rank_q=0),
    ),
    "deepseek3": _case(
        "DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK_V3,
        tokenizer="deepseek", without=_LAYERS, tensors=_deepseek(3, rank_q=32, predicts=True), shards=2,
    ),
    "deepseek32": _case(
        "DeepseekV32ForCausalLM", "deepseek_v32",
        _DEEPSEEK_V3 | {"num_hidden_layers": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16},
        tokenizer="deepseek", without=_LAYERS, tensors=_deepseek(3, rank_q=32, predicts=True, indexer=True) | {
            "model.layers.2.shared_head.norm.weight": (64,), "model.layers.2.shared_head.head.weight": (320, 64),
            "model.layers.2.embed_tokens.weight": (320, 64)},
        changed={"index_n_heads": 32},
    ),
    "deepseek4": {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "tokenizer": "deepseek",
        "shapes": _deepseek4(), "dtypes": _V4_DTYPES,
        "config": {name: value for name, value in SIZES.items() if name != "intermediate_size"} | {
            "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16,
            "q_lora_rank": 48, "sliding_window": 8, "o_groups": 2, "o_lora_rank": 32,
            "moe_intermediate_size": 160, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
            "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "compress_ratios": [0, 4, 128, 0],
            "compress_rope_theta": 160000, "hc_mult": 4, "hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "num_hash_layers": 1,
            "num_nextn_predict_layers": 1, "rope_theta": 10000, "rope_scaling": {
                "type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
            "quantization_config": FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}},
    },
    "hy_v4": _case(
        "HYV4ForCausalLM", "hunyuan_v4",
        _DEEPSEEK_V3 | {"n_group": 1, "num_key_value_heads": 2, "rope_scaling": None, "scoring_func": None,
                        "num_nextn_predict_layers": 0, "mlp_layer_types": ["dense", "sparse"], "hc_mult": 2,
                        "first_k_dense_replace": None, "hc_eps": 0.01, "hc_magnitude": 2.0, "swiglu_limit": 10.0,
                        "indexer_types": ["full", "shared"], "index_n_heads": 2, "index_head_dim": 32,
                        "index_topk": 8, "enable_lm_head_fp32": True},
        tokenizer="deepseek", pre="hy_v4", without=_LAYERS, tensors=_hy4(),
    ),
    "glm_dsa": _case(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa",
        _DEEPSEEK_V3 | {"num_hidden_layers": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
                        "rope_scaling": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                        "rope_theta": 1e6, "indexer_types": ["full", "full"], "n_group": 1, "head_dim": 8},
        tokenizer="glm", without=_LAYERS, tensors=_deepseek(3, rank_q=32, predicts=True, indexer=True)
        | {"model.layers.2.shared_head.norm.weight": (64,)}, changed={"index_n_heads": 32},
    ),
    "glm5_next": _case(
        "Glm5NextForConditionalGeneration", "glm5_next",
        {"text_config": SIZES | _DEEPSEEK_V3 | {
            "qk_rope_head_dim": 0, "rope_scaling": None, "n_group": 1, "mla_use_nope": True, "mhc": True, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "index_n_heads": 2, "index_head_dim": 32,
            "index_topk": 8, "index_kpool": 2, "indexer_types": ["shared", "full"], "model_type": "glm5_next_text",
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
                                   "gate_lower_bound": -5.0}}},
        tokenizer="glm", differs=(r"\.ssm_a$",),
        shapes={name.replace("model.", "model.language_model."): shape for name, shape in (
            _MODEL | _glm5()).items()} | {"model.visual.post_layernorm.weight": (32,)},
    ),
    "dots3_note": _case(
        "Dots3NoteForConditionalGeneration", "",
        _DEEPSEEK_V3 | {
            "n_group": 1, "head_dim": 24, "rope_scaling": None, "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window_size": 8, "swa_num_attention_heads": 2, "swa_head_dim": 40, "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 48, "swa_qk_nope_head_dim": 32, "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 16,
            "swa_rope_theta": 5e4, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8,
            "num_nextn_predict_layers": 0, "apply_mla_qkv_lora_rescale": True},
        tokenizer="dots3", pre="qwen2", without=_LAYERS,
        tensors=_dots3() | {"vision_encoder.norm.weight": (32,), "audio_encoder.norm.weight": (32,)},
    ),
    "kimi_linear": _case(
        "KimiLinearForCausalLM", "kimi_linear",
        _KIMI_LINEAR,
        tokenizer="qwen2", without=r"layers\.0\.self_attn|layers\.1\.(mlp|self_attn)", tensors=_kimi_linear(),
        differs=(r"\.ssm_a$",),
    ),
    "kimi_k3": _case(
        "KimiK3ForConditionalGeneration", "kimi_k3",
        {"text_config": SIZES | {
            **_KIMI_LINEAR, "hidden_act": "situ", "moe_intermediate_size": 64, "routed_expert_hidden_size": 96,
            "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2,
            "eos_token_id": 264, "linear_attn_config": _KIMI_LINEAR["linear_attn_config"] | {"gate_lower_bound": -5.0},
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}},
        tokenizer="qwen2", differs=(r"\.ssm_a$",),
        shapes={f"language_model.{name}": shape for name, shape in (_MODEL | _k3()).items()}
        | {"vision_tower.blocks.0.norm.weight": (32,), "mm_projector.proj.weight": (64, 32)},
    ),
    "deepseek_ocr": _case(
        "DeepseekOCRForCausalLM", "DeepseekVLV2",
        {"num_experts": 4, "moe_intermediate_size": 32, "language_config": SIZES | _DEEPSEEK_MOE
         | {"qk_rope_head_dim": 0, "kv_lora_rank": None, "q_lora_rank": None},
         "vision_config": {}},
        tokenizer="deepseek", experts="qwen", without=r"layers\.0\.mlp\.",
        tensors=_DEEPSEEK_NETWORKS | {"model.sam_model.pos_embed": (1, 4, 4, 8), "model.projector.layers.bias": (64,)},
    ),
    "deepseek": _case(
        "DeepseekForCausalLM", "deepseek",
        _DEEPSEEK_MOE, tokenizer="deepseek", pre="deepseek-v3", experts="qwen", without=r"layers\.0\.mlp\.",
        tensors=_DEEPSEEK_NETWORKS,
    ),
    "youtu": _case(
        "YoutuForCausalLM", "youtu",
        {name: value for name, value in _DEEPSEEK.items() if "expert" not in name and "moe" not in name}
        | {"q_lora_rank": 32, "first_k_dense_replace": None},
        tokenizer="deepseek", without=_LAYERS,
        tensors=_deepseek(2, rank_q=32, n_dense=2),
    ),
    "kimi_vl": _case(
        "KimiVLForConditionalGeneration", "kimi_vl",
        {"text_config": SIZES | _DEEPSEEK | {"q_lora_rank": None, "architectures": ["DeepseekV3ForCausalLM"]}},
        tokenizer="deepseek", without=".",
        tensors={f"language_model.{name}": shape for name, shape in (
            decoder_shapes(SIZES | {"num_hidden_layers": 0}) | _deepseek(2, rank_q=0)).items()}
        | {"multi_modal_projector.pre_norm.weight": (64,)},
    ),
    "deepseek3_fp8": _case(
        "DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK_V3 | {"quantization_config": FP8},
        tokenizer="deepseek", without=_LAYERS, tensors=_deepseek(3, rank_q=32, predicts=True), fp8=True,
    ),
    "hunyuan_moe": _case(
        "HunYuanMoEV1ForCausalLM", "hunyuan",
        {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "moe_topk": [2, 2],
         "num_shared_expert": [1, 1], "max_position_embeddings": 32768, "rope_theta": 1e4, "tie_word_embeddings": True,
         "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "moe_intermediate_size": [96, 96]},
        tokenizer="qwen2", pre="hunyuan", without=r"\.mlp\.", tensors=_hunyuan_norms(2, 128) | _hunyuan_experts(),
    ),
    "hunyuan_vl": _case(
        "HunYuanVLForConditionalGeneration", "hunyuan_vl",
        {"head_dim": 32, "rope_theta": 1e4, "tie_word_embeddings": True, "eod_token_id": 265, "pad_token_id": -1,
         "num_experts": 1, "rope_scaling": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0,
                                            "xdrope_section": [4, 4, 4, 4]}},
        tokenizer="deepseek", pre="hunyuan-dense", generation={"eos_token_id": [266, 265]},
        tensors=_hunyuan_norms(2, 32) | {"vit.layers.0.mlp.dense_h_to_4h.weight": (32, 16)}, changed=_SEEN,
    ),
    "hunyuan_vl_mrope": _case(
        "HunYuanVLForConditionalGeneration", "hunyuan_vl",
        {"head_dim": 32, "tie_word_embeddings": True, "eod_token_id": 265,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4,
                             "mrope_section": [4, 4, 4, 4]}},
        tokenizer="deepseek", pre="hunyuan-dense", tensors=_hunyuan_norms(2, 32),
    ),
    "hy_v3": _case(
        "HYV3ForCausalLM", "hy_v3",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 1e6,
         "num_shared_experts": 1, "route_norm": True, "router_scaling_factor": 2.5, "first_k_dense_replace": 1,
         "num_nextn_predict_layers": 1},
        tokenizer="deepseek", pre="hy_v4", qk_norm=32, without=r"layers\.1\.mlp", tensors=_hy3(),
    ),
    "minimax_01": _case(
        "MiniMaxText01ForCausalLM", "minimax_text_01",
        {"num_hidden_layers": 8, "head_dim": 16, "rotary_dim": 8, "rope_theta": 1e7, "num_local_experts": 2,
         "num_experts_per_tok": 1}
        | {f"layernorm_{kind}_{name}": x for name, x in (("alpha", 3.5), ("beta", 1.0))
           for kind in ("full_attention", "linear_attention", "mlp")},
        tokenizer="qwen2", shards=2, zeroed={"model.embed_tokens.weight": 300}, experts="mixtral",
        without=r"layers\.[0-6]\.self_attn", differs=("chat_template",),
        tensors={f"model.layers.{i}.self_attn.{name}.weight": shape for i in range(7)
                 for name, shape in (("qkv_proj", (192, 64)), ("norm", (64,)), ("output_gate", (64, 64)),
                                     ("out_proj", (64, 64)))},
    ),
    "minimax_m3": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3", "tokenizer": "qwen2",
        "config": {"text_config": SIZES | {
            "head_dim": 32, "dense_intermediate_size": 128, "shared_intermediate_size": 96, "rotary_dim": 16,
            "rope_theta": 5e6, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "moe_layer_freq": [0, 1],
            "sparse_attention_config": {"sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_topk_blocks": 16,
                                        "sparse_block_size": 32, "sparse_local_block": 1}}},
        "shapes": _minimax(),
    },
    "qwen3tts": {
        "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts", "tokenizer": "qwen2",
        "config": {"tts_bos_token_id": 5, "speaker_encoder_config": {}, "talker_config": SIZES | {
            "head_dim": 16, "rope_theta": 1e6, "vocab_size": 3072, "text_vocab_size": 320, "text_hidden_size": 48,
            "hidden_act": "silu", "codec_eos_token_id": 2150, "codec_bos_id": 2149, "spk_id": {"some": 3000},
            "codec_language_id": {"english": 2050},
            "rope_scaling": {"interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"}}},
        "shapes": _talker(), "differs": (r"^token_embd\.weight$",),
    },
    "mimo2": _case(
        "MiMoV2FlashForCausalLM", "mimo_v2",
        {"head_dim": 48, "v_head_dim": 32, "swa_head_dim": 48, "swa_v_head_dim": 32, "swa_num_attention_heads": 4,
         "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "hybrid_layer_pattern": [0, 1], "sliding_window": 64,
         "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "scoring_func": "sigmoid",
         "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
         "attention_value_scale": 0.707},
        tokenizer="qwen2", without=_LAYERS, tensors=_mimo(), changed={"model_type": "mimo_v2_flash"},
    ),
    "step35": {
        "architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7_vl", "tokenizer": "deepseek",
        "config": {"text_config": SIZES | {
            "head_dim": 32, "num_attention_groups": 2, "sliding_window": 64, "num_nextn_predict_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "partial_rotary_factors": [0.5, 1.0, 1.0], "rope_theta": [5e6, 1e4, 1e4], "rope_scaling": _LLAMA3_ROPE,
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6,
                                        "num_attention_groups": 2},
            "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 32,
            "moe_layers_enum": "1", "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
            "norm_expert_weight": True, "swiglu_limits": [0.0, 7.0], "swiglu_limits_shared": [None, 16.0]}},
        "shapes": _step(), "differs": ("^rope_freqs",),
    },
    "plamo2": _case(
        "Plamo2ForCausalLM", "plamo2",
        {"hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_num_heads": 4, "mamba_step": 2,
         "mamba_enabled": True, "tie_word_embeddings": True},
        tokenizer="scored", without=_LAYERS, tensors=_plamo(mamba=True), differs=(r"\.ssm_a$",),
    ),
    "plamo3": _case(
        "Plamo3ForCausalLM", "plamo3",
        {"head_dim": 32, "window_size": 64, "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_theta": 10000,
         "rope_scaling_factor": 4, "initial_context_length": 128, "tie_word_embeddings": True},
        tokenizer="scored", without=_LAYERS, tensors=_plamo(mamba=False),
    ),
    "phimoe": _case(
        "PhiMoEForCausalLM", "phimoe",
        {"rope_theta": 1e4, "original_max_position_embeddings": 128, "sliding_window": 200, "num_local_experts": 4,
         "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
         "rope_scaling": {"type": "longrope", "long_factor": [1.0 + i / 4 for i in range(8)],
                          "short_factor": [1.0 + i / 64 for i in range(8)], "long_mscale": 1.2, "short_mscale": 1.1,
                          "original_max_position_embeddings": 128}},
        tokenizer="sentencepiece", biases="qkv", experts="mixtral",
        tensors={"model.norm.bias": (64,), "lm_head.bias": (320,)}
        | {f"model.layers.{i}.{name}.bias": (64,) for i in range(2)
           for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj")},
    ),
    "gptoss": _case(
        "GptOssForCausalLM", "gpt_oss", _GPTOSS, tensors=_gptoss(packed=False), **_GPTOSS_OPTIONS,
        changed={"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
    "gptoss_mxfp4": _case(
        "GptOssForCausalLM", "gpt_oss", _GPTOSS | {"quantization_config": {"quant_method": "mxfp4"}},
        tensors=_gptoss(packed=True), **_GPTOSS_OPTIONS,
    ),
    "lfm25_audio": _case(
        "Lfm25AudioTokenizer", "lfm2",
        {"norm_eps": 1e-5, "conv_L_cache": 3, "layer_types": ["conv", "sliding_attention"], "sliding_window": 30,
         "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32, "rope_theta": 1e6,
         "intermediate_size": 120, "block_ff_dim": 120, "output_size": 34},
        tokenizer="none", without=".", tensors=_lfm25_audio(),
    ),
    "smollm3": _case(
        "SmolLM3ForCausalLM", "smollm3", {"rope_theta": 2e6, "tie_word_embeddings": True}, tokenizer="llama3"
    ),
    "gemma": _case(
        "GemmaForCausalLM", "gemma",
        {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}, tokenizer="sentencepiece",
    ),
    "gemma2": _case(
        "Gemma2ForCausalLM", "gemma2",
        {"head_dim": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 64,
         "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        tokenizer="sentencepiece", norms=_SANDWICH,
    ),
    "gemma3": _case(
        "Gemma3ForCausalLM", "gemma3_text",
        {"head_dim": 32, "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
         "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "num_hidden_layers": 7},
        tokenizer="sentencepiece", norms=_SANDWICH, qk_norm=32,
    ),
    "gemma3_f16": _case(
        "Gemma3ForCausalLM", "gemma3_text",
        {"head_dim": 32, "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
         "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "num_hidden_layers": 7},
        tokenizer="sentencepiece", norms=_SANDWICH, qk_norm=32, dtype="F16",
    ),
    "nomic_bert": {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "config": _NOMIC, "tokenizer": "wordpiece",
        "shapes": _nomic(), "pooling": "mean_tokens",
    },
    "nomic_bert_moe": {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "tokenizer": "xlm_roberta",
        "config": _NOMIC | {"n_positions": 2048, "vocab_size": 40, "activation_function": "gelu", "num_experts": 4,
                            "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "moe_top_k": 2,
                            "moe_every_n_layers": 2},
        "shapes": _nomic_experts(), "pooling": "mean_tokens", "differs": (r"\.context_length$",),
    },
    "pockettts": {
        "architectures": ["PocketTTSModel"], "model_type": "pockettts", "tokenizer": "pieces", "config": None,
        "shapes": _pocket(),
    },
    "jina_bert": {
        "architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "tokenizer": "wordpiece", "shapes": _jina(),
        "config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "vocab_size": 96, "type_vocab_size": 2},
        "pooling": "mean_tokens",
    },
    "neobert": {
        "architectures": ["NeoBERTLMHead"], "model_type": "neobert", "tokenizer": "wordpiece", "shapes": _neo(),
        "config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "max_length": 512, "norm_eps": 1e-5, "vocab_size": 96, "pad_token_id": 0},
    },
    **checkpoint_models.cases(),
}  # fmt: skip
"""Checkpoints by name."""

COMPARED = [name for name, case in CASES.items() if case.get("peer", True)]
"""Names of those that llama.cpp's converter reads."""

TRANSFORMERS = [
    *(name for name, case in checkpoint_models.MODELS.items() if case.get("transformers", True)),
    "llama", "llama3", "llama_biases", "llava", "mistral", "mixtral", "qwen2", "qwen2_yarn", "qwen2moe", "qwen3",
    "qwen3_tied", "granite", "granite_swa_moe", "hrm", "olmo2", "olmo3", "olmoe", "ernie", "cohere2", "cohere2moe",
    "seed_oss", "jais2", "arcee", "phi3", "phi4", "glm4", "glm4moe", "solar_open", "deepseek2", "deepseek3", "hy_v3",
    "smollm3", "gemma", "gemma2", "gemma3", "phi2", "qwen3moe", "dbrx", "mimo2",
    "minicpm3", "deepseek32", "glm_dsa", "bamba",
    "granite_swa", "smolvlm", "janus", "glm4v", "glm45v", "glm_ocr", "hunyuan_vl", "paddleocr",
    "gptoss",
]  # fmt: skip
"""Names of those whose logits are compared with transformers'."""

TOKENIZERS: dict[str, dict[str, Any]] = {
    "roberta": {"split": None, "bos": True},
    "qwen2": {"split": QWEN2_SPLIT},
    "llama3": {"split": LLAMA3_SPLIT, "ignore_merges": True, "bos": True},
    "llama3_merged": {"split": LLAMA3_SPLIT},
    "gpt2": {"split": None},
    "phi4": {"split": GPT4O_SPLIT, "kind": "GPT2Tokenizer"},
    "gpt4o": {"split": GPT4O_SPLIT},
    "deepseek": {"split": DEEPSEEK_SPLIT, "bos": True},
    "chatglm": {"split": LLAMA3_SPLIT, "more": ("[gMASK]", "<|user|>", "<|observation|>")},
    "laguna": {"split": (r"\n+|[^\n]+", QWEN2_SPLIT), "more": ("</assistant>",), "chat_template": INCLUDED},
    "dots3": {"split": QWEN2_SPLIT, "more": ("<|endofassistant|>",)},
    "solar": {"split": QWEN2_SPLIT, "more": ("<|startoftext|>", "<unk>")},
    "glm": {"split": LLAMA3_SPLIT, "ignore_merges": True, "more": ("[gMASK]", "<|user|>", "<|observation|>")},
}
"""Options of `write_bpe` by the kind of tokenizer."""

PRE = {
    "wordpiece": "bert-bge",
    "roberta": "gpt-2",
    "llama3": "llama-bpe",
    "llama3_merged": "dbrx",
    "gpt2": "gpt-2",
    "phi4": "gpt-4o",
    "gpt4o": "gpt-4o",
    "glm": "glm4",
    "deepseek": "deepseek-v3",
    "solar": "solar-open",
    "chatglm": "chatglm-bpe",
}
"""Value of `tokenizer.ggml.pre` where it is another than the tokenizer's name."""


def shapes_of(case: Mapping[str, Any]) -> Shapes:
    """Shapes of a case's tensors."""
    if "shapes" in case:
        return dict(case["shapes"])
    names = ("norms", "qk_norm", "biases", "experts", "shared", "fused", "gated")
    shapes = decoder_shapes(case["config"], **{name: case[name] for name in names if name in case})
    for old, new in case.get("renamed", ()):
        shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    if left_out := case.get("without"):
        shapes = {name: shape for name, shape in shapes.items() if not re.search(left_out, name)}
    return shapes | case.get("tensors", {})


def _float8(name: str, entry: tuple[str, tuple[int, ...], bytes]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Random float8 codes and block scales in place of a matrix."""
    if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
        return {name: entry}
    shape = entry[1]
    codes = np.random.RandomState(zlib.crc32(name.encode())).randint(0, 127, shape).astype(np.uint8)
    codes |= (codes & 1) << 7  # the code 127 and that with a sign are NaN
    scales = tuple(-(-n // 32) for n in shape)
    raw = encoded(np.abs(random_values(name, scales)) * np.float32(0.01), "F32")
    return {name: ("F8_E4M3", shape, codes.tobytes()), f"{name}_scale_inv": ("F32", scales, raw)}


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bytes]:
    """Random tensor; bytes for MXFP4 blocks and scales, rising integers for d2t."""
    if name == "d2t":
        return "I64", shape, (np.arange(shape[0], dtype=np.int64) // 3).tobytes()
    if dtype not in ("BF16", "F16", "F32"):
        numbers = np.random.RandomState(zlib.crc32(name.encode()))
        low, high, kind = {"I8": (0, 256, "u1"), "F8_E4M3": (0, 127, "u1"), "F8_E8M0": (112, 120, "u1"),
                           "I64": (0, 4, "<i8")}[dtype]  # fmt: skip
        return dtype, shape, numbers.randint(low, high, shape).astype(kind).tobytes()
    if not name.endswith(("_blocks", "_scales", ".weight_packed", ".weight_scale")):
        return dtype, shape, encoded(random_values(name, shape), dtype)
    low, high = (0, 256) if name.endswith(("_blocks", "_packed")) else (118, 126)
    return "U8", shape, np.random.RandomState(zlib.crc32(name.encode())).randint(low, high, shape, np.uint8).tobytes()


def write_checkpoint(folder: Path, name: str) -> Path:
    """Write the checkpoint of a case; return its folder.

    `folder` gets the checkpoint of its `base` too.
    """
    case, path = CASES[name], folder / name
    path.mkdir()
    if "base" in case:
        write_checkpoint(folder, case["base"])
    elif case["tokenizer"] == "none":
        pass
    elif case["tokenizer"] == "sentencepiece":
        write_sentencepiece(path, jinja=case.get("jinja", False), added=case.get("added"), more=case.get("more", ()))
    elif case["tokenizer"] == "wordpiece":
        write_word_piece(path)
    elif case["tokenizer"] == "pieces":
        write_unigram(path)
        (path / "spiece.model").rename(path / "tokenizer.model")
        (path / "tokenizer_config.json").unlink()
    elif case["tokenizer"] == "unigram":
        write_unigram(path)
    elif case["tokenizer"] == "tiktoken":
        write_tiktoken(path)
    elif case["tokenizer"] == "rwkv":
        write_rwkv(path)
    elif case["tokenizer"] == "scored":
        write_scored(path)
    elif case["tokenizer"].startswith("xlm_roberta"):
        write_xlm_roberta(path, json_only=case["tokenizer"] == "xlm_roberta")
    elif case["tokenizer"] == "ranked":
        write_ranked(path)
    else:
        write_bpe(path, **TOKENIZERS[case["tokenizer"]])
        if case.get("jinja"):
            (path / "chat_template.jinja").write_text(TEMPLATE)
    dtype = case.get("dtype", "BF16")
    if case["config"] is not None:
        config = {"architectures": case["architectures"], "model_type": case["model_type"], **case["config"],
                  "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]}  # fmt: skip
        (path / "config.json").write_text(json.dumps(config))
    if generation := case.get("generation"):
        (path / "generation_config.json").write_text(json.dumps(generation))
    if pooling := case.get("pooling"):
        modules = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    tensors = {}
    for tensor, shape in shapes_of(case).items():
        own = next((own for pattern, own in case.get("dtypes", {}).items() if re.search(pattern, tensor)), dtype)
        tensors[tensor] = entry_of(tensor, own, shape)
    for zeroed, first in case.get("zeroed", {}).items():
        dtype, shape, raw = tensors[zeroed]
        tensors[zeroed] = dtype, shape, raw[: len(raw) // shape[0] * first].ljust(len(raw), b"\0")
    if case.get("fp8"):
        tensors = {name: entry for tensor, old in tensors.items() for name, entry in _float8(tensor, old).items()}
    write_shards(path, tensors, case.get("shards", 1))
    return path


# --- results ---------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    """Short digest of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"embeddings": True},
    "llama_biases": {"prefix": "", "dtype": "BF16"},
    "qwen2": {"dtype": "F16", "rank": 2},
    "qwen3": {},
    "gemma2": {},
    "granite": {"lora_alpha": 7},
    "olmo2": {},
    "smollm3": {},
    "qwen3next": {},
    "qwen35": {},
    "qwen35moe": {},
    "gemma3n": {},
    "mixtral": {"experts": range(4)},
    "qwen3moe": {"experts": range(4)},
}
"""Options of `write_adapter` by the case of the base."""


def is_adapted(tensor: str, experts: Collection[int] = ()) -> bool:
    """True for tensors that the adapter of a case changes."""
    if match := re.search(r"\.experts\.(\d+)\.", tensor):
        return int(match[1]) in experts
    return tensor.endswith("_proj.weight") and not tensor.startswith("mtp.")


def write_adapter(
    folder: Path,
    name: str,
    *,
    embeddings: bool = False,
    experts: Collection[int] = (),
    prefix: str = "base_model.model.",
    dtype: str = "F32",
    rank: int = 4,
    **fields: Any,
) -> Path:
    """Write an adapter of a case's projections; return its folder.

    Those of multi-token prediction are left out, and of routed experts but `experts`. With `embeddings`, the table of
    embeddings is changed as well. `fields` are those of adapter_config.json.
    """
    path, tensors = folder / f"{name}-adapter", {}
    path.mkdir()
    for tensor, shape in shapes_of(CASES[name]).items():
        if is_adapted(tensor, experts):
            stem, parts = tensor.removesuffix(".weight"), {"lora_A.weight": (rank, shape[1])}
            parts["lora_B.weight"] = (shape[0], rank)
        elif embeddings and tensor.endswith("embed_tokens.weight"):
            stem, parts = tensor.removesuffix(".weight"), {"lora_embedding_A": (rank, shape[0])}
            parts["lora_embedding_B"] = (shape[1], rank)
        else:
            continue
        for part, size in parts.items():
            full = f"{prefix}{stem}.{part}"
            tensors[full] = (dtype, size, encoded(random_values(full, size), dtype))
    write_safetensors(path / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": str(folder / name)} | fields  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def summary(path: Path) -> dict[str, dict[str, str]]:
    """Digests of the keys and tensors of a GGUF file, with types."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {
        name: f"{'/'.join(kind.name for kind in field.types[:2])} {digest(repr(field.contents()).encode())}"
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: f"{tensor.tensor_type.name} {tensor.shape[::-1].tolist()} {digest(tensor.data.tobytes())}"
        for tensor in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}
