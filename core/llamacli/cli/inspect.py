"""`llamacli inspect`: metadata and tensors of a model file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.command import Command
from llamacli.cli.hub import resolve_model
from llamacli.cli.options import PATH, global_options, option
from llamacli.cli.output import human_bytes, human_count, print_field, print_json, print_table, printable
from llamacli.cli.plot import ImagePath, plot_sizes
from llamacli.cli.progress import working

if TYPE_CHECKING:
    from llamacli.gguf import Metadata
    from llamacli.loaders import ModelFile
    from llamacli.plugins import Plugins

SHOWN_ITEMS = 4
SHOWN_CHARACTERS = 80

_SIZES = {
    "context length": "context_length",
    "layers": "block_count",
    "embedding": "embedding_length",
    "feed-forward": "feed_forward_length",
    "heads": "attention.head_count",
    "heads (k, v)": "attention.head_count_kv",
    "experts": "expert_count",
    "experts used": "expert_used_count",
}


@click.command(cls=Command)
@click.argument("model", type=PATH)
@option("--tensors", is_flag=True, help="List all tensors; shapes as in NumPy, rows first.")
@option("--full", is_flag=True, help="Print long strings and arrays in full.")
@option("--replies", is_flag=True, help="Show the markers of reasoning and tool calls in replies.")
@option("--json", is_flag=True, help="Print JSON.")
@option("--plot", type=ImagePath(), help="Plot sizes by type and layer to a PNG, SVG or PDF file. Needs matplotlib.")
@global_options
def inspect(model: str, tensors: bool, full: bool, replies: bool, json: bool, plot: str | None) -> None:
    """Show metadata, tensors and plugin of a model file.

    Also works for files that no plugin can load and for files with a vocabulary only. Tensor data is not read.
    """
    with working("reading the file"):
        from llamacli.loaders import open_model_file
        from llamacli.plugins import installed_plugins

        installed = installed_plugins()
        file = open_model_file(resolve_model(model), installed.loaders())
    try:
        with working("looking for its plugin"):
            summary = _summary(file, installed)
            if replies:
                summary["replies"] = _reply_syntax(file.metadata)
        if plot is not None:
            plot_sizes(f"{file.path.name}: {human_bytes(_n_bytes(file))}", file.tensors.values(), plot)
        if json:
            print_json(summary | _contents(file, tensors, full))
        else:
            _print_summary(summary, file.metadata)
            if tensors:
                _print_tensors(file)
            click.echo(f"\nmetadata ({len(file.metadata)} keys)")
            for key, value in file.metadata.items():
                click.echo(f"  {printable(key)} = {_brief(value, full)}")
    finally:
        file.close()


def _summary(file: ModelFile, plugins: Plugins) -> dict[str, Any]:
    from llamacli.gguf import GGUFFile

    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    types: dict[str, dict[str, int]] = {}
    for info in file.tensors.values():
        kind = types.setdefault(info.type.name, {"n_tensors": 0, "n_bytes": 0})
        kind["n_tensors"] += 1
        kind["n_bytes"] += info.n_bytes
    plugin, variant, error = _resolve(file, plugins)
    return {
        "path": str(file.path),
        "format": f"GGUF v{file.version}" if isinstance(file, GGUFFile) else None,
        "n_bytes": _n_bytes(file),
        "architecture": _text(metadata, "general.architecture"),
        "name": _text(metadata, "general.name"),
        "plugin": plugin,
        "variant": variant,
        "error": error,
        "n_params": sum(math.prod(info.shape) for info in file.tensors.values()),
        "n_tensors": len(file.tensors),
        "tensor_types": dict(sorted(types.items(), key=lambda kind: -kind[1]["n_bytes"])),
        "tokenizer": _text(metadata, "tokenizer.ggml.model"),
        "n_vocab": len(tokens) if isinstance(tokens, Sequence) else 0,
    }


def _n_bytes(file: ModelFile) -> int:
    from llamacli.gguf import GGUFFile

    return file.n_bytes if isinstance(file, GGUFFile) else file.path.stat().st_size


def _text(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _resolve(file: ModelFile, plugins: Plugins) -> tuple[dict[str, str] | None, list[str], str | None]:
    """Plugin of the file, features of the model, load error or None."""
    from llamacli.architecture import HeadArchitecture, configured, trace, trace_nextn
    from llamacli.errors import LlamaCliError, plugin_errors
    from llamacli.tools.features import features

    plugin = None
    try:
        architecture = plugins.resolve(file.metadata)
        plugin = _origin(type(architecture).__module__, architecture.name, plugins)
        if not file.tensors:
            return plugin, [], "the file has no tensors, only a vocabulary"
        with plugin_errors(f"architecture {architecture.name!r}"):
            config = configured(architecture, file)
            table = architecture.tensors(config)
            weights = table.bind(file)
            if isinstance(architecture, HeadArchitecture):
                return plugin, [], "it is a draft head, for the --draft of its model"
            graph = trace(architecture, config, weights)
    except LlamaCliError as error:
        return plugin, [], str(error)
    found = features(graph)
    if table.has_nextn and any(".nextn." in name for name in file.tensors):
        try:
            with plugin_errors(f"architecture {architecture.name!r}"):
                head = trace_nextn(architecture, config, table.bind(file, nextn=True))
        except LlamaCliError:
            found.append("incomplete multi-token-prediction head")
        else:
            found += ["multi-token-prediction head"] if head else []
    return plugin, found, None


def _reply_syntax(metadata: Metadata) -> str | None:
    from llamacli.chat.channels import Channels
    from llamacli.chat.codec import ChatCodec
    from llamacli.chat.syntax import Spans
    from llamacli.errors import LlamaCliError
    from llamacli.plugins import installed_plugins
    from llamacli.tokenizer import tokenizer_from_metadata

    if "tokenizer.chat_template" not in metadata:
        return None
    try:
        codec = ChatCodec(tokenizer_from_metadata(metadata), metadata, installed_plugins().chat_formats())
    except LlamaCliError as error:
        return f"cannot be read: {error}"
    syntax, texts = codec.syntax, [codec.format.name]
    if isinstance(syntax, Spans) and syntax.reasoning:
        texts.append(f"reasoning {syntax.reasoning.opens} {syntax.reasoning.closes}")
    if isinstance(syntax, Spans) and syntax.calls:
        kind = getattr(syntax.calls.parse, "one", "by hand")
        texts.append(f"calls {syntax.calls.opens} {syntax.calls.closes} {kind}")
    if isinstance(syntax, Channels):
        kind = getattr(syntax.calls.parse, "one", "by hand") if syntax.calls else "arguments in JSON"
        texts += [f"reasoning {' '.join(syntax.thought_markers)}"] if syntax.thought else []
        texts.append(f"calls {syntax.recipient}NAME{syntax.begins} {kind}")
    return "; ".join(texts)


def _fingerprint(template: object) -> str | None:
    if not isinstance(template, str):
        return None
    return f"{len(template)} characters, SHA-256 {hashlib.sha256(template.encode()).hexdigest()[:16]}..."


def _origin(module: str, architecture: str, plugins: Plugins) -> dict[str, str]:
    for entry in plugins.claimed_architectures().get(architecture, ()):
        if entry.dist is not None:
            return {"module": entry.module, "distribution": entry.dist.name, "version": entry.dist.version}
    for info in plugins.infos():
        if f"{module}.".startswith(f"{info.module}."):
            return {"module": info.module, "distribution": info.distribution, "version": info.version}
    return {"module": module, "distribution": "", "version": ""}


def _contents(file: ModelFile, tensors: bool, full: bool) -> dict[str, Any]:
    metadata = {key: _json_value(value, full) for key, value in file.metadata.items()}
    if not tensors:
        return {"metadata": metadata}
    listed = [
        {"name": info.name, "shape": info.shape, "type": info.type.name, "n_bytes": info.n_bytes}
        for info in file.tensors.values()
    ]
    return {"metadata": metadata, "tensors": listed}


def _print_summary(summary: Mapping[str, Any], metadata: Metadata) -> None:
    def line(label: str, value: object) -> None:
        if value is not None:
            print_field(label, str(value))

    line("file", summary["path"])
    line("format", summary["format"])
    line("size", human_bytes(summary["n_bytes"]))
    line("architecture", summary["architecture"])
    line("name", summary["name"])
    plugin = summary["plugin"]
    line("plugin", plugin and f"{plugin['module']} ({plugin['distribution']} {plugin['version']})")
    line("variant", "; ".join(summary["variant"]) or None)
    line("cannot run", summary["error"])
    line("parameters", human_count(summary["n_params"]))
    for label, key in _SIZES.items():
        value = metadata.get(f"{summary['architecture']}.{key}")
        line(label, None if value is None else _brief(value, False))
    line("vocabulary", f"{summary['n_vocab']} tokens ({summary['tokenizer']})")
    line("chat template", _fingerprint(metadata.get("tokenizer.chat_template")))
    line("replies", summary.get("replies"))
    line("tensors", summary["n_tensors"])
    kinds = summary["tensor_types"].items()
    rows = [(name, str(kind["n_tensors"]), human_bytes(kind["n_bytes"])) for name, kind in kinds]
    if rows:
        print_table(("type", "tensors:", "size:"), rows, indent="  ")


def _print_tensors(file: ModelFile) -> None:
    click.echo()
    infos = file.tensors.values()
    rows = [(info.name, " x ".join(map(str, info.shape)), info.type.name, str(info.n_bytes)) for info in infos]
    print_table(("tensor", "shape:", "type", "bytes:"), rows)


def _brief(value: Any, full: bool) -> str:
    if isinstance(value, str):
        length = "" if full or len(value) <= SHOWN_CHARACTERS else f" ({len(value)} characters)"
        return f"{_shortened(value) if length else printable(value)}{length}"
    if isinstance(value, bool | int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if full or len(value) <= SHOWN_ITEMS:
        return f"[{', '.join(_brief(item, full) for item in _items(value, len(value)))}]"
    shown = [
        _shortened(item, 16) if isinstance(item, str) else _brief(item, full) for item in _items(value, SHOWN_ITEMS)
    ]
    return f"[{', '.join(shown)}, ...] ({len(value)} items)"


def _shortened(text: str, length: int = SHOWN_CHARACTERS) -> str:
    return printable(text) if len(text) <= length else f"{printable(text[:length])}..."


def _json_value(value: Any, full: bool) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if full or len(value) <= SHOWN_ITEMS:
        return _items(value, len(value))
    return {"length": len(value), "first": _items(value, SHOWN_ITEMS)}


def _items(value: Any, n: int) -> list[Any]:
    first = value[:n]
    return first.tolist() if hasattr(first, "tolist") else list(first)
