"""Demo model file, and the grammar of its training stories (tools/demo)."""

import importlib.util
import re
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "core" / "llamacli" / "data" / "demo.gguf"
OTHER_PRONOUNS = {"she": r"\b(he|him|his|himself)\b", "he": r"\b(she|her|hers|herself)\b"}

seeds = st.integers(min_value=0, max_value=2**40)


def load_grammar() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_stories", ROOT / "tools" / "demo" / "stories.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


grammar = load_grammar()


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@given(seeds)
def test_story_depends_on_seed_only(seed: int) -> None:
    assert grammar.generate(seed) == load_grammar().generate(seed)
    assert grammar.generate(seed).text != grammar.generate(seed + 1).text


@given(seeds)
def test_stories_are_complete_and_of_documented_length(seed: int) -> None:
    text = grammar.generate(seed).text
    assert 110 <= len(text.split()) <= 220
    assert not re.search(r"[{}\[\]|/]", text), "a template shows through"
    assert text.isascii()
    assert len(text.split("\n\n")) == 4


@given(seeds)
def test_typography(seed: int) -> None:
    text = grammar.generate(seed).text
    assert not re.search(r"  | \n|\n | [.,!?;:]|[.,;:][.,;:!?]", text)
    assert not re.search(r"[.!?] [a-z]", text), "a sentence begins small"
    for paragraph in text.split("\n\n"):
        assert re.search(r"[.!?]\"?$", paragraph)
        assert paragraph.lstrip('"')[0].isupper()
        assert paragraph.count('"') % 2 == 0


@given(seeds)
def test_articles_agree_with_the_next_word(seed: int) -> None:
    text = grammar.generate(seed).text
    sounds_open = "aeio"
    for article, initial in re.findall(r"\b([Aa]n?) (\w)", text):
        if initial not in ("u", "h"):
            assert (article.lower() == "an") == (initial.lower() in sounds_open), f"{article} {initial}"


@given(seeds)
def test_pronouns_stay_consistent(seed: int) -> None:
    # where everybody in the story is "she", no "he" may turn up, and the other way round
    story = next(s for s in map(grammar.generate, count(seed)) if len(s.pronouns) == 1)
    (pronoun,) = story.pronouns
    assert not re.findall(OTHER_PRONOUNS[pronoun], story.text, re.IGNORECASE)


@given(seeds)
def test_characters_are_introduced_outside_of_speech(seed: int) -> None:
    story = grammar.generate(seed)
    for speech in re.findall(r'"([^"]*)"', story.text):
        assert not re.search(r"\b(his|her) (\w+ )?(friend|neighbour) [A-Z]\w* the\b", speech)


def test_every_plot_is_used() -> None:
    found = {grammar.generate(seed).plot for seed in range(1000)}
    assert found == set(grammar.PLOTS)
    assert len(found) >= 36


def test_every_line_of_every_plot_is_reachable() -> None:
    for name, plot in grammar.PLOTS.items():
        generator = grammar.Generator("any", name)
        generator.extra = {"day": "one day", "n": "Then"}
        for beat, block in plot.items():
            if isinstance(block, str):
                for line in grammar.lines(block):
                    found = generator.fill(line)
                    assert len(words_of(found)) >= 4, f"{name}.{beat}: {line}"


@pytest.fixture(scope="module")
def demo() -> gguf.GGUFReader:
    return gguf.GGUFReader(DEMO)


def test_demo_file_is_small() -> None:
    assert 1_000_000 < DEMO.stat().st_size < 4_000_000


def test_demo_file_is_a_llama_in_q8_0(demo: gguf.GGUFReader) -> None:
    assert DEMO.read_bytes()[:8] == b"GGUF\x03\0\0\0"
    assert demo.fields["general.architecture"].contents() == "llama"
    types = {tensor.name: tensor.tensor_type.name for tensor in demo.tensors}
    assert {kind for name, kind in types.items() if name.endswith("norm.weight")} == {"F32"}
    assert {kind for name, kind in types.items() if not name.endswith("norm.weight")} == {"Q8_0"}
    assert "output.weight" not in types, "the output matrix is the embedding"


def test_demo_vocabulary_covers_every_byte(demo: gguf.GGUFReader) -> None:
    tokens = demo.fields["tokenizer.ggml.tokens"].contents()
    types = demo.fields["tokenizer.ggml.token_type"].contents()
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL}
    assert sum(len(token) == 1 for token in normal) == 256
    control = [tokens[i] for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    assert control == ["<|begin|>", "<|end|>"]
    ends = demo.fields["tokenizer.ggml.bos_token_id"].contents(), demo.fields["tokenizer.ggml.eos_token_id"].contents()
    assert [tokens[i] for i in ends] == control
