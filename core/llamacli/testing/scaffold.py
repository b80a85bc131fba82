"""Plugin skeletons: distributions from a model file or a kind of model.

Shapes are written in terms of the configuration, conditions on layers in terms of its keys, and what the skeleton does
not compute is marked as left to do.
"""

from __future__ import annotations

import importlib.resources
import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.graph import verbs
from llamacli.loaders import ModelFile
from llamacli.parts import COMMON_KEYS, base_name, parts_of
from llamacli.testing.tiny import KEYS

Shape = tuple[int, ...]


@attrs.frozen
class Description:
    """Keys, without the architecture's name, and tensor shapes of a file."""

    architecture: str
    keys: Mapping[str, Any]
    shapes: Mapping[str, Shape]

    @classmethod
    def of(cls, file: ModelFile) -> Description:
        """Describe an open file."""
        architecture = file.metadata.get_str("general.architecture")
        prefix = f"{architecture}."
        keys = {key.removeprefix(prefix): file.metadata[key] for key in file.metadata if key.startswith(prefix)}
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in keys.items()}
        return cls(architecture, plain, {name: tuple(info.shape) for name, info in file.tensors.items()})

    @property
    def n_layer(self) -> int:
        """Number of blocks that have tensors."""
        return 1 + max(
            (int(found[1]) for name in self.shapes if (found := re.match(r"blk\.(\d+)\.", name))), default=-1
        )

    def layers(self, name: str) -> frozenset[int]:
        """Blocks that have a tensor of this name."""
        return frozenset(i for i in range(self.n_layer) if f"blk.{i}.{name}" in self.shapes)


_DECODER = {key: value for key, value in KEYS.items() if key != "attention.layer_norm_epsilon"}
_ATTENTION: dict[str, Shape] = {
    "attn_norm.weight": (64,), "attn_q.weight": (64, 64), "attn_k.weight": (32, 64), "attn_v.weight": (32, 64),
    "attn_output.weight": (64, 64),
}  # fmt: skip
_NETWORK: dict[str, Shape] = {
    "ffn_norm.weight": (64,), "ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96),
}  # fmt: skip
_EXPERTS: dict[str, Shape] = {
    "ffn_norm.weight": (64,), "ffn_gate_inp.weight": (8, 64), "ffn_gate_exps.weight": (8, 32, 64),
    "ffn_up_exps.weight": (8, 32, 64), "ffn_down_exps.weight": (8, 64, 32),
}  # fmt: skip
_RECURRENCE: dict[str, Shape] = {
    "attn_norm.weight": (64,), "ssm_in.weight": (128, 64), "ssm_conv1d.weight": (64, 4), "ssm_a": (4,),
    "ssm_dt.bias": (4,), "ssm_out.weight": (64, 64),
}  # fmt: skip
_ENCODER: dict[str, Shape] = {
    "attn_q.weight": (64, 64), "attn_q.bias": (64,), "attn_k.weight": (64, 64), "attn_k.bias": (64,),
    "attn_v.weight": (64, 64), "attn_v.bias": (64,), "attn_output.weight": (64, 64), "attn_output.bias": (64,),
    "attn_output_norm.weight": (64,), "attn_output_norm.bias": (64,), "ffn_up.weight": (96, 64), "ffn_up.bias": (96,),
    "ffn_down.weight": (64, 96), "ffn_down.bias": (64,), "layer_output_norm.weight": (64,),
    "layer_output_norm.bias": (64,),
}  # fmt: skip

_Blocks = tuple[Mapping[str, Shape], ...]
_KINDS: dict[str, tuple[dict[str, Any], _Blocks]] = {
    "dense": (_DECODER, (_ATTENTION | _NETWORK,) * 2),
    "moe": (
        _DECODER | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32},
        (_ATTENTION | _EXPERTS,) * 2,
    ),
    "hybrid": (
        _DECODER | {"full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.group_count": 1, "block_count": 4},
        (_RECURRENCE | _NETWORK, _ATTENTION | _NETWORK) * 2,
    ),
    "encoder": (
        {key: value for key, value in KEYS.items() if key != "attention.layer_norm_rms_epsilon"}
        | {"attention.head_count_kv": 4, "attention.causal": False},
        (_ENCODER,) * 2,
    ),
}
KINDS = tuple(_KINDS)
"""Kinds of models that a skeleton can be like."""


