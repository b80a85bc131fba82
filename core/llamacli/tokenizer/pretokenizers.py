"""Pre-tokenizers by tokenizer.ggml.pre: regexes that split text before BPE.

The patterns match the same text as llama.cpp's (llama-vocab.cpp, unicode.cpp), and are written for linear time in a
backtracking regex engine: runs are possessive (`*+`) wherever giving a character back cannot help.
"""

from functools import cache
from itertools import pairwise

import attrs
import numpy as np
import numpy.typing as npt
import regex


@cache
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.VERSION1)


def _lengths(words: list[str]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, words), np.int64, len(words))


@attrs.frozen
class DigitGroups:
    """Split of runs of digits into groups of three.

    They are counted from the end of a run. `runs`: regex of a run. Text is cut after each group, so that what precedes
    a run stays with its first group; or, with `only_starts`, before each group of three.
    """

    runs: str
    only_starts: bool = False

    def split(self, text: str) -> list[str]:
        """Return the groups and the text between them."""
        cuts = [0]
        for run in _compiled(self.runs).finditer(text):
            start, stop = run.span()
            first = start + (stop - start) % 3
            if self.only_starts:
                cuts += range(first, stop, 3)
            else:
                cuts += range(first if first > start else start + 3, stop + 1, 3)
        return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


_CONTRACTION = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
# Upper-case then lower-case letters, or upper-case ones only; letters beyond ASCII count as both.
_CASED_WORD = r"[^\r\n\p{L}\p{N}]?(?:[\p{L}&&[^a-z]]*+[a-z][\p{L}&&[^A-Z]]*+|(?:[A-Z]*+[\p{L}&&[^A-Za-z]]++)++|[A-Z]++)"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
# White space up to its last line break; else all but the last character before a word; else all of it.
_SPACES = r"(?:[^\S\r\n]*+[\r\n]++)+|\s+(?!\S)|\s+"

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
_QWEN35 = rf"{_CONTRACTION}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UFAKZEKA = rf"{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_CASED_WORD}|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED_WORD}(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
_NUMBERS = DigitGroups(r"\p{N}++")

# Cased letters and marks, the latter by Unicode's categories; llama.cpp takes every letter for both cases here.
_LETTERED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]++"
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_YOUTU = rf"{_LETTERED_WORD}(?:{_CONTRACTION})?|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
_TINY_AYA = rf"{_LETTERED_WORD}(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
# As _CASED_WORD, with marks.
_MARKED_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?(?:[\p{L}\p{M}&&[^a-z]]*+[a-z][\p{L}\p{M}&&[^A-Z]]*+"
    r"|(?:[A-Z]*+[\p{L}\p{M}&&[^A-Za-z]]++)++|[A-Z]++)"
)
_GRANITE = rf"{_MARKED_CASED_WORD}(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*+(?: \p{{L}}\p{{M}}*+)*+)++|\p{{N}}"
    rf"|{_SYMBOLS}[\r\n/]?|{_SPACES}"
)
_SPACE_POWERS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
_JAIS2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|(?:[^\S\r\n]*+[\r\n]++)+|{_SPACE_POWERS}"
_HAN = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\U00020000-\U0002A6DF\U0002A700-\U0002EBEF\uF900-\uFAFF"
    r"\U0002F800-\U0002FA1F]"
)
_KIMI_K2 = (
    rf"{_HAN}++|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}--{_HAN}]++(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
)
_CHAMELEON = (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2)
_UNPUNCTUATED = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Unicode's cased letters at the time of this pattern, without some blocks.
_DEEPSEEK_LETTERS = (
    r"\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7\u10CD\u10D0-\u10FF\u1C80-\u1C8A\u2D00-\u2D2D"
    r"\uA790-\uA7FA\uAB30-\uAB68\U00010570-\U000105BC\U00010D50-\U00010D85\U00016E40-\U00016E7F\U0001D400-\U0001D7CB"
    r"\U0001DF00-\U0001DF2A]"
)
_CJK = r"[一-龥ࠀ-一가-\uD7FF&&[^\s]]+"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"(?<!\s)\s++\Z", _CJK, r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_SPARK = (
    *_DEEPSEEK_V3[:2],
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_AFMOE = (
    _NUMBERS,
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    _DEEPSEEK_V3[2],
)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")


@attrs.frozen
class PreTokenizer:
    """Rules that split text into words before merging.

    `splits`: regexes applied in order, each to the pieces of the one before; matches and the text between them become
    pieces. `ignore_merges`: a word that is a token is not merged. `add_bos`: the default if the metadata has no value.
    """

    splits: tuple[str | DigitGroups, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def lengths(self, text: str) -> npt.NDArray[np.int64]:
        """Return the lengths of the words that make up the text, int64."""
        if len(self.splits) == 1 and isinstance(self.splits[0], str):
            lengths = _lengths(_compiled(self.splits[0]).findall(text))  # faster than split
            if lengths.sum() == len(text):
                return lengths
        words = [text]
        for rule in self.splits:
            split = rule.split if isinstance(rule, DigitGroups) else _compiled(f"({rule})").split
            words = [part for word in words for part in split(word) if part]
        return _lengths(words)


_TABLE = (
    (PreTokenizer(_DEFAULT), "default"),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais exaone4 trillion granite-docling jina-es jina-de jina-v1-en"
        " jina-v2-es jina-v2-de jina-v2-code roberta-bpe modern-bert",
    ),
    (PreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((r"\p{N}{1,3}", _LLAMA3), ignore_merges=True), "minicpm5"),
    (
        PreTokenizer((_QWEN2,)),
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe"
        " f2llmv2",
    ),
    (PreTokenizer((r"\n+|[^\n]+", _QWEN2)), "laguna"),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (PreTokenizer((_SEED_CODER,)), "seed-coder"),
    (PreTokenizer((_UFAKZEKA,)), "ufakzeka"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer(_DEEPSEEK_LLM), "deepseek-llm"),
    (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (PreTokenizer(_FALCON), "falcon"),
    (PreTokenizer(_CHAMELEON, add_bos=True), "chameleon"),
    (PreTokenizer((_JAIS2,)), "jais-2"),
    (PreTokenizer((_KIMI_K2,)), "kimi-k2"),
    (PreTokenizer((_EXAONE_MOE,)), "exaone-moe"),
    (PreTokenizer((_NUMBERS, _TINY_AYA)), "tiny_aya cohere2moe"),
    (PreTokenizer((r"\p{N}+", DigitGroups("[0-9]++", only_starts=True))), "superbpe"),
    (PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True), "youtu"),
    (PreTokenizer((_GRANITE,), ignore_merges=True), "granite-embed-multi-97m"),
    (PreTokenizer(_SPARK), "spark2_5"),
    (PreTokenizer(_AFMOE), "afmoe"),
    (PreTokenizer((_UNPUNCTUATED,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_UNPUNCTUATED, r"\p{N}")), "viking"),
)
PRE_TOKENIZERS = {name: scheme for scheme, names in _TABLE for name in names.split()}
RAW_UTF8 = {"gemma4": (True, True), "granite-embed-multi-311m": (True, True), "sarvam-moe": (False, False)}
"""Values of tokenizer.ggml.pre for merges of raw UTF-8: whole runs of newlines are tokens, BOS is always added."""
