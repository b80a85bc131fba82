"""Short names of models of the Hugging Face hub, such as `family:8b`.

The package ships a list, `data/models.toml`. A user's own names are in `aliases.toml` in the configuration folder
(~/.config/llamacli on Linux), a name and a repository or a file in each line: `mine = "user/repo:Q5_K_M"`, or a table
with a model, a system prompt and parameters: see `llamacli.hub.personas`.
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs

from llamacli.errors import InvalidRequestError, ModelNotFoundError
from llamacli.hub.demo import demo_path
from llamacli.hub.repositories import Reference, cached, fetch
from llamacli.util.folders import user_folder

LATEST = "latest"
DEMO = "demo"
"""Short name of the demo model, unless it is one of the user's own names."""

_QUANT = re.compile(r"(?P<tag>.+?)-(?P<quant>(?:i?q\d|b?f16|f32|mxfp4)\w*)", re.IGNORECASE)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)
_ADDRESS = re.compile(
    r"https?://(?:www\.)?(?:hf\.co|huggingface\.co)/(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?/?"
    r"(?:(?:tree|resolve|blob)/[^/]+/?(?:(?P<file>.+?)(?:-\d{5}-of-\d{5})?\.gguf)?(?:\?.*)?)?",
    re.ASCII,
)


@functools.cache
def shipped_names() -> dict[str, str]:
    """Names of the shipped list with their repositories."""
    families = tomllib.loads(files("llamacli").joinpath("data/models.toml").read_text("utf-8"))
    names = {
        f"{family}:{tag}": repo for family, tags in families.items() for tag, repo in tags.items() if tag != LATEST
    }
    latest = {family: names[f"{family}:{tags[LATEST]}"] for family, tags in families.items()}
    return names | latest


def aliases() -> dict[str, str]:
    """Models of the names in the user's own file. Raises InvalidRequestError."""
    return {name: value["from"] if isinstance(value, dict) else value for name, value in own_names().items()}


def own_names() -> dict[str, Any]:
    """Names of the user's own file.

    Values are strings, and tables with a model `from`. Raises InvalidRequestError.
    """
    path = aliases_path()
    if path is None or not path.is_file():
        return {}
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: not a file of names: {error}") from None
    models = {name: value.get("from") if isinstance(value, dict) else value for name, value in found.items()}
    wrong = next((name for name, model in models.items() if not isinstance(model, str)), None)
    if wrong is not None:
        example = f'{wrong} = "user/repo:Q4_K_M"'
        raise InvalidRequestError(f"{path}: {wrong} must be a string, as in {example}, or a table with from")
    return found


def aliases_path() -> Path | None:
    """Path of the user's own file, None without a home."""
    folder = user_folder("config")
    return None if folder is None else folder / "aliases.toml"


def lookup(name: str) -> Reference | Path | None:
    """Repository or file of a short name or an address.

    None for an unknown name. A tag may end in a type, as in `family:8b-q8_0`. hf.co/user/repo is a repository, as in
    ollama; so is the address of a repository or a file at the hub. Raises InvalidRequestError for an address elsewhere.
    """
    if name.startswith(("hf.co/", "huggingface.co/")):
        return Reference.parse(name)
    if name.startswith(("http://", "https://")):
        return _at_address(name)
    own = _own_model(name)
    if own is not None:
        path = Path(own).expanduser()
        if path.exists() or own.endswith(".gguf"):
            return path
        named = None if own in aliases() else lookup(own)
        return Reference.parse(own) if named is None else named
    if name == DEMO:
        return demo_path()
    key = name.lower().removesuffix(f":{LATEST}")
    repo = shipped_names().get(key)
    if repo is not None:
        return Reference.parse(repo)
    found = _QUANT.fullmatch(key)
    if found is not None and found["tag"] in shipped_names():
        return attrs.evolve(Reference.parse(shipped_names()[found["tag"]]), quant=found["quant"].upper())
    return None


def _own_model(name: str) -> str | None:
    """Model of an own name, through other own names, None for others."""
    own, models = None, aliases()
    while name in models:
        own = name = models.pop(name)
    return own


def _at_address(address: str) -> Reference:
    """Repository of an address at the hub.

    The name of a file, less .gguf and the number of its part, is the quant.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise InvalidRequestError(
            f"{address} is not an address of a model at huggingface.co; download the file and give its path"
        )
    return Reference(found["repo"], found["quant"] or found["file"])


def reference(name: str) -> Reference:
    """Repository of a short name or of `user/repo[:quant]`. Raises InvalidRequestError."""
    found = lookup(name)
    if isinstance(found, Path):
        raise InvalidRequestError(f"{name} is a file, {found}, not a model of the hub")
    if found is not None:
        return found
    try:
        return Reference.parse(name)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error}; {_no_model(name)}") from None


def resolve(name: str) -> Path:
    """Path of a model's file.

    The name is a path, a short name, `user/repo[:quant]` or an address at the hub. A model of the hub is downloaded
    unless cached. `user/repo` is a path if there is a folder `user`, or if it ends like a file. Raises
    ModelNotFoundError for a name that is none of these, HubError if the model cannot be downloaded.
    """
    path = Path(name)
    if path.exists():
        return path
    found = lookup(name)
    if found is None and _REPOSITORY.fullmatch(name) and not path.parent.exists() and not _like_a_file(path):
        found = Reference.parse(name)
    if found is None:
        raise ModelNotFoundError(name, _no_model(name))
    return located(found)


def _like_a_file(path: Path) -> bool:
    return path.suffix.lower() in (".gguf", ".bin", ".safetensors")


def _no_model(name: str) -> str:
    path = Path(name)
    if _like_a_file(path) or path.parent != Path():
        siblings = [other.name for other in path.parent.glob("*") if other.suffix == path.suffix]
        files = difflib.get_close_matches(path.name, siblings)
        return "no such file" + (f"; similar in its folder: {', '.join(files)}" if files else "")
    names = similar(name)
    hint = f"similar names: {', '.join(names)}" if names else "llamacli list --names prints the short names"
    return f"no such file, and no short name of a model; {hint}"


def located(found: Reference | Path) -> Path:
    """Path of a found model's file, downloaded unless cached."""
    return found if isinstance(found, Path) else cached(found) or fetch(found)[0]


def similar(name: str) -> list[str]:
    """Known names that are spelled like this one."""
    known = [*aliases(), *shipped_names()]
    family = name.partition(":")[0].lower()
    tags = [known_name for known_name in known if known_name.startswith(f"{family}:")]
    return tags or difflib.get_close_matches(name.lower(), known, n=5)