def like(kind: str, architecture: str) -> Description:
    """Describe a small model of a kind."""
    keys, blocks = _KINDS[kind]
    shapes: dict[str, Shape] = {"token_embd.weight": (128, 64)}
    if kind == "encoder":
        shapes |= {"position_embd.weight": (256, 64), "token_embd_norm.weight": (64,), "token_embd_norm.bias": (64,)}
    else:
        shapes |= {"output_norm.weight": (64,), "output.weight": (128, 64)}
    shapes |= {f"blk.{i}.{name}": shape for i, block in enumerate(blocks) for name, shape in block.items()}
    return Description(architecture, keys, shapes)


def write_plugin(folder: Path, name: str, description: Description, *, from_file: bool) -> list[Path]:
    """Write a distribution `llamacli-NAME` into a new folder; returns its files.

    Raises InvalidRequestError for a name that is no Python name with hyphens, and if the folder exists.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise InvalidRequestError(f"the name {name!r} must be lower-case letters, digits and hyphens, a letter first")
    if folder.exists():
        raise InvalidRequestError(f"{folder} exists already")
    files = _contents(name, module, description, from_file)
    written = []
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written.append(path)
    return written


def _contents(name: str, module: str, description: Description, from_file: bool) -> dict[str, str]:
    class_name = "".join(part.capitalize() for part in module.split("_"))
    code = _Code(description, class_name)
    values = {
        "name": name,
        "module": module,
        "architecture": description.architecture,
        "class_name": class_name,
        "inert": "" if code.has_rope else _INERT,
        "options": "" if code.has_rope else ", inert=INERT",
        "names": "VARIANTS" if code.has_rope else "INERT, VARIANTS",
        "tiny_keys": _dict(code.tiny_keys()),
        **{part: "\n".join(getattr(code, part)()) for part in ("fields", "configure", "tensors", "forward")},
    }
    values["bound"] = "1e-5),  # llama.cpp rounds GELU to float16" if "gelu" in values["forward"] else "1e-8),"

    def fill(template: str) -> str:
        source = importlib.resources.files("llamacli").joinpath(f"data/plugin/{template}.tmpl").read_text("utf-8")
        return Template(source).substitute(values)

    init = fill("init.py")
    for name, imported in (("gelu", "from llamacli.ops.activations import gelu\n"), ("Rope", " Rope,")):
        if not re.search(rf"\b{name}\b", init.replace(imported, "")):
            init = init.replace(imported, "")
    test = fill("test.py")
    files = {
        "pyproject.toml": fill("pyproject.toml"),
        "README.md": fill("README.md"),
        ".github/workflows/test.yml": fill("workflow.yml"),
        f"llamacli_{module}/__init__.py": init,
        f"llamacli_{module}/py.typed": "",
        f"tests/tiny_{module}.py": fill("tiny.py"),
        f"tests/test_{module}.py": test,
    }
    if from_file:
        imports = "import json\nfrom pathlib import Path\n\nfrom llamacli.testing import check_shapes, "
        test = test.replace("from llamacli.testing import ", imports) + fill("test_file.py")
        content = {"keys": dict(description.keys), "shapes": {key: list(x) for key, x in description.shapes.items()}}
        files |= {f"tests/test_{module}.py": test, "tests/file.json": json.dumps(content, indent=1) + "\n"}
    return files


class _Code:
    """Python code of a description."""

    def __init__(self, description: Description, class_name: str):
        self._of, self._class = description, class_name
        keys = description.keys
        self._own = {key: _field(key) for key in keys if self._is_own(key) and not key.startswith("tokenizer.")}
        self.has_rope = "position_embd.weight" not in description.shapes
        self._layer_norm = "attention.layer_norm_epsilon" in keys
        self._n_layer = description.n_layer
        self._used: set[str] = set()
        self._sizes = self._known_sizes()

    def _is_own(self, key: str) -> bool:
        """True for keys that the family reads itself.

        `Config.from_gguf` does not read them, or not as the file has them.
        """
        value = self._of.keys[key]
        if key == "attention.value_length":
            return bool(value != self._of.keys.get("attention.key_length", value))
        return key not in COMMON_KEYS or (isinstance(value, list) and len(value) == self._of.n_layer)

    def _int(self, key: str, default: int) -> int:
        value = self._of.keys.get(key, default)
        return max(value) if isinstance(value, list) else int(value)

    def _known_sizes(self) -> dict[str, int]:
        """Sizes by the expression for them, likelier ones first."""
        n_embd = self._int("embedding_length", 1)
        n_head = max(1, self._int("attention.head_count", 1))
        n_head_kv = max(1, self._int("attention.head_count_kv", n_head))
        head_dim = self._int("attention.key_length", n_embd // n_head)
        n_q, n_kv, n_ff = n_head * head_dim, n_head_kv * head_dim, self._int("feed_forward_length", 0)
        sizes = {
            "c.n_embd": n_embd, "c.n_ff": n_ff, "n_q": n_q, "n_kv": n_kv, "c.head_dim": head_dim,
            "c.n_vocab": self._of.shapes.get("token_embd.weight", (0,))[0], "c.n_expert": self._int("expert_count", 0),
        }  # fmt: skip
        own = {field: self._of.keys[key] for key, field in self._own.items()}
        numbers = {f"c.{field}": value for field, value in own.items() if type(value) is int and value > 1}
        sizes |= numbers | {
            "c.n_head": n_head,
            "c.n_head_kv": n_head_kv,
            "c.context_length": self._int("context_length", 0),
        }
        sizes |= {"n_q + 2 * n_kv": n_q + 2 * n_kv, "2 * c.n_ff": 2 * n_ff, "2 * n_q": 2 * n_q}
        rope_dims = self._int("rope.dimension_count", head_dim)
        sizes |= {"c.rope.n_dims // 2": rope_dims // 2} if self.has_rope else {}
        sizes |= {f"2 * {name}": 2 * size for name, size in numbers.items()}
        names = list(numbers)
        sizes |= {f"{a} * {b}": numbers[a] * numbers[b] for i, a in enumerate(names) for b in names[i:]}
        return {name: size for name, size in sizes.items() if size > 0}

    def _expression(self, size: int, name: str, axis: int) -> str:
        for pattern, preferred in _PREFERRED:
            if re.fullmatch(pattern, name) and axis < len(preferred):
                found = next((text for text in preferred[axis].split("|") if self._sizes.get(text) == size), None)
                if found:
                    return found
        rare = ("c.n_vocab", "c.context_length")  # sizes of tables alone
        return next((text for text, value in self._sizes.items() if value == size and text not in rare), str(size))

    def _shape(self, name: str, shape: Sequence[int]) -> str:
        base = base_name(name)
        return "".join(f", {self._expression(size, base, axis)}" for axis, size in enumerate(shape))

    def _shape_in_blocks(self, name: str) -> str:
        """Shape of a tensor in block `i`.

        Sizes that differ between blocks are looked up by `i`.
        """
        shapes = {i: self._of.shapes[f"blk.{i}.{name}"] for i in sorted(self._of.layers(name))}
        texts = []
        for axis in range(len(next(iter(shapes.values())))):
            sizes = {i: shape[axis] for i, shape in shapes.items()}
            alike = len(set(sizes.values())) == 1
            size = next(iter(sizes.values()))
            texts.append(self._expression(size, base_name(name), axis) if alike else self._size_by_block(sizes))
        return "".join(f", {text}" for text in texts)

    def _size_by_block(self, sizes: Mapping[int, int]) -> str:
        """Expression in `i` of sizes by block."""
        lists = {key: value for key, value in self._of.keys.items() if key in self._own and isinstance(value, list)}
        candidates: dict[str, dict[int, Any]] = {}
        for key, value in lists.items():
            if len(value) == self._n_layer and type(value[0]) is int:
                item = f"c.{self._own[key]}[i]"
                head_dim, n_q = self._sizes.get("c.head_dim", 1), self._sizes.get("n_q", 0)
                for text, factor, start in (
                    (item, 1, 0), (f"{item} * c.head_dim", head_dim, 0), (f"2 * {item}", 2, 0),
                    (f"n_q + 2 * {item} * c.head_dim", 2 * head_dim, n_q),
                ):  # fmt: skip
                    candidates[text] = {i: start + factor * value[i] for i in sizes}
        return next((text for text, found in candidates.items() if found == dict(sizes)), f"{dict(sizes)}[i]")

    # --- configuration

    def fields(self) -> Iterator[str]:
        """Fields of the configuration that are the family's own."""
        for key, field in self._own.items():
            yield f"    {field}: {_type(self._of.keys[key])}"
        if self.has_rope:
            yield "    rope: Rope"
        elif not self._own:
            yield "    pass"

    def configure(self) -> Iterator[str]:
        """Body of `configure`."""
        indent = " " * 8
        yield f"{indent}common = {{"
        for key, field in _REQUIRED.items():
            value = self._of.keys.get(key)
            if isinstance(value, list):
                yield f'{indent}    "{field}": max(metadata.get_ints(f"{{self.name}}.{key}", {len(value)}, minimum=0)),'
            elif value == 0:  # such files have no attention, or no network
                yield f'{indent}    "{field}": max(1, metadata.get_int(f"{{self.name}}.{key}", minimum=0)),'
            elif value is None and key != "attention.head_count_kv":
                yield f'{indent}    "{field}": {self._missing(field)},  # the file has no {key}'
        if "attention.value_length" in self._own:
            yield f'{indent}    "head_dim": metadata.get_int(f"{{self.name}}.attention.key_length", minimum=1),'
        if self._layer_norm:
            epsilon = "attention.layer_norm_epsilon"
            yield f'{indent}    "layer_norm_eps": metadata.get_float(f"{{self.name}}.{epsilon}", minimum=0.0),'
        yield f"{indent}}}"
        if self.has_rope:
            yield f"{indent}head_dim = Config.from_gguf(metadata, **common).head_dim"
        yield f"{indent}return {self._class}Config.from_gguf("
        yield f"{indent}    metadata,"
        yield f"{indent}    **common,"
        for key, field in self._own.items():
            yield f"{indent}    {field}={self._getter(key)},"
        if self.has_rope:
            yield f"{indent}    # interleaved: True for llama.cpp's NORM, False for its NEOX and for rotate_half"
            yield f"{indent}    rope=Rope.from_gguf(metadata, self.name, head_dim, interleaved=True),"
        yield f"{indent})"

    def _missing(self, field: str) -> int:
        shapes = self._of.shapes
        found = {"n_ff": shapes.get("blk.0.ffn_up.weight", (0,))[0], "context_length": 4096, "n_head": 1}
        return int(found.get(field, 1))

    def _getter(self, key: str) -> str:
        value = self._of.keys[key]
        quoted = f'f"{{self.name}}.{key}"'
        if isinstance(value, list):
            length = 'metadata.get_int(f"{self.name}.block_count")' if len(value) == self._n_layer else str(len(value))
            if value and isinstance(value[0], bool):
                return f"metadata.get_bools({quoted}, {length})"
            if value and isinstance(value[0], float):
                return f"metadata.get_floats({quoted}, {length})"
            return f"metadata.get_ints({quoted}, {length}, minimum=0)"
        minimum = ", minimum=0" if type(value) is int else ""
        return f"metadata.get_{type(value).__name__}({quoted}{minimum})"

    # --- tensors

    def tensors(self) -> Iterator[str]:
        """Body of `tensors`."""
        indent = " " * 8
        yield f"{indent}c, table = config, TensorTable()"
        yield f"{indent}n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim"
        for name in [name for name in self._of.shapes if not name.startswith("blk.")]:
            yield from self._added("table", name, name, self._of.shapes, indent)
        if not self._n_layer:
            yield f"{indent}return table"
            return
        lines = list(self._block_tensors(indent))
        numbered = any(re.search(r"\bi\b", line) for line in lines)
        yield f"{indent}for {'i' if numbered else '_'} in range(c.n_layer):"
        yield f"{indent}    block = table.block()"
        yield from lines
        yield f"{indent}return table"

    def _block_tensors(self, indent: str) -> Iterator[str]:
        """Lines that add the tensors of block `i`."""
        for condition, names in self._groups():
            inner = f"{indent}    "
            if condition:
                yield f"{inner}if {condition}:"
                inner += "    "
            for name in names:
                full = f"blk.{min(self._of.layers(name))}.{name}"
                block = {f"{name}": self._of.shapes[full], **self._companions(full, name)}
                yield from self._added("block", name, name, block, inner)

    def _companions(self, full: str, name: str) -> dict[str, Shape]:
        prefix = full.removesuffix(name)
        stem = name.rpartition(".")[0]
        wanted = (f"{stem}.bias", f"{stem}.weight")
        return {other: self._of.shapes[prefix + other] for other in wanted if prefix + other in self._of.shapes}

    def _added(self, table: str, name: str, key: str, shapes: Mapping[str, Shape], indent: str) -> Iterator[str]:
        """Line that adds a tensor; a bias is added with its weight."""
        stem, _, kind = name.rpartition(".")
        if kind == "bias" and f"{stem}.weight" in shapes:
            return
        shape = self._shape(name, shapes[key]) if table == "table" else self._shape_in_blocks(name)
        if kind == "weight" and stem and "." not in stem:
            bias = ", needs_bias=True" if f"{stem}.bias" in shapes else ""
            yield f'{indent}{table}.add("{stem}"{shape}{bias})'
        else:
            yield f'{indent}{table}.add_tensor("{name}"{shape})'

    def _groups(self) -> list[tuple[str, list[str]]]:
        """Conditions on layers, "" for all, with the tensors there."""
        names = dict.fromkeys(name.split(".", 2)[2] for name in self._of.shapes if name.startswith("blk."))
        groups: dict[frozenset[int], list[str]] = {}
        for name in names:
            groups.setdefault(self._of.layers(name), []).append(name)
        return [(self._condition(layers), found) for layers, found in groups.items()]

    def _condition(self, layers: frozenset[int]) -> str:
        n = self._n_layer
        if layers == frozenset(range(n)):
            return ""
        candidates: dict[str, list[Any]] = {}
        for key, field in self._own.items():
            value = self._of.keys[key]
            if isinstance(value, list) and len(value) == n:
                candidates |= {f"c.{field}[i]": value, f"not c.{field}[i]": [not item for item in value]}
            elif type(value) is int and value > 0:
                candidates |= {
                    f"i < c.{field}": [i < value for i in range(n)],
                    f"i >= c.{field}": [i >= value for i in range(n)],
                    f"(i + 1) % c.{field} == 0": [(i + 1) % value == 0 for i in range(n)],
                    f"(i + 1) % c.{field} != 0": [(i + 1) % value != 0 for i in range(n)],
                }
        for period in range(2, 9):
            for rest in range(period):
                candidates[f"i % {period} == {rest}"] = [i % period == rest for i in range(n)]
                candidates[f"i % {period} != {rest}"] = [i % period != rest for i in range(n)]
        fitting = (text for text, holds in candidates.items() if {i for i in range(n) if holds[i]} == layers)
        return next(fitting, f"i in {sorted(layers)}")

    # --- forward pass

    def forward(self) -> Iterator[str]:
        """Body of `forward`."""
        lines = list(self._forward_lines())
        yield "        c, w = config, weights"
        code = "\n".join([*self.tensors(), *lines])
        for key, field in self._own.items():
            if not re.search(rf"\bc\.{field}\b", code):
                full = f"{self._of.architecture}.{key}"
                yield f"        # Left to do: c.{field}, {full} in the file: nothing depends on it"
        yield from lines

    def _forward_lines(self) -> Iterator[str]:
        indent, shapes = " " * 8, self._of.shapes
        if any("attn_qkv" in name for name in shapes):
            yield f"{indent}n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim"
        yield f"{indent}x = g.embed({self._param('w', 'token_embd')})"
        if "position_embd.weight" in shapes:
            yield f"{indent}x = x + g.positions({self._param('w', 'position_embd')})"
        if "token_embd_norm.weight" in shapes:
            yield f"{indent}x = {self._norm('x', 'w', 'token_embd_norm')}"
        if self._n_layer:
            numbered = any(condition for condition, _ in self._groups())
            yield f"{indent}{'for i, block in enumerate(w.blk):' if numbered else 'for block in w.blk:'}"
            lines = list(self._block())
            yield from (f"{indent}    {line}" for line in lines)
            if all(line.lstrip().startswith("#") for line in lines):  # a loop needs a statement
                yield f"{indent}    continue"
        if "output_norm.weight" in shapes:
            yield f"{indent}x = {self._norm('x', 'w', 'output_norm')}"
        for text in self._left("w", [name for name in shapes if not name.startswith("blk.")], {"output"}):
            yield f"{indent}{text}"
        output = "output" if "output.weight" in shapes else "token_embd"
        yield f"{indent}return g.linear(x, {self._param('w', output)})"

    def _block(self) -> Iterator[str]:
        """Loop over blocks: attention, networks, and the parts left to do."""
        groups = [(condition, {base_name(name) for name in names}, names) for condition, names in self._groups()]
        everywhere = {name for condition, names, _ in groups if not condition for name in names}
        for part in (self._attention, self._network):
            for condition, have, _ in groups:
                yield from _under(condition, list(part(have, have | everywhere)))
        for condition, _, names in groups:
            yield from _under(condition, list(self._left("block", [f"blk.0.{name}" for name in names], set())))

    def _attention(self, have: set[str], visible: set[str]) -> Iterator[str]:
        if not ({"attn_q", "attn_k", "attn_v"} <= have or "attn_qkv" in have) or "attn_output" not in have:
            return
        h = self._norm("x", "block", "attn_norm") if "attn_norm" in visible else "x"
        yield f"h = {h}"
        if "attn_qkv" in have:
            parts = f"{self._param('block', 'attn_qkv')}.split(n_q, n_kv, n_kv)"
        else:
            parts = f"({', '.join(self._param('block', f'attn_{part}') for part in 'qkv')})"
        yield f"q, k, v = (g.linear(h, part) for part in {parts})"
        for part in "qk":
            if f"attn_{part}_norm" in visible:
                shape = self._first_shape(f"attn_{part}_norm.weight")
                head = ", c.head_dim" if shape[-1] == self._sizes.get("c.head_dim") else ""
                yield f"{part} = {self._norm(part, 'block', f'attn_{part}_norm', head)}"
        if self.has_rope:
            factors = f", {self._param('w', 'rope_freqs')}" if "rope_freqs.weight" in self._of.shapes else ""
            yield f"q, k = (g.rope(heads, c.rope, c.head_dim{factors}) for heads in (q, k))"
        yield "kv = g.store(k, v, head_dim=c.head_dim)"
        if self._of.keys.get("attention.causal") is False:
            yield "# Left to do: attention in both directions"
        yield f"a = g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), {self._param('block', 'attn_output')})"
        if "post_attention_norm" in visible and "ffn_norm" in visible:
            yield f"a = {self._norm('a', 'block', 'post_attention_norm')}"
        yield "x = x + a"
        if "attn_output_norm" in visible:
            yield f"x = {self._norm('x', 'block', 'attn_output_norm')}"

    def _network(self, have: set[str], visible: set[str]) -> Iterator[str]:
        dense = "ffn_down" in have and bool(have & {"ffn_up", "ffn_gate"})
        experts = "ffn_down_exps" in have and "ffn_gate_inp" in have
        if not dense and not experts:
            return
        norm = next((name for name in ("ffn_norm", "post_attention_norm") if name in visible), None)
        if norm:
            yield f"h = {self._norm('x', 'block', norm)}"
        elif "attn_norm" not in visible:  # else both parts read one norm
            yield "h = x"
        if experts:
            yield f"router = g.linear(h, {self._param('block', 'ffn_gate_inp')})"
            gate = self._param("block", "ffn_gate_exps") if "ffn_gate_exps" in have else "None"
            up, down = (self._param("block", f"ffn_{part}_exps") for part in ("up", "down"))
            yield f'experts = {{"gate": {gate}, "up": {up}, "down": {down}}}'
            yield "y = g.moe(h, router, **experts, n_used=c.n_expert_used)"
            if {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"} <= have:
                yield f"shared = {self._gated('_shexp')}"
                yield f"y = y + g.linear(shared, {self._param('block', 'ffn_down_shexp')})"
        elif (
            "ffn_gate" not in have
            and self._first_shape("ffn_up.weight")[0] == 2 * self._first_shape("ffn_down.weight")[1]
        ):
            yield f"gate, up = (g.linear(h, part) for part in {self._param('block', 'ffn_up')}.split(c.n_ff, c.n_ff))"
            yield f"y = g.linear(g.swiglu(gate, up), {self._param('block', 'ffn_down')})"
        elif "ffn_gate" in have:
            yield f"gated = {self._gated('')}"
            yield f"y = g.linear(gated, {self._param('block', 'ffn_down')})"
        else:
            inner = f"g.map(g.linear(h, {self._param('block', 'ffn_up')}), gelu)"
            yield f"y = g.linear({inner}, {self._param('block', 'ffn_down')})"
        if "post_ffw_norm" in visible:
            yield f"y = {self._norm('y', 'block', 'post_ffw_norm')}"
        yield "x = x + y"
        if "layer_output_norm" in visible:
            yield f"x = {self._norm('x', 'block', 'layer_output_norm')}"

    def _gated(self, suffix: str) -> str:
        gate, up = (self._param("block", f"ffn_{part}{suffix}") for part in ("gate", "up"))
        return f"g.swiglu(g.linear(h, {gate}), g.linear(h, {up}))"

    def _norm(self, value: str, scope: str, name: str, head_dim: str = "") -> str:
        verb, epsilon = ("layer_norm", "layer_norm_eps") if self._layer_norm else ("rms_norm", "rms_eps")
        return f"g.{verb}({value}, {self._param(scope, name)}, c.{epsilon}{head_dim})"

    def _param(self, scope: str, name: str) -> str:
        self._used.add(f"{scope}.{name}")
        return f"{scope}.{name}"

    def _first_shape(self, name: str) -> Shape:
        return next(shape for full, shape in self._of.shapes.items() if full.endswith(f".{name}"))

    def _left(self, scope: str, names: Sequence[str], elsewhere: set[str]) -> Iterator[str]:
        """Comments on the tensors that the skeleton does not read."""
        shapes = {name: self._of.shapes.get(name) or self._first_shape(name.split(".", 2)[2]) for name in names}
        for part in parts_of(shapes):
            if f"{scope}.{part.name}" in self._used or part.name in elsewhere:
                continue
            verb = f"g.{part.verb}" if part.verb in verbs() else "a verb of your own, see docs/plugins.md"
            full = next(name for name in names if base_name(name) == part.name)
            attribute = re.sub(r"^blk\.\d+\.", "", full)
            plain = attribute.endswith(".weight") and attribute.count(".") == 1
            name = f"{scope}.{part.name if plain else attribute.replace('.', '_')}"
            yield f"# Left to do: {name} {part.shape}: {part.meaning or 'unknown'}, {verb}"

    # --- tiny files

    def tiny_keys(self) -> dict[str, Any]:
        """Keys of tiny files: sizes are made small, everything else is kept."""
        keys = self._of.keys
        n_layer = self._tiny_layers()
        tiny: dict[str, Any] = {}
        for key, value in keys.items():
            if key == "vocab_size":
                continue
            if key in ("attention.key_length", "attention.value_length"):
                tiny[key] = 16
            elif key == "rope.dimension_count":
                head_dim = self._sizes.get("c.head_dim", value)
                tiny[key] = max(2, 16 * int(value) // head_dim // 2 * 2)
            elif isinstance(value, list) and len(value) == keys.get("block_count"):
                tiny[key] = [min(item, 16) if type(item) is int else item for item in value[:n_layer]]
            elif isinstance(value, list) and key.endswith("sections"):
                tiny[key] = [max(int(item > 0), item * 8 // max(1, sum(value))) for item in value]
            elif key in KEYS:
                tiny[key] = min(value, KEYS[key]) if isinstance(value, int) else value
            elif type(value) is int:
                tiny[key] = min(value, next((size for name, size in _TINY.items() if name in key), 4))
            else:
                tiny[key] = value
        heads, heads_kv = keys.get("attention.head_count"), keys.get("attention.head_count_kv")
        if heads is not None and heads == heads_kv:
            tiny["attention.head_count_kv"] = tiny["attention.head_count"]
        absent = {key: None for key in KEYS if key not in keys}
        return tiny | {"block_count": n_layer} | absent

    def _tiny_layers(self) -> int:
        """Number of layers that shows each kind of block."""
        kinds = [frozenset(n for n in self._names_of(i)) for i in range(self._n_layer)]
        last_new = max((i for i, kind in enumerate(kinds) if kind not in kinds[:i]), default=0)
        intervals = [v for k, v in self._of.keys.items() if "interval" in k and type(v) is int]
        return min(8, max(2, last_new + 1, *intervals, 0))

    def _names_of(self, layer: int) -> Iterator[str]:
        prefix = f"blk.{layer}."
        return (name.removeprefix(prefix) for name in self._of.shapes if name.startswith(prefix))


_TINY = {"feed_forward_length": 32, "expert_count": 8, "expert_used": 2, "sliding_window": 8, "rank": 16, "inner": 64}
"""Sizes of tiny files, by a part of the key."""

_REQUIRED = {
    "context_length": "context_length", "embedding_length": "n_embd", "block_count": "n_layer",
    "attention.head_count": "n_head", "attention.head_count_kv": "n_head_kv", "feed_forward_length": "n_ff",
}  # fmt: skip
"""Keys that `Config.from_gguf` demands as integers, with its fields."""

_PREFERRED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"token_embd|output", ("c.n_vocab", "c.n_embd")),
    (r"position_embd", ("c.context_length", "c.n_embd")),
    (r"attn_q", ("n_q|2 * n_q", "c.n_embd")),
    (r"attn_[kv]", ("n_kv", "c.n_embd")),
    (r"attn_qkv", ("n_q + 2 * n_kv", "c.n_embd")),
    (r"attn_output", ("c.n_embd", "n_q")),
    (r"attn_[qk]_norm", ("c.head_dim|n_q|n_kv",)),
    (r"attn_sinks", ("c.n_head",)),
    (r"ffn_gate_inp", ("c.n_expert", "c.n_embd")),
    (r"ffn_(gate|up)_exps", ("c.n_expert", "c.expert_feed_forward_length|c.n_ff", "c.n_embd")),
    (r"ffn_down_exps", ("c.n_expert", "c.n_embd", "c.expert_feed_forward_length|c.n_ff")),
    (r"ffn_(gate|up)_shexp", ("c.expert_shared_feed_forward_length|c.expert_feed_forward_length|c.n_ff", "c.n_embd")),
    (r"ffn_down_shexp", ("c.n_embd", "c.expert_shared_feed_forward_length|c.expert_feed_forward_length|c.n_ff")),
    (r"ffn_(gate|up)", ("c.n_ff|2 * c.n_ff", "c.n_embd")),
    (r"ffn_down", ("c.n_embd", "c.n_ff")),
    (r"rope_freqs", ("c.rope.n_dims // 2",)),
)
"""Sizes to be preferred where several are equal: names, and the expressions for each axis."""


_INERT = '''
INERT = ["*.attn_k.bias"]
"""Tensors that change no logit: this one cancels out in softmax where there is no RoPE."""
'''


def _dict(values: Mapping[str, Any]) -> str:
    """Source of a dict, a line an item."""
    return "\n".join(["{", *(f"    {json.dumps(key)}: {_source(value)}," for key, value in values.items()), "}"])


def _source(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, str):
        return json.dumps(value)
    return str(np.float32(value)) if isinstance(value, float) else repr(value)


def _under(condition: str, lines: list[str]) -> Iterator[str]:
    """Lines, under a condition if there is one."""
    if condition and lines:
        yield f"if {condition}:"
        yield from (f"    {line}" for line in lines)
        if all(line.startswith("#") for line in lines):
            yield "    pass"
    else:
        yield from lines


def _field(key: str) -> str:
    return re.sub(r"\W", "_", key)


def _type(value: Any) -> str:
    if isinstance(value, list):
        return f"tuple[{type(value[0]).__name__ if value else 'int'}, ...]"
    return type(value).__name__
