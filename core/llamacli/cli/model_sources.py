"""Models that `llamacli serve` offers: arguments, a folder, presets, a catalogue."""

from __future__ import annotations

import configparser
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import click

from llamacli.cli.command import Command
from llamacli.cli.hub import REFERENCE, model_from_hub, resolve_model
from llamacli.cli.numbers import ByteSize, Integer, Number
from llamacli.cli.options import PATH, lora_option, mmproj_option, option
from llamacli.cli.sampling import number_options
from llamacli.cli.speculation import MTP
from llamacli.cli.text import read_file
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.hub.demo import demo_path
from llamacli.hub.personas import Persona, persona
from llamacli.util.sampling_params import PARAMETERS
from llamacli.util.settings import MAX_CONTEXT

if TYPE_CHECKING:
    from llamacli.serve.models import ModelSource
    from llamacli.serve.requests import Preset

_ALL = "*"
_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")


@attrs.frozen
class Offer:
    """Models of a server's options, to be read again.

    `named` are the models of its arguments, `pins` the names of models that stay loaded.
    """

    named: Sequence[ModelSource] = ()
    folder: Path | None = None
    presets: Path | None = None
    catalogue: Path | None = None
    pins: frozenset[str] = frozenset()

    def read(self) -> list[ModelSource]:
        """All models, the named ones first.

        A preset replaces the folder's model of its name. Raises OSError, InvalidRequestError, ModelFormatError.
        """
        found = {source.name: source for source in self.named}
        in_folder = [] if self.folder is None else folder_sources(self.folder)
        others = {source.name: source for source in in_folder}
        if self.presets is not None:
            others |= {source.name: source for source in preset_sources(self.presets, others)}
        if self.catalogue is not None:
            from llamacli.serve.catalogue import Catalogue

            others = {source.name: source for source in Catalogue(self.catalogue).sources()} | others
        taken = {name for source in self.named for name in (source.name, *source.aliases)}
        found |= {name: source for name, source in others.items() if name not in taken}
        try:
            expect_distinct(in_folder)
            expect_distinct(list(found.values()))
        except click.UsageError as error:
            raise InvalidRequestError(error.message) from None
        unknown = self.pins - {name for source in found.values() for name in (source.name, *source.aliases)}
        if unknown:
            raise InvalidRequestError(f"pin: there is no model {min(unknown)!r}")
        return [
            attrs.evolve(source, pinned=source.pinned or not self.pins.isdisjoint((source.name, *source.aliases)))
            for source in found.values()
        ]


def model_sources(
    models: Sequence[str],
    aliases: Sequence[str],
    adapters: Sequence[tuple[Path, float]] = (),
    draft: Path | Literal["mtp"] | None = None,
    mmproj: Path | None = None,
    tags: Sequence[str] = (),
) -> list[ModelSource]:
    """Models of the arguments: files or short names.

    A name and = may be before. The demo model for none. The first has the aliases, the adapters, the draft model, the
    encoder of pictures and the tags. Raises ModelFormatError for what is neither a file nor a short name, UsageError
    for a name that is there twice.
    """
    from llamacli.serve.models import ModelSource

    sources: list[ModelSource] = []
    for text in models or [f"demo={demo_path()}"]:
        name, separator, file = text.partition("=")
        if not separator or Path(text).exists():
            name, file = Path(text).stem if Path(text).exists() else text, text
        own = ((), (), None, None) if sources else (tuple(aliases), tuple(adapters), draft, mmproj)
        preset = _preset_of(persona(file))
        sources.append(ModelSource(name, Path(resolve_model(file)), *own, preset=preset))
    sources[0] = attrs.evolve(sources[0], tags=tuple(tags))
    drafts, encoders = [draft] if isinstance(draft, Path) else [], [mmproj] if mmproj else []
    for more in [*(adapter for adapter, _ in adapters), *drafts, *encoders]:
        if not more.is_file():
            raise ModelFormatError(f"{more}: no such file")
    expect_distinct(sources)
    return sources


def divided(text: str | None) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _preset_of(own: Persona | None) -> Preset | None:
    from llamacli.serve.requests import Preset

    return None if own is None else Preset(**attrs.asdict(own, filter=lambda field, _: field.name != "model"))


