"""Token ids of a query and a text."""

from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import CONTROL, byte_level, english, scored, word_piece
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.tools.pairs import encode_pair, rerank_template

TEMPLATE = "<|im|>the {query} on{document}<|end|>"


def with_specials() -> Tokenizer:
    return tokenizer_from_metadata(Metadata(byte_level(english("\u0120"), {"<|im|>": CONTROL, "<|end|>": CONTROL})))


def test_bert_has_a_separator_between() -> None:
    tokenizer = tokenizer_from_metadata(Metadata(word_piece(["\u2581the", "\u2581cat"])))
    ids = encode_pair(tokenizer, None, "the", "cat the")
    assert [tokenizer.token_text(token) for token in ids] == ["[CLS]", "\u2581the", "[SEP]", "\u2581cat", "\u2581the"]


def test_both_texts_end_where_the_vocabulary_says_so() -> None:
    ends = {"add_bos_token": True, "add_eos_token": True, "bos_token_id": 1, "eos_token_id": 2}
    tokenizer = tokenizer_from_metadata(Metadata(scored({"\u2581a": 0.0, "\u2581b": -1.0}, **ends)))
    assert encode_pair(tokenizer, None, "a", "b") == [1, *tokenizer.encode_run("a"), 2, *tokenizer.encode_run("b"), 2]


def test_a_template_is_encoded_as_one_text() -> None:
    tokenizer = with_specials()
    text = TEMPLATE.replace("{query}", "cat").replace("{document}", " the mat")
    expected = tokenizer.encode(text, add_special=False, parse_special=True)
    assert encode_pair(tokenizer, TEMPLATE, "cat", " the mat") == expected


def test_texts_have_neither_special_tokens_nor_places() -> None:
    tokenizer = with_specials()
    ids = encode_pair(tokenizer, TEMPLATE, "<|end|>{document}", "<|im|>")
    assert sum(tokenizer.is_control(token) for token in ids) == 2
    assert tokenizer.decode(ids, unparse_special=True) == "<|im|>the <|end|>{document} on<|im|><|end|>"


def test_the_template_of_a_file() -> None:
    assert rerank_template(Metadata({"tokenizer.chat_template.rerank": TEMPLATE})) == TEMPLATE
    assert rerank_template(Metadata({"tokenizer.chat_template": TEMPLATE})) is None
