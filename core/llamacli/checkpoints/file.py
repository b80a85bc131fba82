"""Hugging Face checkpoint as a model file with GGUF keys and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

import gguf
from llamacli.checkpoints.folder import Folder
from llamacli.checkpoints.keys import configured_keys, general_keys, settings_of, value_of
from llamacli.checkpoints.layout import Array, Checkpoint, Conversion, Settings, Shape
from llamacli.checkpoints.safetensors import as_float
from llamacli.errors import ModelFormatError
from llamacli.gguf import TensorInfo, metadata_pair, packed_header, parse_header
from llamacli.quantization import TensorType, nbytes, quantize
from llamacli.util.files import read_json

_SHOWN = 8
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_NUMBERED = re.compile(r"(.*(?:\.(?:chunk_)?experts|\.moe|\.norms|_projections))\.(\d+)\.(.+)")
"""Names of tensors that are stacked, after renamings too: matrices of experts, norms of heads, projections."""

_EXPERTS = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
"""Fields of config.json that the number of experts may have."""

_SKIPPED = re.compile(
    r"^(mlp|vit\.|vpm\.|siglip2\.|conformer\.|merger\.|resampler\.|sound_encoder\.|sound_projection\.|speech_embeddings\.)"
    r"|visual\.|vision[._]|audio[._]|talker\.|token2wav\.|code2wav\.|projector\.|pre_mm_projector_norm|image_newline"
    r"|view_seperator|patch_embed|patch_merger\.|patch_merge_mlp\.|model\.connector\."
    r"|\.attention\.(masked_bias|bias)$|\.rotary_emb\.inv_freq$"
)
"""Tensors of other modalities, and those that nothing depends on; llama.cpp's converter leaves out the same."""

_ALWAYS_F32 = frozenset(
    f"{name}.weight"
    for name in (
        "ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types", "ssm_conv1d", "shortconv.conv",
        "time_mix_first", "time_mix_w1", "time_mix_w2", "time_mix_decay_w1", "time_mix_decay_w2",
        "time_mix_lerp_fused", "altup_correct_coef", "altup_predict_coef", "ssm_conv1d_q", "ssm_conv1d_k",
        "ssm_conv1d_v", "indexer.proj", "indexer.q_proj", "indexer.k_proj",
    )
)  # fmt: skip
"""Matrices that are float32 in all files, by their names in a block."""

_MATRICES = ".weight", ".lora_a", ".lora_b"
"""Ends of the names of matrices."""

FILE_TYPES = {TensorType.F32: 0, TensorType.F16: 1, TensorType.BF16: 32}
_MXFP4_FILE = 38
_MXFP4 = {"_blocks": "_scales", ".weight_packed": ".weight_scale", ".weight": ".scale"}
"""Ends of the names of matrices of 4-bit floats, and of their scales, one byte for 32."""
_PACKED = "|".join(f"{re.escape(end)}$" for end in _MXFP4)
_NATIVE = {"F16": TensorType.F16, "BF16": TensorType.BF16}


@attrs.frozen
class _Source:
    """Where a tensor of the file comes from.

    `names` are the checkpoint's, of experts that are stacked if `stacked`; `part` of `n_parts` below each other,
    or every `n_parts`th row from `part` on if they are `mixed`. `scales` are the names of those of MXFP4 blocks.
    """

    names: tuple[str, ...]
    shape: Shape
    stacked: bool = False
    part: int = 0
    n_parts: int = 1
    mixed: bool = False
    scales: tuple[str, ...] = ()
    conversion: Conversion | None = None
    values: npt.NDArray[np.float32] | None = attrs.field(default=None, eq=False)


