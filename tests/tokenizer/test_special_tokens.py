import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import ModelFormatError
from llamacli.errors import TokenizerError
from llamacli.testing.vocabularies import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    english_scores,
    ranked,
    scored,
)
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata


def chat(kinds: dict[str, int], **keys: object) -> Tokenizer:
    """Byte-level tokenizer with tokens of the given kinds."""
    return tokenizer_from_metadata(byte_level([], kinds, **keys))


def test_control_tokens_stay_text_by_default() -> None:
    tokenizer = chat({"<|im_start|>": CONTROL, "<unk>": UNKNOWN})
    text = "a<|im_start|><unk>b"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.encode(text, parse_special=True) == [ord("a"), 256, 257, ord("b")]


def test_user_defined_tokens_are_always_found() -> None:
    tokenizer = chat({"<tool>": USER_DEFINED})
    for parse_special in (False, True):
        assert tokenizer.encode("a<tool>", parse_special=parse_special) == [ord("a"), 256]
    assert tokenizer.decode([256]) == "<tool>"


FIM = {"<fim_prefix>": CONTROL, "<fim_suffix>": CONTROL, "<fim_middle>": CONTROL}


def test_infilling() -> None:
    tokenizer = chat({**FIM, "<s>": CONTROL, "<x>": USER_DEFINED}, bos_token_id=259, add_bos_token=True)
    assert tokenizer.infill_ids == (256, 257, 258)
    assert tokenizer.encode_infill("a<x>", "<fim_middle>") == [259, 256, ord("a"), 260, 257, *b"<fim_middle>", 258]
    assert tokenizer.encode_infill([1, 2], "") == [259, 256, 1, 2, 257, 258]
    named = chat({**FIM, "</pre>": USER_DEFINED}, prefix_token_id=259)
    assert named.encode_infill("</pre>", "b") == [259, *b"</pre>", 257, ord("b"), 258]


def test_infilling_beside_other_files() -> None:
    other = [("a.py", "x"), ("b", "")]
    bare = chat(FIM)
    files = b"\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\n"
    assert bare.encode_infill("p", "s", other) == [*files, *bare.encode_infill("p", "s")]
    named = chat({**FIM, "<|repo_name|>": CONTROL, "<|file_sep|>": CONTROL})
    ids = named.encode_infill("p", "s", other)
    files = [259, *b"myproject\n", 260, *b"a.py\nx", 260, *b"b\n", 260, *b"filename\n"]
    assert ids == [*files, *named.encode_infill("p", "s")]
    for room in (0, 5, 6, 9, len(ids) - 1, len(ids), len(ids) + 1):
        assert named.encode_infill("p", "s", other, room) == ids[-max(5, min(room, len(ids))) :]


def test_infilling_needs_its_tokens() -> None:
    for name in FIM:
        tokenizer = chat({text: kind for text, kind in FIM.items() if text != name})
        assert tokenizer.infill_ids is None
        with pytest.raises(TokenizerError, match="no tokens for fill-in-the-middle"):
            tokenizer.encode_infill("a", "b")


def test_longer_special_tokens_are_found_first() -> None:
    tokenizer = chat({"abc": USER_DEFINED, "bcde": USER_DEFINED, "ab": USER_DEFINED, "東東": USER_DEFINED})
    assert tokenizer.encode("abcde") == [ord("a"), 257]
    assert tokenizer.encode("ababcde") == [258, ord("a"), 257]
    assert tokenizer.encode("abcab東東") == [256, 258, 259]


@st.composite
def special_texts(draw: st.DrawFn) -> tuple[list[str], str]:
    letters = st.text("ab<", min_size=1, max_size=4)
    return draw(st.lists(letters, unique=True, max_size=5)), draw(st.text("ab< x", max_size=30))


def partition_plainly(specials: list[str], text: str) -> list[str | int]:
    """Definition of the partition: split at special tokens, longest first."""
    parts: list[str | int] = [text]
    for special in sorted(specials, key=len, reverse=True):
        pieces: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                pieces.append(part)
                continue
            for i, piece in enumerate(part.split(special)):
                pieces += [256 + specials.index(special), piece] if i else [piece]
        parts = pieces
    return parts


