"""Media encoders: the interface of plugins, and encoders loaded from mmproj files.

A media encoder is an architecture whose input is the patches of a picture or of sound, and whose result is rows of
embeddings for the language model. `clip.projector_type` of a mmproj file names its plugin.
"""

from __future__ import annotations

import abc
import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.architecture import Architecture, trace
from llamacli.blocks.sound import SoundConfig
from llamacli.blocks.vision import VisionConfig
from llamacli.engine import Engine, Program, QuantMode, Span
from llamacli.errors import ClosedError, MediaError, ModelFormatError, PluginError, plugin_errors
from llamacli.gguf import Metadata, TensorInfo
from llamacli.graph import Graph
from llamacli.hub.repositories import is_encoder
from llamacli.inputs import Inputs
from llamacli.kv import KVLayout, KVPool, KVSequence, KVType
from llamacli.loaders import ModelFile, identity, open_model_file
from llamacli.media.files import digest
from llamacli.media.pictures import Picture, Pixels, unfolded
from llamacli.media.sound import SAMPLE_RATE, Mel, Samples, Sound
from llamacli.quantization import TensorType, dequantize
from llamacli.tensor_table import TensorTable, Weights
from llamacli.util.locking import fork_safe

Rows = npt.NDArray[np.float32]

KEPT_BYTES = 256 << 20
"""Size limit of the rows of embeddings that an encoder keeps, in bytes."""

LAYOUT_BYTES = 64 << 20
"""Size limit of the tiles of files that an encoder keeps, in bytes."""

Medium = Picture | Sound
"""Media that encoders read."""

_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


