"""Demo model file, and the grammars of its training texts (tools/demo)."""

import functools
import importlib.util
import re
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf
from llamacli import ChatSession, Model, load_model

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "core" / "llamacli" / "data" / "demo.gguf"
OTHER_PRONOUNS = {"she": r"\b(he|him|his|himself)\b", "he": r"\b(she|her|hers|herself)\b"}

seeds = st.integers(min_value=0, max_value=2**40)


def load_grammar(name: str = "stories") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "demo" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


grammar = load_grammar()
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "stories", grammar)
    chats = load_grammar("chats")
    patch.setitem(sys.modules, "chats", chats)
    score = load_grammar("score")


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


# --- conversations


@given(seeds)
def test_conversation_depends_on_seed_only(seed: int) -> None:
    assert chats.converse(seed) == chats.converse(seed)
    assert chats.converse(seed) != chats.converse(seed + 1)


@given(seeds)
def test_users_and_model_take_turns(seed: int) -> None:
    messages = chats.converse(seed) + [m for m in chats.converse_on(seed) if m.role != "system"]
    roles = [message.role for message in messages if message.role != "system"]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert "system" not in [message.role for message in messages[1:]]
    for message in messages:
        assert not re.search(r"[{}\[\]|]", message.content), "a template shows through"
        assert message.content == message.content.strip() != ""


@given(seeds)
def test_articles_of_messages_agree_with_the_next_word(seed: int) -> None:
    for message in chats.converse(seed):
        assert not re.search(r"\b[Aa] [aeio]|\b[Aa]n [^aeiouh]", message.content)


@functools.cache
def tellings() -> list:
    return [chats.telling_of(f"test {n}", chats.random.Random(n)) for n in range(150)]


def test_answers_have_no_characters_that_the_story_does_not_have() -> None:
    for telling in tellings():
        for name in ("problem", "turn", "end", "helper", "tried", "moral"):
            answer = telling.extra.get(name, "")
            spoken = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", answer)) - {"I"}
            assert all(word in telling.story for word in spoken), f"{answer} / {telling.story}"
            introduced = re.search(r"\b(his|her) (\w+ )?(friend|neighbour) [A-Z]\w* the\b", answer)
            assert name == "tried" or not introduced, "the story has not introduced the character"


def test_facts_are_those_of_the_story() -> None:
    for telling in tellings():
        story, facts = telling.story.lower(), telling.extra
        for name in ("site", "size", "trait", "friend_name", "friend_kind", "tried"):
            assert facts.get(name, "").lower().rstrip(".!") in story.replace(" an ", " a ") + story
        assert telling.cast["h"]["name"].lower() in story
        assert telling.cast["h"]["kind"] in story


def test_every_plot_has_answers_for_all_of_its_lines() -> None:
    assert set(chats.ANSWERS) == set(grammar.PLOTS)
    for name, answers in chats.ANSWERS.items():
        assert set(answers) == {"theme", "problem", "turn", "end", "moral"}
        for beat in ("problem", "turn", "end"):
            assert len(grammar.lines(answers[beat])) in (1, len(grammar.lines(grammar.PLOTS[name][beat])))
        assert all(chats.fields(line)[0] in chats.HELPERS for line in grammar.lines(answers["turn"]))


@given(seeds)
def test_further_stories_are_as_asked_for(seed: int) -> None:
    messages = chats.converse_on(seed)
    stories = [i for i, message in enumerate(messages) if len(message.content.split()) > score.LONGEST_ANSWER]
    assert 2 <= len(stories) <= 4
    for i in stories[1:]:
        for kind in score.kinds().findall(messages[i - 1].content.lower()):  # names of heroes may be kinds
            assert kind in messages[i].content.lower()


def test_score_asks_all_short_answers() -> None:
    story = chats.Message("assistant", "word " * 100)
    user, answer = chats.Message("user", "Who is it about?"), chats.Message("assistant", "The story does not say.")
    found = list(score.questions([user, story, user, answer, user, chats.Message("assistant", "You are welcome!")]))
    assert [(len(messages), text) for messages, text in found] == [(3, answer.content), (5, "You are welcome!")]
    assert [score.kind_of(text) for _, text in found] == ["unknown", "talk"]
    assert score.kind_of("The story is about Rusty the fox.") == "story"
    names = [name for name, block in chats.PHRASES["talk"].items() if score.kind_of(block["answers"]) != "talk"]
    assert names == []


# --- the file


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
    assert control == ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    ends = [demo.fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos", "eot")]
    assert [tokens[i] for i in ends] == ["<|begin|>", "<|end|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def model(plugins) -> Model:
    with load_model(DEMO, plugins=plugins) as model:
        yield model


def said(chat: ChatSession, text: str) -> str:
    chat.add_user(text)
    return "".join(piece.text for piece in chat.respond())


def test_demo_continues_texts(model: Model) -> None:
    with model.create_session() as session:
        prompt = model.encode("Once upon a time, a small fox named Rusty")
        tokens = list(session.generate(prompt, max_tokens=400))
    text = "".join(token.piece for token in tokens)
    assert 80 < len(text.split()) < 260
    assert len(text.split("\n\n")) == 4
    assert "Rusty" in text


def test_demo_tells_stories_and_answers_questions_about_them(model: Model) -> None:
    for article, kind, name in (("a", "fox", "Rusty"), ("an", "owl", "Molly"), ("a", "mouse", "Tom")):
        with model.create_chat(max_tokens=400) as chat:
            story = said(chat, f"Tell me a story about {article} {kind} named {name}.")
            assert chat.stop == "eos"
            assert name in story
            assert kind in story
            assert said(chat, "Who is the story about?") == f"The story is about {name} the {kind}."
    with model.create_chat(max_tokens=60) as chat:
        assert said(chat, "Hello!").startswith("Hello!")
        assert said(chat, "What is the capital of France?").startswith("I only know stories.")
