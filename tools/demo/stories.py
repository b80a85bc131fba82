"""Story grammar: generates stories from templates in the TOML files of grammar/.

`generate(seed)` is deterministic. A template is a line of text with `[one|another]` for a choice and `{who.field}` for
a field of the cast; a capital in the slot (`{H.their}`, `{h.Their}`) capitalises the text. "a" becomes "an" at the end,
when the next word is known. A line that begins with `a) ` or `b) ` belongs to that thread of its plot: a story uses
lines of one thread only.

The cast: h hero, f friend, s stranger, big and small further characters, t a thing, tune an instrument, high a thing
that flies, p place, home, food, w weather, d time of day. `{f}`, `{s}`, `{big}`, `{small}` and `{home}` include an
introduction where they are first named: "her friend Pip the mouse", then "Pip"; "a tall crane", then "the tall crane".
"""

import random
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

GRAMMAR = Path(__file__).parent / "grammar"
SHORTEST, LONGEST = 110, 220  # words

Entity = dict[str, str]
Plot = dict[str, Any]  # beats: blocks of lines; places, weathers, days: lists of names

PRONOUNS = {
    "she": {"they": "she", "them": "her", "their": "her", "themself": "herself"},
    "he": {"they": "he", "them": "him", "their": "his", "themself": "himself"},
}
THING_FORMS = {
    False: {"it": "it", "them": "it", "was": "was", "is": "is", "this": "this"},
    True: {"it": "they", "them": "them", "was": "were", "is": "are", "this": "these"},
}

CHOICE = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{([^{}]+)\}")
BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeio]|u(?!ni|se|su)|hour|honest)")
THREAD = re.compile(r"([a-z])\) ")


def lines(block: str) -> list[str]:
    """Split a block into its alternatives, one per line."""
    return block.strip().split("\n")


