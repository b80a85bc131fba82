import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import InvalidRequestError
from llamacli.testing.vocabularies import (
    CONTROL,
    UNUSED,
    USER_DEFINED,
    byte_level,
    english,
    english_scores,
    ranked,
    scored,
)
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

EXTRA = {"<|end|>": CONTROL, "<tool▁>": USER_DEFINED, "<unused>": UNUSED}
SPM = tokenizer_from_metadata(scored(english_scores(), EXTRA))
ALL = [
    SPM,
    tokenizer_from_metadata(byte_level(english("Ġ"), EXTRA)),
    tokenizer_from_metadata(ranked(english("▁"), EXTRA)),
]


def id_of(text: str) -> int:
    token = SPM.token_id(text)
    assert token is not None
    return token


def test_pieces_of_each_kind() -> None:
    shown = {"▁the": " the", "<tool▁>": "<tool▁>", "<0x41>": "A", "<0xC3>": "\ufffd", "<unused>": "", "<|end|>": ""}
    assert {text: SPM.piece(id_of(text)) for text in shown} == shown
    assert SPM.piece_bytes(id_of("<0xC3>")) == b"\xc3"
    assert SPM.piece(id_of("<|end|>"), unparse_special=True) == "<|end|>"
    assert SPM.piece(id_of("<unk>"), unparse_special=True) == "<unk>"
    assert SPM.token_text(id_of("▁the")) == "▁the"


def test_special_tokens_are_hidden_by_default() -> None:
    ids = SPM.encode("the cat<|end|>", parse_special=True)
    assert SPM.decode(ids) == "the cat"
    assert SPM.decode(ids, unparse_special=True) == "<s>the cat<|end|>"


def test_first_space_is_removed() -> None:
    the = id_of("▁the")
    assert SPM.decode([the, the]) == "the the"
    assert SPM.decode([1, id_of("▁"), the]) == " the"
    assert SPM.decode([1, id_of("<|end|>"), the]) == SPM.decode([id_of("<|end|>"), the]) == " the"
    assert SPM.decode([id_of("<|end|>"), the], unparse_special=True) == "<|end|> the"
    assert SPM.decode([1, 1, the]) == " the"
    assert SPM.decode([id_of("<tool▁>"), the]) == "<tool▁> the"
    assert SPM.decode([]) == ""


def test_incomplete_characters_are_held_back() -> None:
    stream = SPM.stream()
    assert [stream.feed(3 + byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.flush() == ""
    assert [stream.feed(3 + 0xF0), stream.feed(3 + 0x9F), stream.flush()] == ["", "", "\ufffd"]
    assert stream.feed(3 + 0x41) == "A"


def test_stream_continues_after_its_prefix() -> None:
    the, cat = id_of("▁the"), id_of("▁cat")
    assert SPM.stream().feed(cat) == "cat"
    assert SPM.stream([1]).feed(cat) == "cat"
    assert SPM.stream([1, the]).feed(cat) == " cat"
    assert SPM.stream([1, the, 3 + 0xC3]).feed(3 + 0xA9) == "é"


@pytest.mark.parametrize("tokenizer", ALL)
@given(data=st.data())
def test_stream_with_a_prefix_equals_one_that_was_fed_it(tokenizer: Tokenizer, data: st.DataObject) -> None:
    parts = [token for text in ("the cat", "é€😀", "<|end|>") for token in tokenizer.encode(text, parse_special=True)]
    prefix, more = (data.draw(st.lists(st.sampled_from(parts), max_size=n)) for n in (9, 4))
    continuing, fed = tokenizer.stream(prefix), tokenizer.stream()
    for token in prefix:
        fed.feed(token)
    assert [*map(continuing.feed, more), continuing.flush()] == [*map(fed.feed, more), fed.flush()]


def test_stream_reads_both_ends_of_its_prefix_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, read, piece_bytes = SPM.encode("the cat " * 20), list[object](), Tokenizer.piece_bytes
    monkeypatch.setattr(Tokenizer, "piece_bytes", lambda *args: read.append(args) or piece_bytes(*args))
    SPM.stream(ids)
    assert len(read) < 20 < len(ids)


@pytest.mark.parametrize("tokenizer", ALL)
@given(data=st.data())
def test_streamed_text_equals_decoded_bytes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=30))
    unparse_special = data.draw(st.booleans())
    stream = tokenizer.stream(unparse_special=unparse_special)
    streamed = "".join([stream.feed(token) for token in ids] + [stream.flush()])
    assert streamed == tokenizer.decode(ids, unparse_special)
    whole = b"".join(tokenizer.piece_bytes(token, unparse_special) for token in ids).decode(errors="replace")
    assert streamed in (whole, whole.replace(" ", "", 1))
    assert streamed == whole or tokenizer is SPM


def test_bytes_of_repeated_tokens_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    piece_bytes = SPM.piece_bytes
    monkeypatch.setattr(SPM, "piece_bytes", lambda token, special: read.append(token) or piece_bytes(token, special))
    assert SPM.decode([id_of("▁the")] * 1000) == "the" + 999 * " the"
    assert len(read) < 5


@pytest.mark.parametrize("token", [-1, 1 << 31])
def test_ids_beyond_the_vocabulary_are_refused(token: int) -> None:
    for call in (SPM.piece, SPM.piece_bytes, SPM.token_text, SPM.stream().feed, lambda token: SPM.decode([token])):
        with pytest.raises(InvalidRequestError, match=str(token)):
            call(token)


def test_lone_surrogates_are_read_as_replacement_characters() -> None:
    for tokenizer in ALL:
        ids = tokenizer.encode("a\ud83d\udcffb", add_special=False)
        assert tokenizer.decode(ids) == "a\ufffd\ufffdb"