class MediaEncoder(Architecture):
    """Encoder of pictures, registered under its `clip.projector_type`.

    Beside the methods of an architecture it cuts a picture into tiles, and says which text stands around them. It is
    configured by a VisionConfig. Its `forward` begins with `g.patches` and ends in rows as wide as the embeddings of
    the language model.
    """

    is_bidirectional: bool = False
    """True if the tokens of a tile attend to each other in both directions in the language model."""

    has_grid: bool = False
    """True if the tokens of a tile have positions of rows and columns in the language model (M-RoPE)."""

    transposed: tuple[str, ...] = ()
    """Names of matrices that files store as (n_in, n_out)."""

    convolutions: tuple[str, ...] = ()
    """Names of convolutions, float (n_out, n_in, n_taps), whose numbers of an output are one row."""

    row_break: str = ""
    """Name of a tensor, float32 (n_embd_text,): the embedding between two rows of tokens of a tile."""

    medium: type[Medium] = Picture
    """Class of the media that it reads."""

    def configure_file(self, file: ModelFile) -> Any:
        """Hyperparameters of a file, by default from `configure`.

        For encoders whose hyperparameters are seen in the tensors only.
        """
        return self.configure(file.metadata)

    @abc.abstractmethod
    def layout(self, pixels: Any, config: Any) -> Sequence[str | Pixels | Mel]:
        """Text and tiles of a picture, in order.

        `pixels` are a picture, uint8 [height, width, 3]; so is each tile, as large as the encoder reads. Special
        tokens in the text are parsed.
        """

    def windows(self, rows: int, columns: int, config: Any) -> list[list[int]]:
        """Windows of a tile, in which attention with `spans` stays.

        Each is a list of tokens of the language model, numbered from left to right and from top to bottom; together
        they have every token once.
        """
        return []

    def size(self, tile: Any, config: Any) -> tuple[int, int]:
        """Rows and columns of tokens of a tile.

        Raises PluginError for a tile that the encoder cannot read.
        """
        side, n_patches = config.patch_size * config.n_merge, tile.shape[0] * tile.shape[1] // config.patch_size**2
        if tile.shape[0] % side or tile.shape[1] % side or not 0 < n_patches <= config.max_patches:
            raise PluginError(
                f"media encoder {self.name!r} made a tile {tile.shape}, which has no whole patches, or more than "
                f"{config.max_patches}"
            )
        return tile.shape[0] // side, tile.shape[1] // side

    def inputs(self, tile: Any, config: Any) -> tuple[Inputs, npt.NDArray[np.int64]]:
        """Patches of a tile as input, and the order of its tokens.

        The patches of each token are neighbours. Tokens, numbered from left to right and from top to bottom, are in the
        order of the encoder's windows; rows behind the patches come last.
        """
        c = config
        patches, numbers = unfolded(tile, c.patch_size, c.n_merge, c.mean, c.std)
        n, columns = len(patches), tile.shape[1] // c.patch_size
        n_rows, n_columns = self.size(tile, c)
        with plugin_errors(f"media encoder {self.name!r}"):
            windows = self.windows(n_rows, n_columns, c)
        order = np.array([token for window in windows for token in window] or range(n_rows * n_columns))
        grouped = (np.arange(n).reshape(len(order), -1)[order]).reshape(-1)
        patches, numbers = patches[grouped], numbers[grouped]
        stops = np.cumsum([len(window) * c.n_merge**2 for window in windows], dtype=np.int64).tolist()
        spans = tuple(zip([0, *stops], stops, strict=False))
        positions = np.stack([numbers, numbers // columns, numbers % columns, np.zeros_like(numbers)], -1)
        if c.n_behind:
            spans = ((0, n + 1),)
            patches = np.vstack([patches, np.zeros((c.n_behind, patches.shape[1]), np.float32)])
            positions = np.vstack([positions, np.array([[n, 0, 0, 1]] * c.n_behind, np.int32)])
        return _inputs(patches, positions, spans), order


class SoundEncoder(MediaEncoder):
    """Encoder of sound, registered under its `clip.audio.projector_type` or `clip.projector_type`.

    It is configured by a SoundConfig. Its tiles are frames of a mel spectrogram, float32 [n_frames, n_mel], of which
    `n_frames` become a patch.
    """

    medium = Sound
    n_frames: int = 2
    """Frames of a patch."""

    @abc.abstractmethod
    def layout(self, samples: Samples, config: Any) -> Sequence[str | Mel]:
        """Text and tiles of sound, in order.

        `samples` are float32 [n], 16000 a second; a tile has frames of whole patches. Special tokens in the text are
        parsed.
        """

    def positions(self, n: int, config: Any) -> npt.NDArray[np.int32]:
        """Positions of n patches of a tile, int32 [n].

        A sequence for convolutions begins at 0.
        """
        return np.arange(n, dtype=np.int32)

    def size(self, tile: Any, config: Any) -> tuple[int, int]:
        """Rows (one) and columns of tokens of a tile.

        Raises PluginError for a tile that the encoder cannot read.
        """
        n, rest = divmod(len(tile), self.n_frames * config.n_merged)
        if rest or not 0 < n * config.n_merged <= config.max_patches or tile.shape[1] != config.n_mel:
            raise PluginError(
                f"media encoder {self.name!r} made a tile {tile.shape}, which has no whole tokens, more than "
                f"{config.max_patches} patches, or not {config.n_mel} columns"
            )
        return 1, n

    def inputs(self, tile: Any, config: Any) -> tuple[Inputs, npt.NDArray[np.int64]]:
        """Patches of a tile as input, and the order of its tokens."""
        patches = tile.reshape(-1, self.n_frames * config.n_mel)
        positions = np.zeros((len(patches), 4), np.int32)
        positions[:, 0] = self.positions(len(patches), config)
        return _inputs(patches, positions, ()), np.arange(len(patches) // config.n_merged)


def _inputs(patches: Rows, positions: npt.NDArray[np.int32], spans: tuple[tuple[int, int], ...]) -> Inputs:
    n = len(patches)
    return Inputs(np.zeros(n, np.int32), [0] * n, patches, np.arange(n), positions, spans)


@attrs.frozen
class Tile:
    """A tile of a picture or sound.

    Equal if the rows of embeddings are.

    `key` is the digest of its pixels and of the encoder; `ids` are the content keys of its rows; `pixels`, of sound the
    frames of its spectrogram, are None in one that was evaluated by another process. `grid` are its rows and columns of
    tokens for M-RoPE, with `ids` at position 0, else None.
    """

    key: bytes
    ids: tuple[int, ...] = attrs.field(eq=False, repr=False)
    pixels: Pixels | Mel | None = attrs.field(eq=False, repr=False, default=None)
    grid: tuple[int, int] | None = attrs.field(eq=False, default=None)

    @property
    def n_positions(self) -> int:
        """Positions of the language model that it takes."""
        return max(self.grid) if self.grid else len(self.ids)

    def positions(self, first: int) -> npt.NDArray[np.int32] | None:
        """Positions of its rows (time, height, width), int32 [n, 3].

        They begin with `first`; None without a grid.
        """
        if self.grid is None:
            return None
        places = np.indices(self.grid, np.int32).reshape(2, -1)
        return first + np.stack([np.zeros_like(places[0]), *places], -1)

    def ids_at(self, first: int) -> tuple[int, ...]:
        """Content keys of its rows from position `first` on."""
        if self.grid is None:
            return self.ids
        return tuple(Inputs.keys_of(self.row_keys, positions=self.positions(first)))

    @property
    def row_keys(self) -> list[int]:
        """Keys of the rows, as `Inputs.of` takes them."""
        return _row_keys(self.key, len(self.ids))


class LoadedEncoder:
    """A media encoder with the weights of its file. Made by `compile_encoder`.

    - `name`: the model's name in its file, or the file's name; `projector`: its `clip.projector_type`.
    - `n_embd`: the width of its rows, with deepstack's; `is_bidirectional`: see `MediaEncoder`.
    - `config`, `metadata`: its hyperparameters, and every key of its file; `identity` is the digest of the file and the
      mode.

    Rows of pictures that were encoded last are kept. Usable from several threads at once.
    """

    def __init__(
        self,
        encoder: MediaEncoder,
        config: Any,
        metadata: Metadata,
        program: Program,
        name: str,
        id_: str,
        row_break: Rows | None = None,
    ):
        self._encoder, self.config, self.metadata, self.name, self.identity = encoder, config, metadata, name, id_
        self._row_break = row_break
        self._program: Program | None = program
        self.medium, self.projector, self.is_bidirectional = (
            encoder.medium, encoder.name, encoder.is_bidirectional and not config.causal
        )  # fmt: skip
        self.n_embd = program.graph.ops[-1].out.width
        self._pool = KVPool(KVLayout.of(program.states, KVType.of("f32")), f"{id_}-media")
        self._layouts: weakref.WeakKeyDictionary[Medium, list[str | Tile]] = weakref.WeakKeyDictionary()
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # the one used last is at the end
        self._file_layouts: OrderedDict[bytes, tuple[list[str | Tile], float]] = OrderedDict()
        self._lock, self._running = fork_safe(threading.RLock()), fork_safe(threading.Lock())

    def layout(self, medium: Medium) -> list[str | Tile]:
        """Text and tiles of a picture or sound, in order.

        Nothing is encoded. Raises MediaError if the encoder reads the other.
        """
        with self._lock:
            if medium not in self._layouts:
                self._layouts[medium] = self._layout(medium)
            return self._layouts[medium]

    def layout_of_file(self, source: bytes) -> list[str | Tile]:
        """Text and tiles of the medium in a file's bytes.

        Layouts of the last files are kept, up to `LAYOUT_BYTES`, but not what was decoded. Raises MediaError.
        """
        return self._of_file(source)[0]

    def seconds_of_file(self, source: bytes) -> float:
        """Length of the sound in a file's bytes; 0 of pictures.

        Kept with the layout. Raises MediaError.
        """
        return self._of_file(source)[1]

    def _of_file(self, source: bytes) -> tuple[list[str | Tile], float]:
        key = hashlib.blake2b(source, digest_size=32).digest()
        with self._lock:
            found = self._file_layouts.pop(key, None)
        if found is None:
            medium = self.medium.of(source)
            found = self._layout(medium), len(medium.samples) / SAMPLE_RATE if isinstance(medium, Sound) else 0.0
        with self._lock:
            self._file_layouts[key] = found
            while (
                len(self._file_layouts) > 1
                and sum(_n_bytes(layout) for layout, _ in self._file_layouts.values()) > LAYOUT_BYTES
            ):
                self._file_layouts.popitem(last=False)
        return found

    def expect(self, medium: type[Medium]) -> None:
        """Raise MediaError unless the encoder reads a medium."""
        _expect(self._encoder, self.name, medium)

    def _layout(self, medium: Medium) -> list[str | Tile]:
        content = content_of(self._encoder, self.name, medium)
        with plugin_errors(f"media encoder {self.projector!r}"):
            parts = self._encoder.layout(content, self.config)
        found: list[str | Tile] = []
        for part in parts:
            if isinstance(part, str):
                found.append(part)
                continue
            rows, columns = self._encoder.size(part, self.config)
            key = hashlib.blake2b(digest(part) + self.identity.encode(), digest_size=32).digest()
            keys = _row_keys(key, rows * columns + (rows - 1 if self._row_break is not None else 0))
            tile = Tile(key, tuple(Inputs.keys_of(keys, bidirectional=self.is_bidirectional)), part)
            if self._encoder.has_grid:
                tile = attrs.evolve(tile, grid=(rows, columns))
                tile = attrs.evolve(tile, ids=tile.ids_at(0))
            found.append(tile)
        return found

    def encode(self, tile: Tile) -> Rows:
        """Rows of embeddings of a tile, float32 [n, n_embd], read-only.

        Rows of earlier tiles are kept, up to `KEPT_BYTES`. Raises ClosedError, MemoryError.
        """
        pieces = self.encode_in_pieces(tile)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                rows: Rows = end.value
                return rows

    def encode_in_pieces(self, tile: Tile) -> Generator[None, None, Rows]:
        """Encode a tile in short pieces, after each of which it yields.

        The generator's return value are the rows, as of `encode`. Another thread that encodes waits until it has
        ended or is closed.
        """
        with self._running:
            rows = self._kept.get(tile.key)
            if rows is None:
                rows = yield from self._encoded(tile)
        with self._lock:
            self._kept[tile.key] = rows
            self._kept.move_to_end(tile.key)
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return rows

    def _encoded(self, tile: Tile) -> Generator[None, None, Rows]:
        c, program = self.config, self.program
        assert tile.pixels is not None
        inputs, order = self._encoder.inputs(tile.pixels, c)
        n, n_tokens = len(inputs.ids), len(order) + bool(c.n_behind)
        with closing(KVSequence(self._pool, n)) as sequence:
            sequence.reserve(0, n)
            pieces = program.forward_in_pieces(inputs.ids, [Span(sequence, 0, n, inputs=inputs)], [n_tokens])
            while True:
                try:
                    with np.errstate(all="ignore"):
                        next(pieces)
                except StopIteration as end:
                    rows: Rows = end.value
                    break
                yield
        rows = np.ascontiguousarray(rows[np.argsort(order) + (c.class_token == "kept")])
        if self._row_break is not None:
            _, n_columns = self._encoder.size(tile.pixels, c)
            rows = np.insert(rows, range(n_columns, len(rows), n_columns), self._row_break, axis=0)
        if not np.isfinite(rows).all():
            raise ModelFormatError(f"{self.metadata.source}: the encoder made embeddings that are not finite")
        rows.flags.writeable = False
        return rows

    @property
    def program(self) -> Program:
        """The compiled forward pass. Raises ClosedError after close()."""
        if self._program is None:
            raise ClosedError("the media encoder is closed")
        return self._program

    def close(self) -> None:
        """Free the weights and the kept rows; closing twice does nothing."""
        with self._lock:
            self._program = None
            self._kept.clear()
            self._file_layouts.clear()

    def __repr__(self) -> str:
        return f"<LoadedEncoder {self.projector}, {self.name}>"


def content_of(encoder: MediaEncoder, name: str, medium: Medium) -> Pixels | Samples:
    """Pixels of a picture, or samples of sound, for an encoder.

    Raises MediaError if the encoder, of this name, reads the other.
    """
    _expect(encoder, name, type(medium))
    return medium.pixels if isinstance(medium, Picture) else medium.samples


def _expect(encoder: MediaEncoder, name: str, medium: type[Medium]) -> None:
    if medium is not encoder.medium:
        has, lacks = ("sound", "pictures") if encoder.medium is Sound else ("pictures", "sound")
        raise MediaError(f"the encoder {name!r} is one of {has}: the model has no encoder of {lacks}")


@attrs.frozen(eq=False)
class RecordedEncoder:
    """Forward pass of an encoder; in `file` all tensors are matrices."""

    file: ModelFile
    config: Any
    table: TensorTable
    weights: Weights
    graph: Graph

    @classmethod
    def of(cls, encoder: MediaEncoder, file: ModelFile, metadata: Metadata | None = None) -> RecordedEncoder:
        """Record it, with other `metadata` than the file's if there are any.

        Raises ModelFormatError if the file does not fit the encoder, PluginError if the plugin is broken.
        """
        view = _Matrices(file, encoder, metadata or file.metadata)
        kind, what = ("audio", "sound") if encoder.medium is Sound else ("vision", "pictures")
        if not view.metadata.get_bool(f"clip.has_{kind}_encoder", default=True):
            raise ModelFormatError(f"{file.path}: clip.has_{kind}_encoder = false: it has no encoder of {what}")
        with plugin_errors(f"media encoder {encoder.name!r}"):
            config: VisionConfig | SoundConfig = encoder.configure_file(view)
            table = encoder.tensors(config)
            weights = table.bind(view)
            graph = trace(encoder, config, weights)
            graph.n_batch = config.max_patches + config.n_behind
            attends = graph.needs_whole_input or not graph.states
            if not attends or graph.recurrent or graph.n_merged != config.n_merged:
                raise PluginError("its patches must attend to each other, and be merged by its configuration's n_merge")
        if graph.ops[-1].out.width != config.n_embd_out:
            raise ModelFormatError(
                f"{file.path}: clip.{kind}.projection_dim = {config.n_embd_text}, and the projector makes rows of "
                f"{graph.ops[-1].out.width}"
            )
        return cls(view, config, table, weights, graph)


def compile_encoder(encoder: MediaEncoder, file: ModelFile, mode: QuantMode, engine: Engine) -> LoadedEncoder:
    """Compile an open mmproj file; it may be closed afterwards.

    Raises what `RecordedEncoder.of` raises.
    """
    recorded = RecordedEncoder.of(encoder, file)
    view, metadata = recorded.file, file.metadata
    with plugin_errors(f"media encoder {encoder.name!r}"):
        program = engine.compile(recorded.graph, view, mode)
    row_break = _row(view, encoder.row_break) if encoder.row_break else None
    name = metadata.get_str("general.name", "") or Path(file.path).name
    return LoadedEncoder(encoder, recorded.config, metadata, program, name, f"{identity(file)}-{mode.value}", row_break)


_SOUND = ("a.", "mm.a.")
"""Beginnings of the names of a sound encoder's tensors, which is in the same file for some models."""


class _Matrices:
    """View of a mmproj file without tensors of several dimensions.

    Convolutions (n_out, colours, height, width) are matrices of unfolded patches, tables (axes, n, n_embd) have their
    rows one below the other; `transposed` matrices are (n_out, n_in). Biases may have further dimensions of 1.
    """

    def __init__(self, file: ModelFile, encoder: MediaEncoder, metadata: Metadata):
        self._file, self.path, self.metadata = file, file.path, metadata
        self._transposed = {name for name in encoder.transposed if name in file.tensors}
        self._rows, is_sound = encoder.convolutions, encoder.medium is Sound
        seen = (info for name, info in file.tensors.items() if name.startswith(_SOUND) == is_sound)
        self.tensors: Mapping[str, TensorInfo] = {info.name: self._info(info) for info in seen}

    def _info(self, info: TensorInfo) -> TensorInfo:
        shape = info.shape
        if shape[1:] == (1,) * (len(shape) - 1) and info.name.endswith(".bias"):
            shape = shape[:1]
        elif len(shape) == 3 and info.name not in self._rows:
            shape = (shape[0] * shape[1], shape[2])
        elif len(shape) > 2:
            shape = (shape[0], int(np.prod(shape[1:])))
        if info.name in self._transposed:
            shape = shape[::-1]
        if shape != info.shape and info.type not in _FLOATS:
            kinds = ", ".join(kind.name for kind in _FLOATS)
            raise ModelFormatError(f"{self.path}: tensor {info.name} is {info.type.name}, expected one of {kinds}")
        return attrs.evolve(info, shape=shape)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of one tensor, uint8 [n_rows, row_bytes]."""
        data, shape = self._file.data(name), self.tensors[name].shape
        if name in self._transposed:
            n_out, n_in = shape
            numbers = data.reshape(n_in, n_out, -1).transpose(1, 0, 2)
            return np.ascontiguousarray(numbers).reshape(n_out, -1)
        return data.reshape(shape[0] if len(shape) > 1 else 1, -1) if shape != self._file.tensors[name].shape else data

    def release(self, name: str) -> None:
        """Free the memory of one tensor, which will hardly be read again."""
        self._file.release(name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(file: ModelFile, name: str) -> Rows:
    return dequantize(file.data(name), file.tensors[name].type).reshape(-1)


def _n_bytes(layout: Sequence[str | Tile]) -> int:
    return sum(part.pixels.nbytes for part in layout if isinstance(part, Tile) and part.pixels is not None)


def _row_keys(key: bytes, n: int) -> list[int]:
    return [int.from_bytes(key[:24], "big") << 32 | i for i in range(n)]


def projector_of(metadata: Metadata) -> str:
    """Name of the projector of a mmproj file.

    Raises ModelFormatError for another file.
    """
    architecture = metadata.get_str("general.architecture", "")
    if architecture != "clip":
        raise ModelFormatError(
            f"{metadata.source}: general.architecture = {architecture!r}: not a mmproj file, of which it is 'clip'"
        )
    keys = ("clip.vision.projector_type", "clip.audio.projector_type", "clip.projector_type")
    return metadata.get_str(next((key for key in keys if key in metadata), keys[-1]))


def find_mmproj(path: Path, n_embd: int) -> ModelFile | None:
    """Open the mmproj file in a model's folder, None without one.

    `path` is the model's file. A file of the hub's cache has the root of its repository as a second folder, and a blob
    of ollama's the projectors of its manifests. Of several, the one whose embeddings have `n_embd` numbers. Raises
    ModelFormatError if there are several of these, or the only one is unreadable.
    """
    files = _mmproj_files(path)
    if len(files) == 1:
        return open_model_file(files[0], [])
    fitting = []
    for file in files:
        with closing(open_model_file(file, [])) as opened:
            if n_embd in (opened.metadata.get(f"clip.{kind}.projection_dim") for kind in ("vision", "audio")):
                fitting.append(file)
    if len(fitting) > 1:
        names = ", ".join(file.name for file in fitting)
        raise ModelFormatError(f"{path.parent}: several mmproj files fit {path.name}: {names}; name one by `mmproj`")
    return open_model_file(fitting[0], []) if fitting else None


def _mmproj_files(path: Path) -> list[Path]:
    if path.parent.name == "blobs" and path.name.startswith("sha256-"):
        return _projectors(path)
    roots = (folder for folder in path.parents if folder.parent.name == "snapshots")
    for folder in (path.parent, *roots):
        if found := sorted(other for other in folder.iterdir() if is_encoder(other.name) and other != path):
            return found
    return []


def _projectors(blob: Path) -> list[Path]:
    found = set()
    for manifest in (blob.parents[1] / "manifests").rglob("*"):
        try:
            layers = json.loads(manifest.read_bytes())["layers"]
            files = [(layer["mediaType"].rpartition(".")[2], layer["digest"].replace(":", "-")) for layer in layers]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if ("model", blob.name) in files:
            found |= {blob.parent / name for kind, name in files if kind == "projector" and "/" not in name}
    return sorted(found)