class CheckpointFile:
    """A Hugging Face checkpoint as an open model file.

    Matrices have the type `kind`, by default that of the first one of the checkpoint in bfloat16 or float16, else
    float32. Tensors are converted one at a time, when read. `base` are folder and layout of the model of a draft head.
    Raises ModelFormatError naming file, field or tensor.
    """

    alignment = 32

    def __init__(
        self,
        folder: Folder,
        checkpoint: Checkpoint,
        kind: TensorType | None = None,
        base: tuple[Folder, Checkpoint] | None = None,
    ):
        self.path, self._folder, self._checkpoint = folder.path, folder, checkpoint
        self._config_path = f"{folder.path}/config.json"
        config = folder.config | {"tensor_names": tuple(folder.entries), "pooling": folder.pooling}
        config |= {"modules": folder.modules, "numbers": folder.numbers}
        config["shapes"] = {name: entry.shape for name, entry in folder.entries.items()}
        config["generation"] = read_json(folder.path / "generation_config.json")
        config["base"] = base[0].config if base else {}
        self._settings = settings_of(config, checkpoint, self._config_path)
        self._drop = value_of(checkpoint.drop, self._settings, self._config_path)
        self._float32 = _ALWAYS_F32.union(value_of(checkpoint.float32, self._settings, self._config_path))
        configured = configured_keys(self._settings, checkpoint, self._config_path)
        self._packed = self._of_four_bits()
        self._scales = self._quantized()
        n_layer = configured.get(f"{checkpoint.architecture}.block_count")
        if not isinstance(n_layer, int):
            raise ModelFormatError(f"{self._config_path}: num_hidden_layers is missing")
        self._sources = dict(self._targets(n_layer))
        self.kind = self._native() if kind is None else kind
        self.tensors = {name: self._info(name, source) for name, source in self._sources.items()}
        keys = general_keys(
            folder.path, checkpoint.architecture, {name: info.shape for name, info in self.tensors.items()},
            FILE_TYPES[self.kind] if self.file_type == self.kind.name else _MXFP4_FILE,
        )  # fmt: skip
        keys |= configured
        keys |= self._vocabulary(base) if checkpoint.vocabulary else {}
        keys = {key: value for key, value in keys.items() if value is not None}
        self._pairs = {key: metadata_pair(key, value) for key, value in keys.items()}
        header = packed_header(list(self._pairs.values()), [])
        self.metadata = parse_header(header, str(folder.path)).metadata
        self.paths = [folder.path / "config.json", *folder.files] if folder.has_config else list(folder.files)

    @property
    def file_type(self) -> str:
        """Name of the file's type, as `llamacli.conversion.file_type` takes it."""
        return "MXFP4_MOE" if any(source.scales for source in self._sources.values()) else self.kind.name

    def _vocabulary(self, base: tuple[Folder, Checkpoint] | None) -> dict[str, Any]:
        from llamacli.gguf.tokens import TokenKind
        from llamacli.tokenizer.hugging_face import vocabulary_keys  # slow to import, not for plugin lists

        path, checkpoint, settings = self.path, self._checkpoint, self._settings
        if base:
            path, checkpoint = base[0].path, base[1]
            settings = settings_of(base[0].config, checkpoint, f"{path}/config.json")
        n_vocab = settings.get("vocab_size")
        if "text_vocab_size" in settings:
            settings = settings | {"vocab_size": settings["text_vocab_size"]}
        if isinstance(n_vocab, int) and "pad_vocab_size_multiple" in checkpoint.defaults:
            settings = settings | {"vocab_size": n_vocab + -n_vocab % settings["pad_vocab_size_multiple"]}
        kind, keys = vocabulary_keys(path, settings, checkpoint.vocabulary, checkpoint.pre)
        for i, text in enumerate(keys["tokenizer.ggml.tokens"] if checkpoint.user_defined else ()):
            if text in checkpoint.user_defined:
                keys["tokenizer.ggml.token_type"][i] = int(TokenKind.USER_DEFINED)
        tokenizer = read_json(path / "tokenizer_config.json")
        layouts = [(checkpoint, settings, path)]
        if base:
            layouts.append((self._checkpoint, self._settings, self.path))
        for layout, fields, folder in layouts:
            given = {**fields, "folder": folder, "vocabulary": keys}
            keys |= value_of(partial(layout.tokenizer, kind, tokenizer), given, f"{folder}: tokenizer")
        return keys

    # --- tensors ---

    def _quantized(self) -> dict[str, str]:
        """Names of scales by the names of their float8 matrices."""
        quantization = self._folder.raw.get("quantization_config") or {}
        entries, of_blocks = self._folder.entries, set(self._packed.values())
        found = {
            name.removesuffix(suffix): name
            for suffix in ("_scale_inv", "_scale")
            for name in entries
            if name not in of_blocks
            if name.endswith(f".weight{suffix}") or (name.endswith(f"_proj{suffix}") and "experts" in name)
        }
        for name in entries:
            if name.endswith(".weight") and entries[name].dtype.startswith("F8_"):
                scale = f"{name.removesuffix('weight')}scale"
                found |= {name: scale} if scale in entries else {}
        for name, scale in found.items():
            if name not in entries:
                raise ModelFormatError(f"{entries[scale].path}: tensor {scale!r} has no {name!r} beside it")
            self._expect_blocks(entries[name].shape, scale)
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method not in (None, "fp8", "mxfp4") and not (method == "compressed-tensors" and (found or self._packed)):
            raise ModelFormatError(
                f"{self._config_path}: quantization_config.quant_method is {method!r}: only unquantized, FP8 "
                "and MXFP4 checkpoints are read; take the original checkpoint, or a GGUF file"
            )
        for name, entry in entries.items():
            if entry.dtype.startswith("F8_E4M3") and name not in found:
                raise ModelFormatError(
                    f"{entry.path}: tensor {name!r} is float8 without scales, such as {name}_scale_inv"
                )
        return found

    def _block(self) -> tuple[int, ...]:
        """Rows and columns of float8 matrices that share a scale, or ()."""
        quantization = self._folder.raw.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if not block:
            return ()
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise ModelFormatError(
                f"{self._config_path}: quantization_config.weight_block_size is {block!r}: expected rows and columns"
            )
        return tuple(block)

    def _expect_blocks(self, shape: Shape, scale: str) -> None:
        found, block = self._folder.entries[scale].shape, self._block()
        if block and len(found) == len(shape) > 1:
            *rest, n_rows, n_columns = shape
            expected = (*rest, -(-n_rows // block[0]), -(-n_columns // block[1]))
            if found != expected:
                raise ModelFormatError(
                    f"{self._where(scale)} has the shape {found}: expected {expected} for a matrix of {shape} in "
                    f"blocks of {block}"
                )

    def _targets(self, n_layer: int) -> Iterator[tuple[str, _Source]]:
        checkpoint = self._checkpoint
        names = Names(checkpoint, self._settings, n_layer, self._config_path)
        single: dict[str, tuple[str, ...]] = {}
        experts: dict[str, dict[int, str]] = {}
        packed = self._packed
        scales = {*self._scales.values(), *packed.values()}
        for name in self._folder.entries:
            if name in scales or name.endswith((".input_scale", ".k_scale", ".v_scale")) or self._is_left_out(name):
                continue
            plain = re.sub(_PACKED, ".weight", name) if name in packed else name
            if match := _NUMBERED.fullmatch(plain):
                experts.setdefault(names.plain(f"{match[1]}.{match[3]}"), {})[int(match[2])] = name
            elif match := _NUMBERED.fullmatch(plain := names.plain(plain)):
                experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
            else:
                single[plain] = (name,)
        stacks = {plain: self._numbered(plain, found) for plain, found in experts.items()}
        for plain, originals in (single | stacks).items():
            is_packed, mixed, stacked = originals[0] in packed, checkpoint.mixed, plain in stacks
            shape = self._shape_of(originals, stacked)
            of_scales = tuple(packed[name] for name in originals if name in packed)
            if len(of_scales) not in (0, len(originals)):
                raise ModelFormatError(f"{self._where(originals[0])} and others of its numbers have different types")
            parts, n_parts = names.parts(plain)
            axis = -1 if mixed and not is_packed else -2
            if shape and n_parts > 1 and (len(shape) < 2 or shape[axis] % n_parts):
                raise ModelFormatError(f"{self._where(originals[0])} has the shape {shape}, expected {n_parts} parts")
            shape_of_parts = list(shape)
            if n_parts > 1:
                shape_of_parts[axis] //= n_parts
            for number, part in enumerate(parts):
                target = names.target(part, self._where(originals[0]))
                shape_of_part = tuple(shape_of_parts)
                conversion = checkpoint.convert.get(re.sub(r"^blk\.\d+\.", "", target))
                if is_packed:
                    conversion = None
                if conversion:
                    shape_of_part = self._converted_shape(conversion, shape_of_part, originals[0], target)
                yield target, _Source(originals, shape_of_part, stacked, number, n_parts, mixed, of_scales, conversion)
        names.check()
        for target, values in value_of(checkpoint.extra, self._settings, self._config_path).items():
            yield target, _Source((), values.shape, values=values)

    def _converted_shape(self, conversion: Conversion, shape: Shape, name: str, target: str) -> Shape:
        try:
            return conversion.shape(shape, in_block(self._settings, target))
        except (LookupError, TypeError, ValueError) as error:
            raise ModelFormatError(f"{self._where(name)}: {type(error).__name__}: {error}") from error

    def _of_four_bits(self) -> dict[str, str]:
        """Names of scales by the names of their MXFP4 blocks."""
        found, entries = {}, self._folder.entries
        for name, entry in entries.items():
            end = next((end for end in _MXFP4 if name.endswith(end)), "")
            if not end or entry.dtype not in ("U8", "I8"):
                continue
            scales = name.removesuffix(end) + _MXFP4[end]
            if scales not in entries and end == ".weight":
                continue
            if scales not in entries:
                raise ModelFormatError(f"{entry.path}: tensor {name!r} has no {scales!r} beside it")
            if entries[scales].dtype not in ("U8", "F8_E8M0"):
                raise ModelFormatError(
                    f"{self._where(scales)} has the dtype {entries[scales].dtype}: of 4-bit floats, MXFP4 is read"
                )
            found[name] = scales
        return found

    def _packed_shape(self, blocks: str) -> Shape:
        """Shape of a matrix of MXFP4 blocks, 16 bytes for 32 numbers."""
        shape, of_scales = (self._folder.entries[name].shape for name in (blocks, self._packed[blocks]))
        expected = (*of_scales, 16)
        if not blocks.endswith("_blocks"):
            expected = (*of_scales[:-1], of_scales[-1] * 16)
        if len(shape) < 2 or shape != expected:
            raise ModelFormatError(
                f"{self._where(blocks)} has the shape {shape}, and its scales {of_scales}: expected {expected}"
            )
        return (*of_scales[:-1], of_scales[-1] * 32)

    def _is_left_out(self, name: str) -> bool:
        plain = name.replace("language_model.", "")
        is_skipped = _SKIPPED.search(plain) and not re.search(self._checkpoint.keep, name)
        return bool(is_skipped) or any(re.search(pattern, name) for pattern in self._drop)

    def _where(self, name: str) -> str:
        return f"{self._folder.entries[name].path}: tensor {name!r}"

    def _numbered(self, plain: str, found: Mapping[int, str]) -> tuple[str, ...]:
        kind, n_expert = ("expert", n_experts(self._settings)) if ".experts." in plain else ("tensor", None)
        n_expert = len(found) if n_expert is None else n_expert
        if missing := [i for i in range(n_expert) if i not in found]:
            raise ModelFormatError(f"{self.path}: {plain}: {kind} {missing[0]} of {n_expert} is missing")
        if len(found) > n_expert:
            raise ModelFormatError(f"{self.path}: {plain}: {len(found)} {kind}s, and config.json says {n_expert}")
        return tuple(found[i] for i in range(n_expert))

    def _shape_of(self, names: tuple[str, ...], stacked: bool) -> Shape:
        entries, packed = self._folder.entries, self._packed
        shapes = {self._packed_shape(name) if name in packed else entries[name].shape for name in names}
        if len(shapes) > 1:
            raise ModelFormatError(f"{self._where(names[0])} and others of its numbers have different shapes")
        shape = shapes.pop()
        return (len(names), *shape) if stacked else shape

    def _native(self) -> TensorType:
        entries = self._folder.entries
        used = [name for source in self._sources.values() for name in source.names[:1]]
        order = {name: i for i, name in enumerate(entries)}
        for name in sorted(used, key=order.__getitem__):
            if len(entries[name].shape) > 1 and entries[name].dtype in _NATIVE:
                return _NATIVE[entries[name].dtype]
        return TensorType.F32

    def _info(self, name: str, source: _Source) -> TensorInfo:
        base = re.sub(r"^blk\.\d+\.", "", name)
        is_plain = len(source.shape) <= 1 or name.endswith("_norm.weight") or not name.endswith(_MATRICES)
        own = self._checkpoint.types.get(self._folder.entries[source.names[0]].dtype) if source.names else None
        kind = TensorType.F32 if is_plain or (base in self._float32 and not own) else self.kind
        if own and not is_plain:
            is_whole = own != "Q8_0" or source.shape[-1] % 32 == 0
            kind = TensorType[own] if is_whole else TensorType.F16
        if source.scales:
            kind = TensorType.MXFP4
        elif source.conversion and source.conversion.integers:
            kind = TensorType.I64
        return TensorInfo(name=name, shape=source.shape, type=kind, n_bytes=nbytes(kind, source.shape))

    # --- the interface of model files ---

    def pair(self, key: str) -> bytes:
        """Return a metadata key with its value as raw bytes, for copies."""
        return self._pairs[key]

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of one tensor, uint8 [n_rows, row_bytes]."""
        if name not in self._sources:
            raise ModelFormatError(f"{self.path}: tensor {name!r} is missing")
        info, source = self.tensors[name], self._sources[name]
        if source.scales:
            return self._blocks(source)
        array = self._read(name, source, info.type)
        if array.shape != info.shape:
            raise ModelFormatError(f"{self.path}: {name} became {array.shape}, expected {info.shape}")
        rows = np.ascontiguousarray(array).reshape(-1, info.shape[-1] if info.shape else 1)
        if info.type is TensorType.Q8_0:
            return quantize(rows, info.type)
        return rows.view(np.uint8) if rows.dtype != np.uint8 else rows

    def _blocks(self, source: _Source) -> npt.NDArray[np.uint8]:
        """MXFP4 blocks as GGML has them, uint8 [n_rows, row_bytes].

        The scale, then numbers i and i + 16 in a byte.
        """
        rows = []
        for names in zip(source.names, source.scales, strict=True):
            blocks, scales = (self._part(name, source, kept=True, axis=1).view(np.uint8) for name in names)
            blocks = blocks.reshape(*scales.shape, 16)
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
            packed = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
            rows.append(packed.reshape(-1, packed.shape[-2] * packed.shape[-1]))
        return np.concatenate(rows)

    def _read(self, target: str, source: _Source, kind: Any) -> Array:
        """Values as `kind` stores them: numbers, or the bits of bfloat16."""
        if source.values is not None:
            return source.values
        dtypes = {self._folder.entries[name].dtype for name in source.names}
        is_integer = kind is TensorType.I32
        is_kept = is_integer or (
            len(dtypes) == 1
            and dtypes == {kind.name}
            and not (source.conversion and source.conversion.computes)
            and not any(name in self._scales for name in source.names)
        )
        parts = [self._part(name, source, kept=is_kept) for name in source.names]
        array = np.stack(parts) if source.stacked else parts[0]
        if source.conversion and source.conversion.integers and kind.name not in dtypes:
            raise ModelFormatError(f"{self._where(source.names[0])} is of {', '.join(dtypes)}, expected {kind.name}")
        if source.conversion:
            try:
                array = source.conversion.apply(array, in_block(self._settings, target))
            except (LookupError, TypeError, ValueError) as error:
                raise ModelFormatError(f"{self._where(source.names[0])}: {type(error).__name__}: {error}") from error
        if is_integer:
            return array.astype(np.int32, copy=False)
        if is_kept or kind in (TensorType.F32, TensorType.Q8_0):
            return array if is_kept else array.astype(np.float32, copy=False)
        if kind is TensorType.F16:
            return array.astype(np.float16)
        bits = quantize(array.astype(np.float32).reshape(-1, array.shape[-1]), kind)
        return np.asarray(bits).view(np.uint16).reshape(array.shape)

    def _part(self, name: str, source: _Source, *, kept: bool, axis: int = -1) -> Array:
        entry = self._folder.entries[name]
        array = self._folder.file(entry).array(name)
        if not kept:
            array = self._numbers(name, array, entry.dtype)
        if source.n_parts > 1 and source.mixed:
            array = array.swapaxes(axis, 0)[source.part :: source.n_parts].swapaxes(axis, 0)
        elif source.n_parts > 1:
            n_rows = array.shape[-2] // source.n_parts
            array = array[..., source.part * n_rows : (source.part + 1) * n_rows, :]
        return array

    def _numbers(self, name: str, bits: Array, dtype: str) -> Array:
        array = as_float(bits, dtype)
        if name not in self._scales:
            return array
        entry = self._folder.entries[self._scales[name]]
        scale = as_float(self._folder.file(entry).array(self._scales[name]), entry.dtype).astype(np.float32)
        block = self._block()
        if block and scale.ndim == array.ndim > 1:
            for axis, size in zip(range(array.ndim - len(block), array.ndim), block, strict=True):
                scale = scale.repeat(size, axis)
            scale = scale[tuple(slice(n) for n in array.shape)]
        scale = scale.reshape(*scale.shape, *[1] * (array.ndim - scale.ndim))
        try:
            return array.astype(np.float32, copy=False) * scale
        except ValueError:
            raise ModelFormatError(
                f"{self._where(self._scales[name])} has the shape {entry.shape}, which does not fit {array.shape}"
            ) from None

    def release(self, name: str) -> None:
        """Free the memory of one tensor, which will hardly be read again."""
        for original in (*self._sources[name].names, *self._sources[name].scales):
            self._folder.file(self._folder.entries[original]).release(original)

    def close(self) -> None:
        """Do nothing: the mappings live as long as this object."""


class TensorNameMap(gguf.TensorNameMap):  # type: ignore[misc]
    """gguf's names of an architecture's tensors.

    gguf adds those that an architecture alone has to a dictionary of the class, where they would count for every later
    one; here the dictionary is a copy.
    """

    def __init__(self, arch: gguf.MODEL_ARCH, n_layer: int):
        self.block_mappings_cfg = dict(gguf.TensorNameMap.block_mappings_cfg)
        super().__init__(arch, n_layer)


def in_block(settings: Settings, target: str) -> Settings:
    """Fields of config.json, with the number of a tensor's block."""
    block = re.match(r"blk\.(\d+)\.", target)
    return {**settings, "block": int(block[1])} if block else settings


def n_experts(settings: Settings) -> int | None:
    """Number of experts by config.json."""
    return next((n for field in _EXPERTS if isinstance(n := settings.get(field), int)), None)


class Names:
    """Names of a checkpoint's tensors in GGUF; collects those that have none."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, n_layer: int, config_path: str):
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        arch = known.get(checkpoint.names or checkpoint.architecture)
        self._checkpoint, self._config_path = checkpoint, config_path
        self._rename = value_of(checkpoint.rename, settings, config_path)
        self._class = next(iter(settings.get("architectures") or checkpoint.classes), checkpoint.architecture)
        self._map = TensorNameMap(arch, n_layer) if arch is not None else None
        self._unknown: list[str] = []
        self._taken: set[str] = set()

    def plain(self, name: str) -> str:
        """Name after the renamings that all checkpoints share, and the plugin's."""
        name = name.replace("language_model.", "")
        if name.endswith("e_score_correction_bias"):
            name = name.removesuffix("_bias") + ".bias"
        for pattern, replacement in self._rename:
            name = re.sub(pattern, replacement, name)
        return name

    def parts(self, name: str) -> tuple[list[str], int]:
        """Names that a tensor becomes, and the number of its parts."""
        for table in (self._checkpoint.split, self._checkpoint.whole):
            for pattern, parts in table.items():
                if re.search(pattern, name):
                    n_parts = len(parts) if table is self._checkpoint.split else 1
                    return [re.sub(pattern, part, name) for part in parts], n_parts
        return [name], 1

    def target(self, name: str, where: str) -> str:
        """GGUF name of a tensor."""
        block = re.search(r"\.(\d+)\.", name)
        stem, dot, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, dot, kind = name, "", ""
        general = re.sub(r"\.\d+\.", ".{}.", stem, count=1)
        if found := self._checkpoint.tensors.get(general):
            target = found.replace("{}", block[1] if block else "") + dot + kind
        else:
            target = (self._map.get_name(name, (".weight", ".bias")) if self._map else None) or ""
        if not target or target in self._taken:
            self._unknown.append(f"{where} {f'is {target} again' if target else ''}".strip())
        self._taken.add(target)
        return target

    def check(self) -> None:
        """Raise ModelFormatError for tensors without a name."""
        if self._unknown:
            more = f", and {len(self._unknown) - _SHOWN} more" if len(self._unknown) > _SHOWN else ""
            raise ModelFormatError(
                f"{self._config_path}: `architectures` is {self._class}, which has no "
                f"{'; '.join(self._unknown[:_SHOWN])}{more}: is it the config.json of another model?"
            )
