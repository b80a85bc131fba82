"""Chat grammar: generates conversations about stories of stories.py.

`converse(seed)` and `converse_on(seed)` are deterministic. The user asks for a story and then about it, in
`converse_on` for further ones as well; the answers come from the latest story's cast and from the lines that it was
told with. Before and after there is other talk.

Templates are those of stories.py. Besides the cast they name facts: `{home_site}` where the hero lives, `{scene}` where
the story happens, `{problem}` and the other answers of grammar/chats/answers.toml, and so on (see `Telling.facts`). A
template is used only if the story tells its facts.
"""

import random
import re
import sys
from typing import Any, NamedTuple

from stories import BEFORE_VOWEL, PLOTS, SLOT, WORDS, Generator, fields, invent_name, lines, load

PHRASES: dict[str, Any] = load("chats/phrases.toml")
ANSWERS: dict[str, dict[str, str]] = load("chats/answers.toml")
LONGEST = 150  # words of most stories in chats
HELPERS = {
    "f": "{f.name} the {f.kind} helped {h.name}.",
    "s": "{S} helped {h.name}.",
    "h": "Nobody else did. {turn}",
    "hf": "{h.name} helped {f.name}.",
    "x": "{turn}",
}
"""Answers to who helped, by the first field of the turn's answer."""

SENTENCE = re.compile(r'[^".!?]{12,130}[.!]')


