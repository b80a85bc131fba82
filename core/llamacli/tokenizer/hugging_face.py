"""Vocabularies of Hugging Face folders as tokenizer.ggml.* keys.

tokenizer.json and tokenizer.model are read; types, scores and special tokens are those that llama.cpp's converter
writes. `tokenizer.ggml.pre` is found by its effect: the name whose rules split a text like the file's own.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from llamacli.errors import ModelFormatError
from llamacli.gguf.tokens import TokenKind
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS, RAW_UTF8
from llamacli.tokenizer.sentencepiece import read_sentencepiece, read_spec
from llamacli.util.files import read_json

Keys = dict[str, Any]
"""Values of metadata keys: int for uint32, float for float32, lists of one type for arrays."""

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_IDS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id",
    "pad": "padding_token_id", "mask": "mask_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
}  # fmt: skip
_ADDED = ("bos", "eos", "sep")
"""Special tokens with a key add_..._token."""

_FAIRSEQ = "sentencepiece.bpe.model"
_PREFIXED = "XLMRobertaTokenizer", "XLMRobertaTokenizerFast", "CamembertTokenizer", "CamembertTokenizerFast"
"""Classes of tokenizers that put a space before texts."""

_UNUSED_SCORE, _ADDED_SCORE = -10000.0, -1000.0

SAMPLE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \nHello WORLD, camelCase e\u0301te\u0301 nai\u0308ve "
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f 3 33 333 3333 33333 333333 3333333 3.3 3..3 3...3 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f ?\u6211\u60f3\u5728apple\u5de5\u4f5c"
    "1314151\u5929\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440 "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not, 'D you? We'Ve a'lL "
    "x=1;\n\n\ty(/path/to\r\n$5.00 \u0928\u092e\u0938\u094d\u0924\u0947 \u30ab\u30bf \uac00\ub098 end  "
)
"""Text that pre-tokenizers split differently."""


def vocabulary_keys(
    folder: Path, config: Mapping[str, Any], kinds: Sequence[str], pre: Sequence[str]
) -> tuple[str, Keys]:
    """Kind of a folder's vocabulary, the first of `kinds`, and its keys.

    Kinds: "sentencepiece" (tokenizer.model), "prefixed" (it, with its space before texts), "byte_fallback" (BPE of
    tokenizer.json with bytes), "ranked" (its merges kept, as Gemma 4's files have them), "bpe" (byte-level),
    "wordpiece", "unigram" (spiece.model), "fairseq" (sentencepiece.bpe.model, or Unigram of tokenizer.json), "numbered"
    (Unigram of tokenizer.json), "scored" (tokenizer.jsonl, PLaMo's tokens with scores), "own" (special tokens, to which
    the layout's `tokenizer` adds what it reads) and "none" (a model without texts).
    `pre` are names that `tokenizer.ggml.pre` has rather than others of the same effect. Raises ModelFormatError.
    """
    found = [kind for kind in kinds if (_KINDS[kind][0])(folder)]
    if not found:
        raise ModelFormatError(f"{folder}: {_without(folder, kinds)}")
    try:
        return found[0], _KINDS[found[0]][1](folder, config, pre)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, ModelFormatError):
            raise
        raise ModelFormatError(
            f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {error}; is tokenizer.json or "
            "tokenizer_config.json of another version?"
        ) from error


def _without(folder: Path, kinds: Sequence[str]) -> str:
    path = folder / "tokenizer.json"
    if not path.is_file():
        own = ": its own code (auto_map) is not run" if "auto_map" in _tokenizer_config(folder) else ""
        return (
            f"no tokenizer{own}: there is neither tokenizer.json nor tokenizer.model: copy those of the base model here"
        )
    model = read_json(path).get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return (
        f"tokenizer.json: a tokenizer of the kind {kind!r} (model.type), of which {', '.join(kinds)} cannot be made; "
        "take a GGUF file of the model"
    )


def _model(folder: Path) -> dict[str, Any]:
    model = read_json(folder / "tokenizer.json").get("model")
    return model if isinstance(model, dict) else {}


def _is_sentencepiece(folder: Path) -> bool:
    return (folder / "tokenizer.model").is_file()


def _is_byte_fallback(folder: Path) -> bool:
    model = _model(folder)
    return model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def _is_bpe(folder: Path) -> bool:
    return _model(folder).get("type") == "BPE"


def _is_wordpiece(folder: Path) -> bool:
    return _model(folder).get("type") == "WordPiece"


def _unigram_path(folder: Path) -> Path | None:
    paths = (folder / name for name in ("tokenizer.model", "spiece.model"))
    path = next((path for path in paths if path.is_file()), None)
    return path if path and read_spec(path, 2).get(3, 1) == 1 else None


def _is_scored(folder: Path) -> bool:
    return (folder / "tokenizer.jsonl").is_file()


def _is_unigram(folder: Path) -> bool:
    return _unigram_path(folder) is not None


def _is_numbered(folder: Path) -> bool:
    return _model(folder).get("type") == "Unigram"


def _is_fairseq(folder: Path) -> bool:
    return (folder / _FAIRSEQ).is_file() or _is_numbered(folder)


# --- vocabularies ----------------------------------------------------------------------------------------------------


def _unigram(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    path = _unigram_path(folder) or folder / "spiece.model"
    pieces, normalizer = read_sentencepiece(path), read_spec(path, 3)
    size = config.get("vocab_size") or len(pieces)
    tokens: list[str | bytes] = [f"[PAD{i}]" for i in range(size)]
    scores, types = [_UNUSED_SCORE] * size, [int(TokenKind.UNUSED)] * size
    for i, piece in enumerate(pieces):
        tokens[i], scores[i] = piece.text, piece.score
        types[i] = int(TokenKind.NORMAL) if piece.type == TokenKind.USER_DEFINED else piece.type
    for text, i in read_json(folder / "added_tokens.json").items():
        if i < size:
            tokens[i], scores[i], types[i] = text, _ADDED_SCORE, int(TokenKind.USER_DEFINED)
    keys: Keys = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(4, 1)),
    }  # fmt: skip
    if isinstance(charsmap := normalizer.get(2), bytes) and charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = bytearray(charsmap)
    return keys | special_keys(folder, n_vocab=size, merges=False)


def _fairseq(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    """Unigram with the first ids of fairseq: <s>, <pad>, </s> and <unk>."""
    if not (path := folder / _FAIRSEQ).is_file():
        return _numbered(folder, config, pre)
    pieces, spec = _realigned(path), read_spec(path, 3)
    size = max(config.get("vocab_size") or 0, len(pieces) - 1)
    pieces = (pieces + [_padding(i) for i in range(len(pieces) - 1, size - 1)])[:size]
    return _of_pieces(folder, config, pieces, bool(spec.get(3, 1)), bool(spec.get(4, 1)), spec.get(2))


def _numbered(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    """Unigram of tokenizer.json, with ids of its own."""
    content, settings = read_json(folder / "tokenizer.json"), _tokenizer_config(folder)
    pieces = _unigram_pieces(folder, content)
    size = max(config.get("vocab_size") or 0, len(pieces))
    pieces += [_padding(i) for i in range(len(pieces), size)]
    normalizer = content.get("normalizer") or {}
    parts = [part.get("precompiled_charsmap") for part in (normalizer, *normalizer.get("normalizers", ()))]
    charsmap = b64decode(next((part for part in parts if part), ""))
    prefix = bool(settings.get("add_prefix_space", settings.get("tokenizer_class") in _PREFIXED))
    return _of_pieces(
        folder, config, pieces, prefix, bool(settings.get("clean_up_tokenization_spaces", False)), charsmap
    )


def _of_pieces(
    folder: Path,
    config: Mapping[str, Any],
    pieces: Sequence[tuple[str | bytes, float, int]],
    prefix: bool,
    spaces: bool,
    charsmap: object,
) -> Keys:
    """Keys of a Unigram's pieces and its normalizer."""
    texts, scores, types = (list(column) for column in zip(*pieces, strict=True))
    keys: Keys = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": prefix, "tokenizer.ggml.remove_extra_whitespaces": spaces,
        "tokenizer.ggml.token_type_count": int(config.get("type_vocab_size", 1)),
    }  # fmt: skip
    if isinstance(charsmap, bytes) and charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = bytearray(charsmap)
    return keys | special_keys(folder, n_vocab=len(pieces), merges=False)


def _padding(i: int) -> tuple[str | bytes, float, int]:
    return f"[PAD{i}]", _UNUSED_SCORE, int(TokenKind.UNUSED)


def _realigned(path: Path) -> list[tuple[str | bytes, float, int]]:
    """Tokens of a sentencepiece.bpe.model, whose first three become four."""
    first = [(text, 0.0, int(TokenKind.CONTROL)) for text in ("<s>", "<pad>", "</s>")]
    others = [
        (piece.text, piece.score, int(TokenKind.NORMAL) if piece.type == TokenKind.USER_DEFINED else piece.type)
        for piece in read_sentencepiece(path)[3:]
    ]
    return [*first, ("<unk>", 0.0, int(TokenKind.UNKNOWN)), *others]


def _unigram_pieces(folder: Path, content: Mapping[str, Any]) -> list[tuple[str | bytes, float, int]]:
    """Tokens of tokenizer.json's Unigram."""
    special, added = _named_special(folder), {i for i, _, _ in _added_tokens(folder, content)}
    unknown = content["model"].get("unk_id", 3)
    return [
        (
            text,
            float(score),
            int(
                TokenKind.UNKNOWN
                if i == unknown
                else TokenKind.CONTROL
                if text in special
                else TokenKind.USER_DEFINED
                if i in added
                else TokenKind.NORMAL
            ),
        )
        for i, (text, score) in enumerate(content["model"]["vocab"])
    ]


def _sentencepiece(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    pieces = read_sentencepiece(folder / "tokenizer.model")
    size = config.get("vocab_size") or len(pieces)
    tokens: list[str | bytes] = [f"[PAD{i}]" for i in range(size)]
    scores, types = [_UNUSED_SCORE] * size, [int(TokenKind.UNUSED)] * size
    for i, piece in enumerate(pieces[:size]):
        tokens[i], scores[i] = piece.text, piece.score
        types[i] = int(TokenKind.NORMAL) if piece.type == TokenKind.USER_DEFINED else piece.type
    for text, i in read_json(folder / "added_tokens.json").items():
        if i < size:
            tokens[i], scores[i], types[i] = text, _ADDED_SCORE, int(TokenKind.USER_DEFINED)
    for number, added in _tokenizer_config(folder).get("added_tokens_decoder", {}).items():
        if (i := int(number)) < size:
            tokens[i], types[i] = _added(added["content"], bool(added.get("special")))
            scores[i] = _ADDED_SCORE
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types,
    } | special_keys(folder, n_vocab=len(tokens), merges=False)  # fmt: skip


def _prefixed(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    prefix = bool(read_spec(folder / "tokenizer.model", 3).get(3, 1))
    return _sentencepiece(folder, config, pre) | {"tokenizer.ggml.add_space_prefix": prefix}


def _byte_fallback(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    content = read_json(folder / "tokenizer.json")
    vocab: dict[str, int] = content["model"]["vocab"]
    added = {i: text for i, text, _ in _added_tokens(folder, content)}
    special = _special_ids(folder, content)
    texts = {i: text for text, i in vocab.items()} | {i: text for i, text in added.items() if i >= len(vocab)}
    types = [
        int(
            TokenKind.BYTE
            if i < len(vocab) and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", texts[i])
            else TokenKind.CONTROL
            if i in special
            else TokenKind.NORMAL
            if i < len(vocab)
            else TokenKind.USER_DEFINED
        )
        for i in sorted(texts)
    ]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [texts[i] for i in sorted(texts)],
        "tokenizer.ggml.scores": [_ADDED_SCORE] * len(texts), "tokenizer.ggml.token_type": types,
    } | special_keys(folder, n_vocab=len(texts), merges=False)  # fmt: skip


def _scored(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    lines = (folder / "tokenizer.jsonl").read_text("utf-8").split("\n")
    entries = [json.loads(line) for line in lines if line.strip()]
    tokens, scores = [text for text, *_ in entries], [float(score) for _, score, *_ in entries]
    types = []
    for text, _, kind, *_ in entries:
        looks_special = text.startswith("<|plamo:") and text.endswith("|>") and kind == "NORMAL"
        types.append(int(TokenKind.CONTROL if looks_special else TokenKind[kind]))
    n_more = max(config["vocab_size"] - len(entries), 0)
    keys: Keys = {
        "tokenizer.ggml.model": "plamo2", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(1, n_more + 1)],
        "tokenizer.ggml.scores": scores + [_ADDED_SCORE] * n_more,
        "tokenizer.ggml.token_type": types + [int(TokenKind.UNUSED)] * n_more,
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    settings = _tokenizer_config(folder)
    texts = {kind: _content(settings.get(f"{kind}_token")) for kind in ("bos", "eos", "pad", "sep", "unk")}
    keys |= {f"tokenizer.ggml.{_IDS[kind]}": tokens.index(text) for kind, text in texts.items() if text is not None}
    return keys | _chat_templates(folder, settings)


def _ranked(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    keys = _byte_fallback(folder, config, pre)
    del keys["tokenizer.ggml.pre"]
    merges = _merges(folder, read_json(folder / "tokenizer.json"))
    return keys | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}


def _tokens(folder: Path, config: Mapping[str, Any], content: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens of tokenizer.json, by their ids."""
    vocab: dict[str, int] = content["model"]["vocab"]
    added = {i: (text, special) for i, text, special in _added_tokens(folder, content)}
    texts = {i: text for text, i in vocab.items()} | {i: text for i, (text, _) in added.items()}
    size = config.get("vocab_size", len(texts))
    if (largest := max(texts)) >= size:
        raise ModelFormatError(
            f"{folder}/tokenizer.json: token {largest} ({texts[largest]!r}) is beyond vocab_size = {size} "
            "of config.json"
        )
    tokens, types = [], []
    for i in range(size):
        if i not in texts:
            token, kind = f"[PAD{i}]", int(TokenKind.UNUSED)
        elif i in added:
            token, kind = _added(*added[i])
        else:
            token, kind = texts[i], int(TokenKind.NORMAL)
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _bpe(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    content = read_json(folder / "tokenizer.json")
    tokens, types = _tokens(folder, config, content)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_tokenizer(folder, content, pre),
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
    } | special_keys(folder, merges=True)  # fmt: skip


def _wordpiece(folder: Path, config: Mapping[str, Any], pre: Sequence[str]) -> Keys:
    """WordPiece with `\u2581` before words instead of `##` before their other parts."""
    tokens, types = _tokens(folder, config, read_json(folder / "tokenizer.json"))
    texts = [
        text if kind == TokenKind.CONTROL else text[2:] if text.startswith("##") else f"\u2581{text}"
        for text, kind in zip(tokens, types, strict=True)
    ]
    return {
        "tokenizer.ggml.token_type_count": int(config.get("type_vocab_size", 1)), "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": pre[0], "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types,
    } | special_keys(folder, merges=False, n_vocab=len(tokens))  # fmt: skip


_KINDS: Mapping[str, tuple[Callable[[Path], bool], Callable[[Path, Mapping[str, Any], Sequence[str]], Keys]]] = {
    "sentencepiece": (_is_sentencepiece, _sentencepiece),
    "prefixed": (_is_sentencepiece, _prefixed),
    "byte_fallback": (_is_byte_fallback, _byte_fallback),
    "ranked": (_is_byte_fallback, _ranked),
    "bpe": (_is_bpe, _bpe),
    "unigram": (_is_unigram, _unigram),
    "wordpiece": (_is_wordpiece, _wordpiece),
    "none": (lambda folder: True, lambda folder, config, pre: {"tokenizer.ggml.model": "none"}),
    "own": (lambda folder: True, lambda folder, config, pre: special_keys(folder, merges=False)),
    "scored": (_is_scored, _scored),
    "fairseq": (_is_fairseq, _fairseq),
    "numbered": (_is_numbered, _numbered),
}


def _added(text: str, special: bool) -> tuple[str, int]:
    looks_special = (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
    if special or looks_special:
        return text, int(TokenKind.CONTROL)
    return text.replace("\u2581", " "), int(TokenKind.USER_DEFINED)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "tokenizer_config.json")


def _added_tokens(folder: Path, content: Mapping[str, Any]) -> list[tuple[int, str, bool]]:
    """Added tokens: id, text, is special; the later of an id counts."""
    found = [(token["id"], token["content"], bool(token.get("special"))) for token in content.get("added_tokens", ())]
    decoder = _tokenizer_config(folder).get("added_tokens_decoder", {})
    found += [(int(i), token["content"], bool(token.get("special"))) for i, token in decoder.items()]
    named = _named_special(folder)
    return [(i, text, special or text in named) for i, text, special in found]


def _named_special(folder: Path) -> set[str]:
    config = _tokenizer_config(folder)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    entries = [config.get(f"{kind}_token") for kind in _SPECIAL]
    entries += list(extra.values() if isinstance(extra, dict) else extra)
    return {text for entry in entries if (text := _content(entry)) is not None}


def _special_ids(folder: Path, content: Mapping[str, Any]) -> set[int]:
    named = _named_special(folder)
    return {i for i, text, _ in _added_tokens(folder, content) if text in named} | {
        i for text, i in content["model"]["vocab"].items() if text in named
    }


def _content(entry: object) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


# --- special tokens --------------------------------------------------------------------------------------------------


def special_keys(folder: Path, *, merges: bool, n_vocab: int | None = None) -> Keys:
    """Keys of merges, special tokens, their insertion, normaliser and chat template."""
    content, settings = read_json(folder / "tokenizer.json"), _tokenizer_config(folder)
    config = read_json(folder / "config.json")
    has_settings = (folder / "tokenizer_config.json").is_file()
    kinds = list(_SPECIAL)
    inserted: dict[str, bool] = {}
    if content:
        settings["bos_token"] = settings.get("bos_token") or settings.get("cls_token")
        settings["eos_token"] = settings.get("eos_token") or settings.get("sep_token")
        inserted = _inserted(content, settings, kinds)
    keys: Keys = {}
    if merges and (pairs := _merges(folder, content)):
        keys["tokenizer.ggml.merges"] = pairs
    ids: dict[str, int] = {}
    added = {token["content"]: token["id"] for token in reversed(content.get("added_tokens", ()))}
    for kind in kinds if has_settings else ():
        if isinstance(add := settings.get(f"add_{kind}_token"), bool):
            inserted.setdefault(kind, add)
        if (text := _content(settings.get(f"{kind}_token"))) is not None and text in added:
            _set_id(ids, kind, added[text], n_vocab)
    for kind in kinds:
        number = config.get(f"{kind}_token_id")
        if number is None and isinstance(config.get("text_config"), dict):
            number = config["text_config"].get(f"{kind}_token_id")
        _set_id(ids, kind, number, n_vocab)
    keys |= {f"tokenizer.ggml.{_IDS[kind]}": number for kind, number in ids.items() if kind in _IDS}
    keys |= {f"tokenizer.ggml.add_{kind}_token": value for kind, value in inserted.items() if kind in _ADDED}
    if has_settings:
        keys |= _chat_templates(folder, settings)
    return keys | _normalizer(content.get("normalizer"))


def _set_id(ids: dict[str, int], kind: str, number: object, n_vocab: int | None) -> None:
    if type(number) is int and number >= 0 and (n_vocab is None or number < n_vocab):
        ids.setdefault(kind, number)


def _merges(folder: Path, content: Mapping[str, Any]) -> list[str]:
    merges = (content.get("model") or {}).get("merges") or []
    if merges and isinstance(merges[0], str):
        return list(merges)
    if merges:  # pairs, with the spaces of tokens as in byte-level texts
        return [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
    path = folder / "merges.txt"
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").splitlines()
    return [" ".join(line.split()) for i, line in enumerate(lines) if len(line.split()) == 2 and (i or line[0] != "#")]


def _inserted(content: Mapping[str, Any], settings: dict[str, Any], kinds: list[str]) -> dict[str, bool]:
    """Special tokens that the post-processor adds; updates texts of `settings`."""
    found: dict[str, bool] = {}
    post = content.get("post_processor") or {}
    for processor in post.get("processors", [post]):
        match processor.get("type"):
            case "ByteLevel":
                found.setdefault("bos", False)
                found.setdefault("eos", False)
            case "RobertaProcessing":
                found |= {"bos": True, "eos": True, "sep": True}
                for name, other in (("cls", "bos"), ("sep", "eos")):
                    if not settings.get(f"{name}_token"):
                        settings[f"{name}_token"] = processor.get(name, [settings.get(f"{other}_token")])[0]
            case "TemplateProcessing":
                found |= _templated(processor, settings, kinds)
    return found


def _templated(processor: Mapping[str, Any], settings: dict[str, Any], kinds: list[str]) -> dict[str, bool]:
    def special(entry: Mapping[str, Any]) -> str | None:
        text = (entry.get("SpecialToken") or {}).get("id")
        return text if isinstance(text, str) else None

    found: dict[str, bool] = {}
    single, pair = processor.get("single", []), processor.get("pair", [])
    text = {kind: _content(settings.get(f"{kind}_token")) for kind in ("bos", "eos", "cls", "sep")}
    first = special(single[0]) if len(single) > 1 else None
    last = special(single[-1]) if len(single) > 1 else None
    if first:
        if first not in (text["bos"], text["cls"]):
            for kind in ("bos", "cls"):
                if not text[kind]:
                    settings[f"{kind}_token"] = text[kind] = first
        found["bos"] = first in (text["bos"], text["cls"])
    if last:
        if last != text["eos"]:
            if (spare := next((kind for kind in ("eot", "eom") if kind not in kinds), None)) is not None:
                kinds.append(spare)
                settings[f"{spare}_token"] = text["eos"]
            settings["eos_token"] = text["eos"] = last
        found["eos"] = True
    start = 1 if first and pair and special(pair[0]) == first else 0
    stop = -1 if last and pair and special(pair[-1]) == last else None
    match pair[start:stop]:  # A, separators, B
        case [{"Sequence": {"id": "A"}}, *separators, {"Sequence": {"id": "B"}}] if separators:
            ends = (text["sep"], text["eos"])
            found["sep"] = (special(separators[0]) in ends and not last) or (
                len(separators) == 2 and special(separators[1]) in ends
            )
            if found["sep"] and not text["sep"]:
                settings["sep_token"] = text["eos"]
    return found


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> Keys:
    template = settings.get("chat_template")
    if "chat_template" not in settings:
        if (path := folder / "chat_template.jinja").is_file():
            template = path.read_text("utf-8")
            if others := sorted((folder / "additional_chat_templates").glob("*.jinja")):
                template = [{"name": "default", "template": template}]
                template += [{"name": other.stem, "template": other.read_text("utf-8")} for other in others]
        else:
            template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    keys: Keys = {}
    names = []
    for entry in template or ():
        name = re.sub(r"[^a-zA-Z0-9]", "_", entry["name"])
        if name == "default":
            keys["tokenizer.chat_template"] = entry["template"]
        else:
            names.append(name)
            keys[f"tokenizer.chat_template.{name}"] = entry["template"]
    return keys | ({"tokenizer.chat_templates": names} if names else {})


def _normalizer(normalizer: Mapping[str, Any] | None) -> Keys:
    if not normalizer:
        return {}
    prefix = "tokenizer.ggml.normalizer"
    match normalizer.get("type"):
        case "Lowercase":
            return {f"{prefix}.lowercase": True}
        case "StripAccents":
            return {f"{prefix}.strip_accents": True}
        case "BertNormalizer":
            named = {name: normalizer.get(name) for name in ("lowercase", "strip_accents")}
            return {f"{prefix}.{name}": value for name, value in named.items() if value is not None}
        case "Sequence":
            keys: Keys = {}
            for part in normalizer.get("normalizers", ()):
                keys |= _normalizer(part)
            return keys
    return {}


# --- pre-tokenizers --------------------------------------------------------------------------------------------------

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


_WITHOUT_MARKS = dict.fromkeys(("gpt-4o", "llama4", "talkie"), "granite-embed-multi-97m")
"""Names of rules that are, but for combining marks, those of others: files of these models have the former."""


def pre_tokenizer(folder: Path, content: Mapping[str, Any], preferred: Sequence[str] = ()) -> str:
    """Name for `tokenizer.ggml.pre` of the rules that split as a tokenizer.json.

    Of several, one of the `preferred`, else the first. Merges of raw UTF-8, which have tokens for bytes, are not split
    by rules: one of the `preferred` for them. ModelFormatError where none does.
    """
    path = folder / "tokenizer.json"
    if content["model"].get("byte_fallback") and (raw := [name for name in preferred if name in RAW_UTF8]):
        return raw[0]
    try:
        pieces = _split([SAMPLE], content.get("pre_tokenizer"))
    except (regex.error, KeyError) as error:
        raise ModelFormatError(f"{path}: pre_tokenizer: {error}") from error
    lengths = [len(piece) for piece in pieces]
    whole = bool(content["model"].get("ignore_merges", False))
    same = [name for name, scheme in PRE_TOKENIZERS.items() if scheme.lengths(SAMPLE).tolist() == lengths]
    exact = [name for name in same if PRE_TOKENIZERS[name].ignore_merges == whole] or same
    exact += [name for name, twin in _WITHOUT_MARKS.items() if twin in same]
    if not exact:
        raise ModelFormatError(
            f"{path}: no known value of tokenizer.ggml.pre splits text as its pre_tokenizer does; a plugin can add one "
            "by register_pre_tokenizers, see docs/hooks/pre_tokenizer.md"
        )
    return next((name for name in preferred if name in exact), exact[0])


def _split(pieces: list[str], rule: Mapping[str, Any] | None) -> list[str]:
    match (rule or {}).get("type"):
        case None:
            return pieces
        case "Sequence":
            for part in (rule or {})["pretokenizers"]:
                pieces = _split(pieces, part)
            return pieces
        case "ByteLevel":
            return _isolated(pieces, _BYTE_LEVEL) if (rule or {}).get("use_regex", True) else pieces
        case "Digits":
            return _isolated(pieces, r"\p{N}" if (rule or {}).get("individual_digits") else r"\p{N}+")
        case "Punctuation":
            return _isolated(
                pieces, r"[\p{P}$+<=>^`|~]" + ("+" if (rule or {}).get("behavior") == "Contiguous" else "")
            )
        case "Split":
            pattern = (rule or {})["pattern"]
            text = pattern["Regex"] if "Regex" in pattern else regex.escape(pattern["String"])
            return _isolated(pieces, text)
        case kind:
            raise KeyError(f"the kind {kind!r} is not known")


def _isolated(pieces: list[str], pattern: str) -> list[str]:
    compiled = regex.compile(pattern, regex.VERSION0)
    found = []
    for piece in pieces:
        start = 0
        for match in compiled.finditer(piece):
            found += [piece[start : match.start()], match[0]]
            start = match.end()
        found.append(piece[start:])
    return [piece for piece in found if piece]