@given(special_texts())
def test_partition_matches_the_definition(drawn: tuple[list[str], str]) -> None:
    specials, text = drawn
    tokenizer = chat(dict.fromkeys(specials, USER_DEFINED))
    ids = [
        token
        for part in partition_plainly(specials, text)
        for token in ([part] if isinstance(part, int) else part.encode())
    ]
    # A special token of one letter takes the letter's place in the vocabulary, and its id.
    letters = {256 + i: ord(special) for i, special in enumerate(specials) if len(special) == 1}
    alone = [special for special in specials if len(special) > 1]
    renumbered = {256 + specials.index(special): 256 + i for i, special in enumerate(alone)} | letters
    assert tokenizer.encode(text) == [renumbered.get(token, token) for token in ids]


@pytest.mark.slow
def test_many_special_tokens_in_a_long_text_take_linear_time() -> None:
    specials = [f"<unused{i}>" for i in range(2000)]
    tokenizer = chat(dict.fromkeys(specials, CONTROL))
    text = "".join(specials) * 5
    start = time.perf_counter()
    assert tokenizer.encode(text, parse_special=True) == [*range(256, 2256)] * 5
    assert time.perf_counter() - start < 2


def test_each_text_run_gets_a_prefix_space() -> None:
    tokenizer = tokenizer_from_metadata(scored(english_scores(), {"<|end|>": CONTROL}))
    end, the = tokenizer.token_id("<|end|>"), tokenizer.token_id("▁the")
    assert tokenizer.encode("the<|end|>the<|end|>", parse_special=True) == [1, the, end, the, end]


def test_white_space_after_rstrip_tokens_is_dropped() -> None:
    metadata = byte_level([], {"<|a|>": CONTROL, "<|b|>": CONTROL, "\n\n": USER_DEFINED})
    tokenizer = tokenizer_from_metadata(metadata, strips_after=lambda text: text == "<|a|>")
    text = "<|a|> \n\nx<|b|> <|a|>\u00a0<|a|>  "
    expected = [256, ord("x"), 257, ord(" "), 256, 0xC2, 0xA0, 256]
    assert tokenizer.encode(text, parse_special=True) == expected
    assert tokenizer.encode("<|a|> <|b|>", parse_special=True) == [256, 257]
    assert tokenizer.encode("<|a|> ") == list(b"<|a|> ")


def test_white_space_that_is_a_token_stays_before_lstrip_tokens() -> None:
    metadata = byte_level([], {"\t": USER_DEFINED, "\x01": CONTROL})
    tokenizer = tokenizer_from_metadata(metadata, strips_before=lambda text: text == "\x01")
    assert tokenizer.encode("x\n\t\x01\n \x01", parse_special=True) == [ord("x"), ord("\n"), 256, 257, 257]


def test_white_space_before_lstrip_tokens_is_dropped() -> None:
    metadata = byte_level([], {"<mask>": CONTROL, "<|b|>": CONTROL})
    stripping = tokenizer_from_metadata(metadata, strips_before=lambda text: text == "<mask>")
    by_name = tokenizer_from_metadata(metadata | {"tokenizer.ggml.pre": "jina-v2-code"})
    for tokenizer in (stripping, by_name):
        text = " \t<mask>x\n\n <mask> <|b|> \u00a0 <mask> <mask>"
        expected = [256, ord("x"), 256, ord(" "), 257, ord(" "), 0xC2, 0xA0, 256, 256]
        assert tokenizer.encode(text, parse_special=True) == expected
        assert tokenizer.encode(" <mask>") == list(b" <mask>")


def test_bos_and_eos_are_added_once() -> None:
    kinds = {"<s>": CONTROL, "</s>": CONTROL}
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    both = chat(kinds, **ids, add_bos_token=True, add_eos_token=True)
    assert both.encode("a") == [256, ord("a"), 257]
    assert both.encode("") == [256, 257]
    assert both.encode("a", add_special=False) == [ord("a")]
    assert both.encode("<s>a</s>", parse_special=True) == [256, ord("a"), 257]
    ordinary = chat({}, bos_token_id=ord("a"), add_bos_token=True)
    assert ordinary.encode("a") == [ord("a")] * 2  # text is no BOS
    neither = chat(kinds, **ids)
    assert not neither.add_bos
    assert neither.encode("a") == [ord("a")]
    assert chat(kinds, add_bos_token=True).encode("a") == [ord("a")]  # there is no BOS


