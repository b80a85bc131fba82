"""Tiny model files of an architecture, one for each variant.

A variant is a writer `write(path, **options)`, its options, and the bound of the NMSE of fp32 mode against llama.cpp:
tests of plugins have a dict of them by name, `VARIANTS`.
"""

from __future__ import annotations

import fnmatch
import functools
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.architecture import Architecture, Config, trace
from llamacli.engine import Engine, Program, QuantMode, ReferenceEngine
from llamacli.engine.native import NativeEngine
from llamacli.errors import PluginError
from llamacli.gguf import Metadata, TensorInfo, open_gguf
from llamacli.gguf.writer import write_gguf
from llamacli.graph import Graph
from llamacli.loaders import ModelFile, open_model_file
from llamacli.media.encoder import LoadedEncoder, MediaEncoder, RecordedEncoder, compile_encoder, projector_of
from llamacli.model import Model, load_model
from llamacli.plugins import Plugins
from llamacli.quantization.tensor_types import TensorType, nbytes
from llamacli.tensor_table import TensorTable, Weights
from llamacli.testing.models import write_model
from llamacli.testing.tiny_media import Rows, embeddings, made, sizes_of, write_mmproj
from llamacli.testing.vocabularies import vocabulary, vocabulary_size

Variant = tuple[Callable[..., Path], Mapping[str, Any], float | None]
"""Writer, options, and bound of the NMSE of fp32 mode against llama.cpp; None if llama.cpp does not run it."""

