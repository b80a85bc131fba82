"""Architectures of models by their names or repositories, and which run."""

import re
import tomllib
from importlib.metadata import entry_points
from importlib.resources import files

import attrs

from llamacli.errors import HubError
from llamacli.hub.names import lookup
from llamacli.hub.repositories import Reference, declared
from llamacli.plugins import ARCHITECTURES, CHECKPOINTS, known_architectures

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)


@attrs.frozen
class Support:
    """An architecture that a name may mean.

    `runs` is false for those that no plugin runs, whose `note` is the reason.
    """

    architecture: str
    runs: bool
    plugin: str | None = None
    models: str = ""
    note: str = ""


def reasons() -> dict[str, str]:
    """Architectures that llama.cpp names and no plugin of this project runs."""
    text = files("llamacli").joinpath("data/not_run.toml").read_text("utf-8")
    found: dict[str, str] = tomllib.loads(text)["reasons"]
    return found


def support(name: str) -> list[Support]:
    """Architectures of a model.

    The name is that of an architecture, of a class in config.json, of a repository or a short name, or what people call
    the model. A repository is asked of the hub; where there is none, its name decides. Empty for an unknown name.
    """
    if known := _by_architecture(name):
        return [known]
    found = None if " " in name else lookup(name)
    if found is None and _REPOSITORY.fullmatch(name):
        found = Reference.parse(name)
    if not isinstance(found, Reference):
        return _by_model(name)
    try:
        architecture = declared(found)
    except HubError as error:
        return [attrs.evolve(one, note=f"by its name alone: {error}") for one in _by_model(found.repo)]
    if architecture is not None and (known := _by_architecture(architecture)):
        return [known]
    note = f"by its name alone: no plugin claims {architecture}" if architecture else "by its name alone"
    return [attrs.evolve(one, note=note) for one in _by_model(found.repo)]


def _by_architecture(name: str) -> Support | None:
    """Support of `general.architecture`, or of a class of config.json."""
    known = known_architectures().get(name)
    if known is not None:
        return Support(name, True, known["plugin"], known["models"])
    for group, note in ((ARCHITECTURES, ""), (CHECKPOINTS, "as a folder")):
        for entry in entry_points(group=group, name=name):
            return Support(name, True, entry.dist.name if entry.dist else None, note=note)
    why = reasons().get(name)
    return None if why is None else Support(name, runs=False, note=why)


def _by_model(name: str) -> list[Support]:
    """Architectures by the longest name of a model in this one."""
    wanted = _words(name)
    known, best = known_architectures(), dict[str, int]()
    for architecture, about in known.items():
        for model in re.split(r"[,;:] (?:text of )?|text of | and ", f"{about['models']}, {architecture}"):
            words = _words(re.sub(r" \d[\w.]*B\b.*| \d\.x$", "", model))
            if words[:1] > ["9"] and any(wanted[i : i + len(words)] == words for i in range(len(wanted))):
                best[architecture] = max(best.get(architecture, 0), len(words))
    longest = max(best.values(), default=0)
    names = sorted(one for one, length in best.items() if length == longest)
    return [Support(one, True, known[one]["plugin"], known[one]["models"]) for one in names]


def _words(text: str) -> list[str]:
    """Runs of letters and of digits, in lower case."""
    return re.findall(r"[a-z]+|\d+", text.lower())
