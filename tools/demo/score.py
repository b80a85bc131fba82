"""Score of a demo model: number of right answers about stories.

    python tools/demo/score.py FILE.gguf

The conversations are held out. Before each question their own messages are given, so an error is counted once. A reply
is right if it is the conversation's, to the letter. Prints the score by kind of reply, and errors.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from chats import Message, converse

import llamacli

HELD_OUT = range(10_000_000, 10_000_128)  # as in train.py
LONGEST_ANSWER = 60  # words; replies that are longer are stories
TALK = ("I only know", "I tell", "I am", "I have", "Hello", "You are welcome", "Goodbye")


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


def reply(model: llamacli.Model, messages: list[Message], temperature: float, seed: int) -> str:
    """The model's reply to messages."""
    completion = model.create_chat_completion(
        [message._asdict() for message in messages], max_tokens=120, temperature=temperature, seed=seed
    )
    return str(completion["choices"][0]["message"]["content"])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--chats", type=int, default=30, help="number of conversations")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--errors", type=int, default=20, help="number of errors to print")
    options = parser.parse_args()

    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    errors = []
    with llamacli.load_model(options.model) as model:
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
    print(f"all: {right.total()} of {asked.total()} = {right.total() / asked.total():.0%}")
    print("\n".join(errors[: options.errors]))


if __name__ == "__main__":
    main()