def expect_distinct(sources: Sequence[ModelSource]) -> None:
    """Raise UsageError for a name or alias that is there twice."""
    names = [name for source in sources for name in (source.name, *source.aliases)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise click.UsageError(f"Two models are called {twice!r}; give another name, as in NAME={twice}.gguf.")


def folder_sources(folder: Path) -> list[ModelSource]:
    """Models of a folder: GGUF files, and subfolders with one model each.

    A subfolder may have the parts of a split model, a mmproj file, or a checkpoint in safetensors. Raises OSError.
    """
    return [source for entry in sorted(folder.iterdir()) for source in _in_folder(entry)]


def _in_folder(entry: Path) -> list[ModelSource]:
    if entry.name.startswith("."):
        return []
    if entry.is_dir():
        files = [path for path in sorted(entry.glob("*.gguf")) if _is_model(path)]
        encoder = next(iter(sorted(entry.glob("mmproj*.gguf"))), None)
        if len(files) == 1:
            return [_source(entry.name, files[0], encoder)]
        is_checkpoint = (entry / "config.json").is_file() and any(entry.glob("*.safetensors"))
        return (
            [_source(entry.name, entry, None)]
            if is_checkpoint and not files
            else [_source(one.stem, one, encoder) for one in files]
        )
    return [_source(entry.stem, entry, None)] if entry.suffix == ".gguf" and _is_model(entry) else []


def _is_model(path: Path) -> bool:
    """True for a model's file, the first of several parts."""
    part = path.stem.rpartition("-of-")[0][-5:]
    is_later = path.stem[-9:-5] == "-of-" and part.isdecimal() and part != "00001"
    return path.is_file() and not is_later and not path.name.startswith("mmproj")


def _source(name: str, path: Path, mmproj: Path | None) -> ModelSource:
    from llamacli.serve.models import ModelSource

    return ModelSource(name, path, mmproj=mmproj, is_fixed=False, stamp=_stamp(path))


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


_SIZES = (
    option("-c", "--ctx-size", metavar="N", type=Integer(1, MAX_CONTEXT)),
    option("--kv-memory", metavar="SIZE", type=ByteSize()),
    option("-n", "--max-tokens", "--predict", "--n-predict", metavar="N", type=Integer(1)),
    option("-s", "--seed", metavar="N", type=Integer(0)),
    option("--keep-alive", "--sleep-idle-seconds", "keep_alive", metavar="S", type=Number(-1, 1_000_000)),
    option("--pin", is_flag=True),
)  # fmt: skip
_TEXTS = (
    option("-m", "--model", metavar="MODEL"),
    option("-hf", "-hfr", "--hf-repo", "hf_repo", metavar=REFERENCE),
    option("-a", "--alias", metavar="NAMES"),
    option("--tags", metavar="WORDS"),
    option("-md", "--model-draft", "--draft", "draft", metavar="FILE"),
    option("--chat-template", metavar="NAME"),
    option("--chat-template-file", type=PATH),
    option("--system", metavar="TEXT"),
    option("--stop", metavar="TEXT"),
)


@functools.cache
def _preset_command() -> click.Command:
    def keys(**given: Any) -> Any:
        return given

    command: Any = keys
    for add in reversed((*_TEXTS, lora_option, mmproj_option, *_SIZES, *number_options())):
        command = add(command)
    return click.command("preset", cls=Command, add_help_option=False)(command)


def preset_sources(file: Path, known: dict[str, ModelSource]) -> list[ModelSource]:
    """Models of a file of presets, in the INI form of llama-server.

    Each section is a model; its keys are options without hyphens before, those of the section `*` are defaults. One
    without `model` or `hf-repo` is of the `known` model of its name. Raises InvalidRequestError that names the file,
    the section and the key.
    """
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), default_section="")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        text = read_file(file)
        head = "" if text.lstrip().startswith("[") else "[ ]\n"
        parser.read_string(head + text, str(file))
    except configparser.Error as error:
        raise InvalidRequestError(f"{file}: not a file of presets: {' '.join(str(error).split())}") from None
    version = dict(parser[" "]) if " " in parser else {}
    if version not in ({}, {"version": "1"}):
        raise InvalidRequestError(
            f"{file}: {', '.join(version)} is outside of a section; only version = 1 may be there"
        )
    shared = dict(parser[_ALL]) if _ALL in parser else {}
    return [
        _preset(f"{file}: [{name}]", name, shared | dict(parser[name]), known.get(name))
        for name in parser.sections()
        if name not in (" ", _ALL)
    ]


def _preset(where: str, name: str, keys: dict[str, str], known: ModelSource | None) -> ModelSource:
    from llamacli.serve.requests import Preset

    try:
        given = _preset_command().main(_words(keys), standalone_mode=False)
        files = [Path(file) for file in (given["mmproj"], given["chat_template_file"]) if file]
        draft = given["draft"] if given["draft"] in (None, MTP) else Path(resolve_model(given["draft"]))
        for more in [*(Path(file) for file, _ in given["lora"]), *files]:
            if not more.is_file():
                raise ModelFormatError(f"{more}: no such file")
        if given["model"] or given["hf_repo"]:
            path = Path(resolve_model(given["model"]) if given["model"] else model_from_hub(given["hf_repo"]))
            known = _source(name, path, None)
        if known is None:
            raise InvalidRequestError("it has neither model nor hf-repo, and no other model has its name")
        template = given["chat_template"] or (read_file(files[-1]) if given["chat_template_file"] else "")
    except click.ClickException as error:
        raise InvalidRequestError(f"{where}: {error.format_message()}") from None
    except (InvalidRequestError, ModelFormatError) as error:
        raise InvalidRequestError(f"{where}: {error}") from None
    preset = Preset(
        system=given["system"] or "",
        template=template,
        sampling={field: given[field] for field in PARAMETERS if given[field] is not None},
        stop=(given["stop"],) if given["stop"] else (),
        seed=given["seed"],
        max_tokens=given["max_tokens"],
    )
    return attrs.evolve(
        known,
        aliases=divided(given["alias"]),
        tags=divided(given["tags"]),
        adapters=tuple((Path(file), scale) for file, scale in given["lora"]),
        draft=draft,
        mmproj=Path(given["mmproj"]) if given["mmproj"] else known.mmproj,
        preset=preset,
        n_ctx=given["ctx_size"],
        kv_memory=given["kv_memory"],
        keep_alive=given["keep_alive"],
        pinned=given["pin"],
    )


def _words(keys: dict[str, str]) -> list[str]:
    """Words of a command line for the keys of a section.

    Raises UsageError for an unknown key.
    """
    flags = {text.lstrip("-"): (text, param) for param in _preset_command().params for text in param.opts}
    words: list[str] = []
    for key, value in keys.items():
        text, param = flags.get(key) or flags.get(key.replace("_", "-")) or (None, None)
        if text is None or param is None:
            raise click.UsageError(f"unknown key {key!r}; the keys are {', '.join(sorted(flags))}")
        if not getattr(param, "is_flag", False):
            values = value.split(",") if param.multiple else [value]
            words += [word for one in values for word in (text, one.strip())]
        elif value.lower() in _TRUE:
            words.append(text)
        elif value.lower() not in _FALSE:
            raise click.UsageError(f"{key} must be true or false, not {value!r}")
    return words