class Message(NamedTuple):
    """A message of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


class Telling(Generator):
    """A story for a chat, and the facts that it tells."""

    def __init__(self, seed: str, plot_name: str) -> None:
        super().__init__(seed, plot_name)
        self.answers = ANSWERS[plot_name]
        self.told: dict[str, list[tuple[int, str]]] = {}  # beat: number and text of its lines
        self.filled: list[tuple[str, str]] = []  # templates and their texts
        self.recast()
        self.story = self.text()

    def recast(self) -> None:
        """Give some heroes names and kinds that stories.py does not have."""
        hero, friend = self.cast["h"], self.cast["f"]
        if self.rng.random() < 0.4:
            given = dict(fields(line, ": ") for line in lines(PHRASES["more"]["names"]))
            pronoun = hero["they"]
            usual = self.rng.choice(given[pronoun].split())
            name = usual if self.rng.random() < 0.6 else invent_name(self.rng, pronoun)
            if name[0] != friend["name"][0]:
                hero.update(name=name, poss=f"{name}'s")
        if self.rng.random() < 0.25:
            group = "animals" if self.rng.random() < 0.75 else "people"
            kind = self.rng.choice(PHRASES["more"][group].split())
            hand = "paw" if group == "animals" else "hand"
            feet = "paws" if group == "animals" else "feet"
            hero.update(kind=kind, a=f"a {hero['size']} {kind}", hand=hand, hands=f"{hand}s", feet=feet)

    def fill(self, template: str) -> str:
        """Fill a template and remember it."""
        text = super().fill(template)
        self.filled.append((template, text))
        return text

    def line(self, beat: str) -> str:
        """An unused line of a beat, which is remembered."""
        before = set(self.used)
        text = super().line(beat)
        (option,) = self.used - before
        self.told.setdefault(beat, []).append((lines(str(self.plot[beat])).index(option), text))
        return text

    def facts(self) -> dict[str, str]:
        """Facts of the story, by the names that templates use."""
        cast, hero, friend = self.cast, self.cast["h"], self.cast["f"]
        story, opening = self.story.lower(), self.filled[0][1].lower()
        first = story.partition("\n\n")[0]
        home, place, near = cast["home"]["in"], cast["p"]["by"], f"near {cast['p']['name']}"
        found = {"theme": self.choose(self.answers["theme"])}
        if place in story:
            found |= {"site": place, "scene": place}
        elif cast["p"]["name"] in story:
            found["scene"] = near
        elif home in first:
            found["scene"] = home
        if home in opening:
            found["home_site"] = f"{home} {place}" if place in opening else home
        elif "live" in opening and place in opening:
            found["home_site"] = place
        elif f"in a village {near}" in opening:
            found["home_site"] = f"in a village {near}"
        elif "live" in opening and near in opening:
            found["home_site"] = near
        if f"{hero['size']} {hero['kind']}" in story:
            found["size"] = hero["size"]
        if any("{h.trait}" in template for template, _ in self.filled):
            found["trait"] = hero["trait"]
        if "f" in self.named and friend["name"].lower() in story and friend["kind"] in story:
            found |= {"friend_name": friend["name"], "friend_kind": friend["kind"]}
        day = cast["d"]["name"]
        if day != "day" and re.search(rf"\b{day}\b", first + self.told["problem"][0][1].lower()):
            found["time"] = "at night" if day == "night" else f"in the {day}"
        if cast["w"]["now"] in story or re.search(rf"\b{cast['w']['adj']} {day}\b", story):
            found["weather"] = cast["w"]["adj"]
        if tried := self.tried():
            found["tried"] = tried
        return found | self.told_answers() | self.others()

    def tried(self) -> str:
        """The first sentence of the first attempt, if it is plain."""
        for _, text in self.told.get("tries", []):
            plain = re.sub(r"^(First|At first|Then|Next|After that) (\w)", lambda m: m[2].upper(), text)
            sentence = SENTENCE.match(plain)
            return sentence[0] if sentence and self.cast["h"]["name"] in sentence[0] else ""
        return ""

    def told_answers(self) -> dict[str, str]:
        """Answers about the lines that the story was told with."""
        found: dict[str, str] = {}
        for beat in ("problem", "turn", "end"):
            options = lines(self.answers[beat])
            option = options[self.told[beat][0][0] if len(options) > 1 else 0]
            if beat == "turn":
                helper, option = fields(option)
                self.extra = {"turn": self.fill(option)}
                found["helper"] = self.fill(HELPERS[helper])
            found[beat] = self.fill(option)
        return found | {"moral": self.answers["moral"]}

    def others(self) -> dict[str, str]:
        """Facts that the story does not have, to ask about."""
        kinds = {fields(line)[0] for line in lines(WORDS["kinds"])}
        homes = [fields(line)[0] for line in lines(WORDS["homes"])]
        return {
            "other_kind": self.rng.choice(sorted(kinds - {self.cast["h"]["kind"]})),
            "other_home": self.rng.choice([home for home in homes if home != self.cast["home"]["in"]]),
            "any_kind": self.cast["h"]["kind"],
            "name": invent_name(self.rng, "she"),
        }

    def say(self, block: str) -> str:
        """A random line of a block whose facts the story tells."""
        while True:
            template = self.choose(self.rng.choice(lines(block)))
            if self.tells(template):
                return BEFORE_VOWEL.sub(r"\1n ", self.fill(template))

    def tells(self, template: str) -> bool:
        """True if the story tells the facts of a template."""
        slots = [slot.lower() for slot in SLOT.findall(template)]
        return all("." in slot or slot in self.extra for slot in slots)


class Chat:
    """A conversation while it is generated."""

    def __init__(self, telling: Telling, rng: random.Random) -> None:
        self.telling = telling
        self.rng = rng
        self.messages: list[Message] = []

    def exchange(self, asks: str, reply: str) -> None:
        """Add a question, more or less tidy, and its reply."""
        text = self.telling.say(asks)
        if self.rng.random() < 0.25 and not text.startswith("I "):
            text = text[0].lower() + text[1:]
        if self.rng.random() < 0.2:
            text = text.rstrip(".!?")
        self.messages += [Message("user", text), Message("assistant", reply)]

    def talk(self, topic: str) -> None:
        """Add an exchange of small talk."""
        block = PHRASES["talk"][topic]
        self.exchange(block["asks"], self.telling.say(block["answers"]))

    def tell(self, asks: str) -> None:
        """Add a request and the story."""
        self.exchange(asks, self.telling.story)

    def ask(self, n: int) -> None:
        """Add up to n different questions about the story, in random order."""
        names = list(PHRASES["questions"])
        names.remove("praise")
        weights = [0.5 if name in RARE else 1.0 for name in names]
        asked: set[str] = set()
        self.telling.extra["any_kind"] = self.telling.extra["other_kind"]
        for name in self.rng.choices(names, weights, k=2 * n):
            block = PHRASES["questions"][name]
            told = self.telling.tells(block["answers"])
            if len(asked) < n and name not in asked and (told or name in UNTOLD):
                asked.add(name)
                answers = block["answers"] if told else PHRASES["questions"]["unknown"]["answers"]
                self.exchange(block["asks"], self.telling.say(answers))
                if self.rng.random() < 0.06:
                    self.talk(self.rng.choice(["other", "other", "animal", "thanks", "self", "able"]))
        if self.rng.random() < 0.12:
            self.praise()

    def praise(self) -> None:
        """Add a word about the story, and the offer of another."""
        block = PHRASES["questions"]["praise"]
        self.exchange(block["asks"], self.telling.say(block["answers"]))

    def tell_next(self, telling: Telling) -> None:
        """Add a request for another story, and the story."""
        offered = self.messages[-1].content.endswith(("another one?", "tell you one?"))
        self.telling = telling
        self.tell(PHRASES["yes" if offered and self.rng.random() < 0.4 else "further"])


RARE = {"is_other", "other_home", "is_kind", "more", "summary", "happy"}
"""Questions that are asked half as often."""
UNTOLD = {"home", "scene", "time", "weather", "trait"}
"""Questions that are asked even if the story does not tell the answer."""
OFFERS = ("hello", "able", "other", "animal", "untold")
"""Topics whose reply offers a story."""


def telling_of(seed: str, rng: random.Random) -> Telling:
    """A rather short story of a random plot."""
    plot = rng.choice(sorted(PLOTS))
    attempt = 0
    while len((telling := Telling(f"{seed} {attempt}", plot)).story.split()) > LONGEST + 3 * attempt:
        attempt += 1
    telling.extra = telling.facts()
    return telling


def converse(seed: int) -> list[Message]:
    """Generate the conversation of a seed."""
    rng = random.Random(f"chat {seed}")
    chat = Chat(telling_of(f"chat {seed}", rng), rng)
    if rng.random() < 0.4:
        chat.messages.append(Message("system", chat.telling.say(PHRASES["systems"])))
    topic = ""
    while rng.random() < 0.35:
        topic = rng.choice(["hello", "hello", "able", "self", "other", "other", "animal", "untold"])
        chat.talk(topic)
    roll = rng.random()
    if topic in OFFERS and roll < 0.4:
        chat.tell(PHRASES["yes"])
    elif roll > 0.96:
        start = BEFORE_VOWEL.sub(r"\1n ", chat.telling.filled[0][1])
        rest = chat.telling.story.removeprefix(start).strip()
        chat.messages += [Message("user", start), Message("assistant", rest)]
    else:
        chat.tell(PHRASES["requests"])
    chat.ask(rng.randint(3, 10))
    if rng.random() < 0.1:
        chat.telling = telling_of(f"second {seed}", rng)
        chat.tell(PHRASES["again"])
        chat.ask(rng.randint(1, 5))
    if rng.random() < 0.25:
        chat.talk(rng.choice(["thanks", "thanks", "bye"]))
    return chat.messages


def converse_on(seed: int) -> list[Message]:
    """Generate a conversation with two to four stories."""
    rng = random.Random(f"series {seed}")
    chat = Chat(telling_of(f"series {seed}", rng), rng)
    if rng.random() < 0.3:
        chat.messages.append(Message("system", chat.telling.say(PHRASES["systems"])))
    if rng.random() < 0.15:
        chat.talk(rng.choice(["hello", "able", "other"]))
    chat.tell(PHRASES["requests"])
    for n in range(rng.choice([1, 2, 2, 2, 3])):
        chat.ask(rng.choice([0, 0, 0, 1, 1, 2, 4]))
        if rng.random() < 0.15:
            chat.praise()
        chat.tell_next(telling_of(f"series {seed} {n}", rng))
    chat.ask(rng.choice([0, 1, 2, 3, 5]))
    return chat.messages


if __name__ == "__main__":
    for number in sys.argv[1:] or ["1"]:
        for message in converse(int(number)):
            print(f"[{message.role}] {message.content}")
        print()
