"""Score of a demo model: right answers and stories.

    python tools/demo/score.py FILE.gguf

The conversations are held out. Before each question their own messages are given, so an error is counted once. A reply
is right if it is the conversation's, to the letter. Before, 20 chats ask for three stories each; a story is right if
the first kind of hero that it names is the one asked for. Prints the scores by kind of reply, and errors.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from chats import BEFORE_VOWEL, PHRASES, WORDS, Message, converse, fields, lines

import llamacli

HELD_OUT = range(10_000_000, 10_000_128)  # as in train.py
LONGEST_ANSWER = 60  # words; replies that are longer are stories
TALK = ("I only know", "I tell", "I am", "I have", "Hello", "You are welcome", "Goodbye")
SECOND = (
    "Tell me a story about a {}.", "Tell me another story, about a {}.", "Now one about a {}", "another about a {}",
    "How about a story about a {}?",
)  # fmt: skip
THIRD = ("another, about a {}", "and a {}?", "One about a {}, please.", "Now a {}.", "Can I have one about a {}?")
HEROES = (
    "fox", "owl", "bear", "rabbit", "dragon", "mouse", "cat", "robot", "wolf", "hedgehog", "penguin", "lion", "frog",
    "squirrel", "duck", "princess", "elephant", "tiger", "badger", "otter",
)  # fmt: skip
SHORTEST_STORY = 300  # characters


def questions(messages: list[Message]) -> Iterator[tuple[list[Message], str]]:
    """Yield the messages up to each question, and the answer to it."""
    for i, message in enumerate(messages):
        if message.role == "assistant" and len(message.content.split()) <= LONGEST_ANSWER:
            yield messages[:i], message.content


def kind_of(answer: str) -> str:
    """The kind of an answer: talk, unknown or story."""
    if answer.startswith(TALK):
        return "talk"
    return "unknown" if answer == "The story does not say." else "story"


def reply(model: llamacli.Model, messages: list[Message], temperature: float, seed: int, max_tokens: int = 120) -> str:
    """The model's reply to messages."""
    completion = model.create_chat_completion(
        [message._asdict() for message in messages], max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    return str(completion["choices"][0]["message"]["content"])


def kinds() -> re.Pattern[str]:
    """Pattern of the kinds of heroes."""
    words = [fields(line)[0] for line in lines(WORDS["kinds"])]
    words += [*PHRASES["more"]["animals"].split(), *PHRASES["more"]["people"].split()]
    return re.compile(rf"\b({'|'.join(sorted(set(words)))})\b")


def stories(model: llamacli.Model, temperature: float) -> Iterator[tuple[str, str, str, bool]]:
    """Yield number, request, text of each story, and whether it is right."""
    pattern = kinds()
    for seed in range(len(HEROES)):
        messages: list[Message] = []
        for number, request in enumerate((SECOND[0], SECOND[seed % len(SECOND)], THIRD[seed // 2 % len(THIRD)])):
            kind = HEROES[(seed + number) % len(HEROES)]
            messages.append(Message("user", BEFORE_VOWEL.sub(r"\1n ", request.format(kind))))
            found = reply(model, messages, temperature, seed, 400)
            first = pattern.search(found)
            right = len(found) >= SHORTEST_STORY and first is not None and first[1] == kind
            yield ("first", "second", "third")[number], messages[-1].content, found, right
            messages.append(Message("assistant", found))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--chats", type=int, default=30, help="number of conversations")
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers about stories")
    parser.add_argument("--errors", type=int, default=20, help="number of errors to print")
    options = parser.parse_args()

    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    errors = []
    with llamacli.load_model(options.model) as model:
        told: Counter[str] = Counter()
        for number, request, found, is_right in stories(model, 0.8):
            told[number] += is_right
            if not is_right:
                errors.append(f"{request}\n  reply: {found[:120]}")
        for number, n in told.items():
            print(f"{number} stories: {n} of {len(HEROES)}", flush=True)
        for seed in HELD_OUT[: options.chats]:
            for messages, answer in questions(converse(seed)):
                found = reply(model, messages, options.temperature, seed)
                kind = kind_of(answer)
                asked[kind] += 1
                right[kind] += found == answer
                if found != answer:
                    errors.append(f"{messages[-1].content}\n  right: {answer}\n  reply: {found}")
    for kind, n in asked.items():
        print(f"{kind}: {right[kind]} of {n}")
    print(f"all: {right.total()} of {asked.total()} = {right.total() / max(1, asked.total()):.0%}")
    print("\n".join(errors[: options.errors]))


if __name__ == "__main__":
    main()