KEYS: Mapping[str, Any] = {
    "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
"""Keys of a tiny decoder, without the architecture's name in front."""

_KEPT_MODELS = 32
"""Models that stay loaded: check by check, all variants of an architecture come again."""


def write_architecture(
    path: str | Path,
    *,
    architecture: Architecture,
    keys: Mapping[str, Any] | None = None,
    optional: bool = True,
    fused: bool = False,
    n_nextn: int = 0,
    tokenizer: str = "test",
    metadata: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a random file with the tensors of an architecture's own table.

    Returns its path. `keys` are added to `KEYS`, both without the architecture's name in front; None leaves one out.
    With or without `optional` tensors, with parameters `fused` that may be, and with `n_nextn` blocks of
    multi-token-prediction heads behind the others. The rest is as in `write_model`. Raises ModelFormatError if the
    architecture cannot be configured with these keys.
    """
    named = {**KEYS, **(keys or {})}
    if n_nextn:
        named |= {"block_count": named["block_count"] + n_nextn, "nextn_predict_layers": n_nextn}
    prefixed = {f"{architecture.name}.{key}": value for key, value in named.items()}
    known = {key: value for key, value in {**prefixed, **(metadata or {})}.items() if value is not None}
    common = {"general.architecture": architecture.name, f"{architecture.name}.vocab_size": vocabulary_size(tokenizer)}
    values = Metadata({**common, **vocabulary(tokenizer), **known}, str(path))
    shapes = architecture.tensors(architecture.configure(values)).shapes(
        optional=optional, fused=fused, nextn=n_nextn > 0
    )
    used = {
        key: value for key, value in prefixed.items() if key in values.consumed or key.split(".", 1)[1] in (keys or {})
    }
    options = {"tokenizer": tokenizer, "metadata": metadata, "seed": architecture.name} | rest
    return write_model(path, architecture.name, used, shapes, **options)


def own_variants(architecture: Architecture) -> dict[str, Variant]:
    """Variants of an architecture's own table: all tensors, required ones, fused."""
    choices = {"all": {}, "required": {"optional": False}, "fused": {"fused": True}}
    if isinstance(architecture, MediaEncoder):
        return {
            name: (write_mmproj, {"architecture": architecture} | options, None) for name, options in choices.items()
        }
    return {
        name: (write_architecture, {"architecture": architecture} | options, 1e-8) for name, options in choices.items()
    }


@attrs.frozen(eq=False)
class TinyModel:
    """Tiny model file of an architecture.

    `exact` is the bound of the NMSE of fp32 mode against llama.cpp, None if llama.cpp does not run it. `inert` are
    patterns of tensors that cancel out, `unread` patterns of keys that are not read.
    """

    architecture: Architecture
    name: str
    path: Path
    exact: float | None
    inert: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """Beginning of the names of the architecture's keys."""
        return f"{self.architecture.name}."

    @property
    def read_besides(self) -> set[str]:
        """Names of tensors that are read outside of the forward pass."""
        return set()

    def is_inert(self, tensor: str) -> bool:
        """True if a tensor cannot change the logits."""
        names = (tensor, f"{self.name}:{tensor}")
        return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in self.inert)

    @functools.cached_property
    def is_encoder(self) -> bool:
        """True if it attends in both directions, without sessions."""
        try:
            return self.recorded()[3].needs_whole_input
        except Exception:
            return False  # a check will say why

    @property
    def metadata(self) -> Metadata:
        """Metadata of the file, of which nothing has been read."""
        return Metadata(dict(self.file.metadata), str(self.path))

    @functools.cached_property
    def file(self) -> ModelFile:
        """The open file."""
        return open_model_file(self.path, [])

    def recorded(self, metadata: Metadata | None = None) -> tuple[Config, TensorTable, Weights, Graph]:
        """Configuration, table, weights and graph of the file."""
        config = self.architecture.configure(metadata or self.metadata)
        table = self.architecture.tensors(config)
        weights = table.bind(self.file)
        return config, table, weights, trace(self.architecture, config, weights)

    def load(self, mode: str = "fp32", *, threads: int = 1, reference: bool = False) -> Model:
        """Load the file, on kernels or as `reference`; recent models are kept."""
        key = self.path, mode, threads, reference
        if key not in _models:
            engine = ReferenceEngine() if reference else NativeEngine(threads)
            _models[key] = load_model(self.path, QuantMode(mode), plugins=Plugins.of(self.architecture), engine=engine)
            if len(_models) > _KEPT_MODELS:
                _models.popitem(last=False)[1].close()
        _models.move_to_end(key)
        return _models[key]

    def __str__(self) -> str:
        return f"{self.architecture.name}, variant {self.name}"


class TinyEncoder(TinyModel):
    """Tiny mmproj file of a media encoder."""

    is_encoder = True
    prefix = "clip."

    @property
    def encoder(self) -> MediaEncoder:
        """The media encoder."""
        return cast(MediaEncoder, self.architecture)

    @property
    def read_besides(self) -> set[str]:
        """Name of the embedding between rows of tokens, if any."""
        return {self.encoder.row_break} - {""}

    @functools.cached_property
    def file(self) -> ModelFile:
        """The open file, its tensors as matrices."""
        return RecordedEncoder.of(self.encoder, self._source).file

    @functools.cached_property
    def _source(self) -> ModelFile:
        return open_model_file(self.path, [])

    @property
    def metadata(self) -> Metadata:
        """Metadata of the file, of which nothing has been read."""
        return Metadata(dict(self._source.metadata), str(self.path))

    def recorded(self, metadata: Metadata | None = None) -> tuple[Config, TensorTable, Weights, Graph]:
        """Configuration, table, weights and graph of the file."""
        metadata = metadata or self.metadata
        projector_of(metadata)
        found = RecordedEncoder.of(self.encoder, self._source, metadata)
        return found.config, found.table, found.weights, found.graph

    def load_encoder(self, mode: QuantMode, engine: Engine) -> LoadedEncoder:
        """Load the file; the caller closes it."""
        return compile_encoder(self.encoder, self._source, mode, engine)

    def rows(self, mode: str = "fp32", *, threads: int = 1, reference: bool = False) -> Rows:
        """Embeddings of all pictures or sounds of `sizes_of`, float32 [n, width]."""
        engine = ReferenceEngine() if reference else NativeEngine(threads)
        with closing(self.load_encoder(QuantMode(mode), engine)) as loaded:
            return self._embeddings(loaded)

    def rows_of(self, program: Program) -> Rows:
        """Embeddings of the same by another program of the graph."""
        with closing(self.load_encoder(QuantMode.FP32, ReferenceEngine())) as loaded:
            loaded._program = program
            return self._embeddings(loaded)

    def _embeddings(self, loaded: LoadedEncoder) -> Rows:
        return embeddings(loaded, map(made, sizes_of(self.encoder).values()))


_EXACT = (TensorType.F32, TensorType.F64, TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64)


def rounded_types(path: Path) -> list[str]:
    """Names of a file's tensor types other than float32 and integers."""
    with open_gguf(path) as file:
        return sorted({info.type.name for info in file.tensors.values() if info.type not in _EXACT})


def write_float32(source: Path, path: Path) -> Path:
    """Write a copy of a file with tensors of `rounded_types` as float32."""
    with open_gguf(source) as file, path.open("wb") as out:
        infos = [
            info
            if info.type in _EXACT
            else attrs.evolve(info, type=TensorType.F32, n_bytes=nbytes(TensorType.F32, info.shape), offset=0)
            for info in file.tensors.values()
        ]

        def data(info: TensorInfo) -> list[npt.NDArray[Any]]:
            kept = file.tensors[info.name].type is info.type
            return [file.data(info.name) if kept else np.ascontiguousarray(file.tensor(info.name))]

        write_gguf(out, [file.pair(key) for key in file.metadata], infos, data, alignment=file.alignment)
    return path


_models: OrderedDict[tuple[Path, str, int, bool], Model] = OrderedDict()


class Family:
    """Tiny models of an architecture, written when they are first needed."""

    def __init__(
        self,
        architecture: Architecture,
        variants: Mapping[str, Variant] | None = None,
        inert: Sequence[str] = (),
        unread: Sequence[str] = (),
    ):
        self.architecture, self._inert, self._unread = architecture, tuple(inert), tuple(unread)
        self._variants = own_variants(architecture) if variants is None else variants

    @functools.cached_property
    def models(self) -> list[TinyModel]:
        """Tiny models of the architecture's variants; PluginError without any."""
        found = [model for name, variant in self._variants.items() for model in self._written(name, variant)]
        if not found:
            raise PluginError(f"none of the variants is a file of architecture {self.architecture.name!r}")
        return found

    @functools.cached_property
    def distinct(self) -> list[TinyModel]:
        """Models of different structure: other ops, or other tensors."""
        return list({_structure(model): model for model in reversed(self.models)}.values())[::-1]

    def _written(self, name: str, variant: Variant) -> Iterator[TinyModel]:
        write, options, exact = variant
        other, is_media = options.get("architecture"), isinstance(self.architecture, MediaEncoder)
        if isinstance(other, str) and other != self.architecture.name:
            return
        if isinstance(other, Architecture) and isinstance(other, MediaEncoder) != is_media:
            return
        path = _write(write, name, options)
        with open_gguf(path) as file:
            key = "clip.projector_type" if is_media else "general.architecture"
            if file.metadata.get(key) == self.architecture.name:
                yield self._kind(self.architecture, name, path, exact, self._inert, self._unread)

    @property
    def _kind(self) -> type[TinyModel]:
        return TinyEncoder if isinstance(self.architecture, MediaEncoder) else TinyModel


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="llamacli-tiny-"))
    weakref.finalize(write_model, shutil.rmtree, folder, ignore_errors=True)
    return folder


_written: dict[tuple[object, ...], tuple[Path, object]] = {}
"""Files by writer, name and identity of options, with these options: so their identities are not used again."""


def _write(write: Callable[..., Path], name: str, options: Mapping[str, Any]) -> Path:
    key = (write, name, *((option, id(options[option])) for option in sorted(options)))
    if key not in _written:
        path = _folder() / f"{len(_written)}-{name}.gguf"
        write(path, **options)
        _written[key] = path, dict(options)
    return _written[key][0]


def _structure(model: TinyModel) -> object:
    try:
        _, _, _, graph = model.recorded()
    except Exception:
        return model.path  # a check will say why
    tensors = tuple(sorted((name, info.shape) for name, info in model.file.tensors.items()))
    numbers = tuple(
        repr([getattr(op, field.name) for field in attrs.fields(type(op)) if _plain(op, field)]) for op in graph.ops
    )
    return tensors, tuple(type(op) for op in graph.ops), numbers


def _plain(op: object, field: Any) -> bool:
    return not hasattr(getattr(op, field.name), "graph")