def load(pattern: str) -> dict[str, Any]:
    """Load the tables of the grammar's TOML files."""
    return {
        name: table
        for path in sorted(GRAMMAR.glob(pattern))
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


WORDS: dict[str, str] = load("words.toml")
OPENINGS: dict[str, str] = load("openings.toml")
PLOTS: dict[str, Plot] = load("plots/*.toml")


class Story(NamedTuple):
    """A story with its plot's name and its characters' pronouns."""

    text: str
    plot: str
    pronouns: frozenset[str]


def fields(line: str, separator: str = " / ") -> list[str]:
    """Split a line of words into its fields."""
    return line.split(separator)


def person(rng: random.Random, avoid: Sequence[Entity] = ()) -> Entity:
    """A random character with name, kind, size, trait and pronouns.

    Initial and kind differ from those to avoid.
    """
    while True:
        kind, hand, feet, *given = fields(rng.choice(lines(WORDS["kinds"])))
        pronoun = given[0] if given else rng.choice(["she", "he"])
        name = invent_name(rng, pronoun)
        if all(name[0] != other["name"][0] and kind != other["kind"] for other in avoid):
            break
    size = rng.choice(WORDS["sizes"].split())
    trait, habit, later = fields(rng.choice(lines(WORDS["traits"])))
    return {
        "name": name, "poss": f"{name}'s", "kind": kind, "size": size, "a": f"a {size} {kind}",
        "hand": hand, "hands": "hooves" if hand == "hoof" else "feet" if hand == "foot" else f"{hand}s", "feet": feet,
        "trait": trait, "habit": habit, "later": later, **PRONOUNS[pronoun],
    }  # fmt: skip


def invent_name(rng: random.Random, pronoun: str) -> str:
    """A random name: neutral, usual for the pronoun, or invented."""
    style = rng.random()
    if style < 0.88:
        names = WORDS["either" if style < 0.25 else pronoun].split()
        return names[int(len(names) * rng.random() ** 2)]
    return "".join(rng.choice(WORDS[part].split()) for part in ("onsets", "vowels", "codas")).capitalize()


def unnamed(rng: random.Random, line: str) -> Entity:
    """A character without a name, as in "old ferryman / he"."""
    phrase, *given = fields(line)
    pronoun = given[0] if given else rng.choice(["she", "he"])
    return {"intro": f"a {phrase}", "name": f"the {phrase}", **PRONOUNS[pronoun]}


def thing(rng: random.Random) -> Entity:
    """A random thing, singular or plural."""
    phrase = rng.choice(lines(WORDS["things"]))
    plural = phrase.startswith("pair: ")
    full = phrase.removeprefix("pair: ")
    noun = full if full in ("music box", "pocket watch", "picture book") else full.split()[-1]
    article = "a pair of " if plural else "a "
    return {"name": noun, "full": full, "a": article + full, "the": f"the {full}", **THING_FORMS[plural]}


def cast_for(rng: random.Random, plot: Plot) -> dict[str, Entity]:
    """Random characters, things and places for a story of a plot."""
    hero = person(rng)
    friend = person(rng, [hero])
    if rng.random() < 0.5:  # two characters with different pronouns are easier to follow
        while friend["they"] == hero["they"]:
            friend = person(rng, [hero])
    relation = rng.choice(["friend", "friend", "best friend", "neighbour", "old friend", "good friend"])
    friend["intro"] = f"{hero['their']} {relation} {friend['name']} the {friend['kind']}"

    day = rng.choice(plot.get("days") or WORDS["days"].split())
    dark = day in ("night", "evening")
    found = [fields(line, ": ") for line in lines(WORDS["weathers"])]
    wanted = plot.get("weathers") or {name for name, _ in found}
    unfit = {"sun", "heat"} if dark else {"clear"}
    adjective, noun, now, end = fields(
        rng.choice([rest for name, rest in found if name in wanted and name not in unfit])
    )

    sites = [fields(line, ": ") for line in lines(WORDS["places"])]
    place, by = fields(rng.choice([rest for name, rest in sites if name in plot.get("places", name)]))
    home_in, home = fields(rng.choice(lines(WORDS["homes"])))
    food = rng.choice(lines(WORDS["foods"]))
    high = rng.choice(lines(WORDS["flying"]))
    small = rng.choice(lines(WORDS["small"]))
    return {
        "h": hero,
        "f": friend,
        "s": unnamed(rng, rng.choice(lines(WORDS["strangers"]))),
        "big": unnamed(rng, rng.choice(lines(WORDS["big"]))),
        "small": {"intro": f"a {small}", "name": f"the {small}"},
        "t": thing(rng),
        "tune": {"a": f"a {rng.choice(lines(WORDS['instruments']))}"},
        "high": {"name": high, "a": f"a {high}", "the": f"the {high.split()[-1]}"},
        "p": {"name": place, "by": by},
        "home": {"intro": f"{hero['their']} house", "name": home, "in": home_in},
        "food": {
            "name": food,
            "was": "were" if food.endswith("s") else "was",
            "is": "are" if food.endswith("s") else "is",
        },
        "w": {"name": noun, "adj": adjective, "now": now, "end": end},
        "d": {"name": day, "greeting": "evening" if dark else day},
    }


class Generator:
    """Random choices, cast and used lines of one story."""

    def __init__(self, seed: str, plot_name: str) -> None:
        self.rng = random.Random(seed)
        self.plot = PLOTS[plot_name]
        self.cast = cast_for(self.rng, self.plot)
        self.named: set[str] = set()
        self.used: set[str] = set()
        self.thread = ""
        self.extra: dict[str, str] = {}

    def fill(self, template: str) -> str:
        """Make the choices of a template and fill its slots."""
        text = SLOT.sub(self.slot, self.choose(template)).strip()
        return text[0].upper() + text[1:]

    def choose(self, template: str) -> str:
        """Select one alternative of each `[one|another]`, innermost first."""
        while match := CHOICE.search(template):
            choice = self.rng.choice(match[1].split("|"))
            template = template[: match.start()] + choice + template[match.end() :]
        return template

    def slot(self, match: re.Match[str]) -> str:
        """Text of a slot: a field of the cast, or of `extra`."""
        who, _, field = match[1].partition(".")
        capital = who[0].isupper() or field[:1].isupper()
        who, field = who.lower(), field.lower()
        if who in self.extra:
            value = self.extra[who]
        else:
            entity = self.cast[who]
            introduce = "intro" in entity and who not in self.named
            value = self.choose(entity[field or ("intro" if introduce else "name")])
            self.named.add(who)
        return value[0].upper() + value[1:] if capital else value

    def line(self, beat: str) -> str:
        """An unused line of a beat, of the story's thread."""
        options = []
        for option in lines(str(self.plot[beat])):
            label = THREAD.match(option)
            if option not in self.used and not (label and self.thread and label[1] != self.thread):
                options.append(option)
        option = self.rng.choice(options)
        self.used.add(option)
        if label := THREAD.match(option):
            self.thread = label[1]
            option = option[label.end() :]
        return self.fill(option)

    def opening(self) -> list[str]:
        """Opening sentences, which introduce the hero and perhaps the friend."""
        roll = self.rng.random()
        style = "pairs" if roll < 0.1 and self.plot.get("neighbours", True) else "timed" if roll < 0.3 else "plain"
        sentences = [self.fill(self.rng.choice(lines(OPENINGS[style])))]
        same = ["That {d}", "That same {d}", "On that very {d}"]
        some = ["One {w.adj} {d}", "One {w.adj} {d}", "One {d}", "Then, one {w.adj} {d}", "But one {d}"]
        self.extra["day"] = self.fill(self.rng.choice(same if style == "timed" else some))
        return sentences

    def text(self) -> str:
        """The text of the story.

        The last paragraph refers to the first one.
        """
        first = self.opening()
        last = OPENINGS["ends"]
        if self.rng.random() < 0.4:
            first.append(self.fill(self.rng.choice(lines(OPENINGS["trait"]))))
            last = OPENINGS["trait_ends"]
        if self.rng.random() < 0.45:
            motif, last = fields(self.rng.choice(lines(WORDS["motifs"])))
            first.append(self.fill(motif))
        first.append(self.line("setup"))
        second = [self.line("problem"), *self.tries()]
        third = [self.line("turn"), self.line("end")]
        fourth = [self.line("close"), self.fill(self.rng.choice(lines(last)))]
        text = "\n\n".join(" ".join(part) for part in (first, second, third, fourth))
        return BEFORE_VOWEL.sub(r"\1n ", text)

    def tries(self) -> list[str]:
        """Up to two attempts at the problem, in random order."""
        sentences: list[str] = []
        starts = [["First", "At first", ""], ["Then", "Next", "After that", ""]]
        for start in starts[: self.rng.choice([0, 1, 1, 2])]:
            self.extra["n"] = self.rng.choice(start)
            sentences.append(self.line("tries"))
        return sentences


def generate(seed: int) -> Story:
    """Generate the story of a seed, SHORTEST to LONGEST words long."""
    plot = random.Random(f"plot {seed}").choice(sorted(PLOTS))
    attempt = 0
    while True:
        story = Generator(f"{seed} {attempt}", plot)
        text = story.text()
        if SHORTEST <= len(text.split()) <= LONGEST:
            people = story.named & {"h", "f", "s", "big"}
            return Story(text, plot, frozenset(story.cast[who]["they"] for who in people))
        attempt += 1


if __name__ == "__main__":
    for number in sys.argv[1:] or ["1"]:
        print(generate(int(number)).text, end="\n\n\n")