def test_prompts_never_end_with_eos() -> None:
    kinds = {"<s>": CONTROL, "</s>": CONTROL}
    both = chat(kinds, bos_token_id=256, eos_token_id=257, add_bos_token=True, add_eos_token=True)
    assert both.encode_prompt("a") == [256, ord("a")]
    assert both.encode_prompt("") == [256]
    assert both.encode_prompt("<s>a</s>") == [256, *b"<s>a</s>"]
    assert both.encode_prompt("<s>a</s>", parse_special=True) == [256, ord("a")]
    neither = chat(kinds, bos_token_id=256, eos_token_id=257)
    assert neither.encode_prompt("a") == [ord("a")]


def test_defaults_without_metadata() -> None:
    spm = tokenizer_from_metadata(scored({"a": 0}))
    assert (spm.bos_id, spm.eos_id, spm.unk_id, spm.add_bos, spm.add_eos) == (1, 2, 0, True, False)
    bpe = tokenizer_from_metadata(byte_level([]))
    assert (bpe.bos_id, bpe.eos_id, bpe.unk_id, bpe.add_bos, bpe.add_eos) == (None, None, None, False, False)
    assert chat({"<s>": CONTROL}, pre="llama-bpe", bos_token_id=256).add_bos
    assert tokenizer_from_metadata(ranked([], add_bos_token=False)).add_bos


@pytest.mark.parametrize("no_token", [-1, 0xFFFFFFFF])
def test_id_for_no_token(no_token: int) -> None:
    tokenizer = tokenizer_from_metadata(scored({"a": 0}, padding_token_id=no_token, eot_token_id=no_token))
    assert (tokenizer.pad_id, tokenizer.eot_id) == (None, None)


def test_end_tokens_by_metadata_keys() -> None:
    tokenizer = chat({"A": NORMAL, "<b>": CONTROL, "<c>": CONTROL}, eos_token_id=1, eot_token_id=2, eom_token_id=3)
    assert tokenizer.eog_ids == {1, 2, 3}
    assert chat({}, fim_pad_token_id=4, fim_rep_token_id=5, fim_sep_token_id=6).eog_ids == {4, 5, 6}


def test_end_tokens_by_text() -> None:
    tokenizer = chat(
        {"<|im_end|>": NORMAL, "<|endoftext|>": CONTROL, "<|file_sep|>": USER_DEFINED, "<|other|>": CONTROL}
    )
    assert tokenizer.eog_ids == {256, 257, 258}
    assert tokenizer.eot_id == 256
    assert tokenizer.is_control(256)  # whatever its kind in the file
    assert tokenizer.encode("<|im_end|>") == list(b"<|im_end|>")


def test_end_of_message_tokens_do_not_end_the_turn() -> None:
    kinds = dict.fromkeys(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"), CONTROL)
    tokenizer = chat(kinds)
    assert tokenizer.eog_ids == {260, 261}
    assert [tokenizer.piece(token) for token in range(256, 262)] == [*list(kinds)[:4], "", ""]
    assert chat({"<|end|>": CONTROL}).eog_ids == {256}


def test_html_tag_does_not_end_generation() -> None:
    assert chat({"</s>": NORMAL}).eog_ids == {256}
    tokenizer = chat({"</s>": NORMAL, "<|tool_response>": CONTROL})
    assert tokenizer.eog_ids == {257}
    assert tokenizer.piece(256) == "</s>"


def test_infill_tokens_are_found_by_text_unless_a_key_names_them() -> None:
    assert chat({"<|fim_prefix|>": NORMAL}).is_control(256)
    assert not chat({"<|fim_prefix|>": NORMAL}, fim_pre_token_id=1).is_control(256)
    assert not chat({"<|fim_prefix|>": NORMAL}, prefix_token_id=1).is_control(256)


def test_suppressed_tokens() -> None:
    ids = np.array([3, 0, -1, 10**6], np.int32)
    assert tokenizer_from_metadata(scored({"a": 0}, suppress_tokens=ids)).suppressed == (3, 0)
    assert tokenizer_from_metadata(scored({"a": 0})).suppressed == ()
    with pytest.raises(ModelFormatError, match="suppress_tokens' is not an array of token ids"):
        tokenizer_from_metadata(scored({"a": 0}, suppress_tokens=["x"]))
