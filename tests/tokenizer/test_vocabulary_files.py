"""Test cases that llama.cpp publishes with its vocabularies."""

from functools import cache
from pathlib import Path

import pytest

from llamacli.gguf import open_gguf
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

FOLDER = Path(__file__).parents[3] / "shared" / "vocab"
NAMES = ["gemma-4", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"]
N_CASES = 46


@cache
def load(name: str) -> Tokenizer:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return tokenizer_from_metadata(open_gguf(path).metadata)


def cases(name: str) -> list[tuple[str, list[int]]]:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    assert texts[len(lines) :] in ([], [""])  # a separator may end the file
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_cases(name: str) -> None:
    tokenizer = load(name)
    assert len(cases(name)) == N_CASES
    for text, ids in cases(name):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "bos", "ends"),
    [
        ("gemma-4", 2, {1, 50, 106}),
        ("gpt-2", None, {50256}),
        ("llama-bpe", 128000, {128001, 128009}),
        ("llama-spm", 1, {2}),
        ("phi-3", 1, {2, 32000, 32007}),
        ("qwen2", None, {128247, 151643, 151645}),
    ],
)
def test_bos_and_eos_of_each_vocabulary(name: str, bos: int | None, ends: set[int]) -> None:
    tokenizer = load(name)
    assert tokenizer.encode("")[:1] == ([] if bos is None else [bos])
    assert tokenizer.eog_ids == ends


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_parsed_on_request_only(name: str) -> None:
    tokenizer = load(name)
    control = [token for token in range(tokenizer.n_vocab) if tokenizer.is_control(token)]
    for token in control:
        text = f"a{tokenizer.token_text(token)}b"
        assert token in tokenizer.encode(text, parse_special=True)
        plain = tokenizer.encode(text)
        assert not set(plain[1:]) & set(control)
        assert tokenizer.decode(plain) == text
