"""Code of skeletons: the forward pass of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llamacli.graph import verbs
from llamacli.parts import base_name, parts_of
from llamacli.testing.scaffold.declarations import Declarations
from llamacli.testing.scaffold.description import Shape


class Forward:
    """Code of a forward pass, with comments on unread tensors and keys."""

    def __init__(self, declarations: Declarations):
        self._declared, self._description = declarations, declarations.description
        self._used: set[str] = set()

    @property
    def _is_causal(self) -> bool:
        return self._description.keys.get("attention.causal") is not False

    def lines(self) -> Iterator[str]:
        """Body of `forward`."""
        lines = list(self._forward_lines())
        yield "        c, w = config, weights"
        code = "\n".join([*self._declared.tensors(), *lines])
        for key, field in self._declared.own.items():
            if not re.search(rf"\bc\.{field}\b", code):
                full = f"{self._description.architecture}.{key}"
                yield f"        # Left to do: c.{field}, {full} in the file: nothing depends on it"
        yield from lines

    def _forward_lines(self) -> Iterator[str]:
        indent, shapes = " " * 8, self._description.shapes
        if any("attn_qkv" in name for name in shapes):
            yield f"{indent}n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim"
        yield f"{indent}x = g.embed({self._param('w', 'token_embd')})"
        if "position_embd.weight" in shapes:
            yield f"{indent}x = x + g.positions({self._param('w', 'position_embd')})"
        if "token_embd_norm.weight" in shapes:
            yield f"{indent}x = {self._norm('x', 'w', 'token_embd_norm')}"
        if self._declared.n_layer:
            numbered = any(condition for condition, _ in self._declared.groups())
            yield f"{indent}{'for i, block in enumerate(w.blk):' if numbered else 'for block in w.blk:'}"
            lines = list(self._block())
            yield from (f"{indent}    {line}" for line in lines)
            if all(line.lstrip().startswith("#") for line in lines):  # a loop needs a statement
                yield f"{indent}    continue"
        if "output_norm.weight" in shapes:
            yield f"{indent}x = {self._norm('x', 'w', 'output_norm')}"
        for text in self._left("w", [name for name in shapes if not name.startswith("blk.")], {"output"}):
            yield f"{indent}{text}"
        if not self._is_causal and "output.weight" not in shapes:
            yield f"{indent}return x"
            return
        output = "output" if "output.weight" in shapes else "token_embd"
        yield f"{indent}return g.linear(x, {self._param('w', output)})"

    def _block(self) -> Iterator[str]:
        groups = [
            (condition, {base_name(name) for name in names}, names) for condition, names in self._declared.groups()
        ]
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
                head = ", c.head_dim" if shape[-1] == self._declared.sizes.get("c.head_dim") else ""
                yield f"{part} = {self._norm(part, 'block', f'attn_{part}_norm', head)}"
        if self._declared.has_rope:
            factors = f", {self._param('w', 'rope_freqs')}" if "rope_freqs.weight" in self._description.shapes else ""
            yield f"q, k = (g.rope(heads, c.rope, c.head_dim{factors}) for heads in (q, k))"
        yield "kv = g.store(k, v, head_dim=c.head_dim)"
        both = "" if self._is_causal else ", causal=False"
        yield f"a = g.linear(g.attention(q, kv, scale=c.head_dim**-0.5{both}), {self._param('block', 'attn_output')})"
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
        verb, epsilon = ("layer_norm", "layer_norm_eps") if self._declared.layer_norm else ("rms_norm", "rms_eps")
        return f"g.{verb}({value}, {self._param(scope, name)}, c.{epsilon}{head_dim})"

    def _param(self, scope: str, name: str) -> str:
        self._used.add(f"{scope}.{name}")
        return f"{scope}.{name}"

    def _first_shape(self, name: str) -> Shape:
        return next(shape for full, shape in self._description.shapes.items() if full.endswith(f".{name}"))

    def _left(self, scope: str, names: Sequence[str], elsewhere: set[str]) -> Iterator[str]:
        shapes = {
            name: self._description.shapes.get(name) or self._first_shape(name.split(".", 2)[2]) for name in names
        }
        for part in parts_of(shapes):
            if f"{scope}.{part.name}" in self._used or part.name in elsewhere:
                continue
            verb = f"g.{part.verb}" if part.verb in verbs() else "a verb of your own, see docs/plugins.md"
            full = next(name for name in names if base_name(name) == part.name)
            attribute = re.sub(r"^blk\.\d+\.", "", full)
            plain = attribute.endswith(".weight") and attribute.count(".") == 1
            name = f"{scope}.{part.name if plain else attribute.replace('.', '_')}"
            yield f"# Left to do: {name} {part.shape}: {part.meaning or 'unknown'}, {verb}"


def _under(condition: str, lines: list[str]) -> Iterator[str]:
    if condition and lines:
        yield f"if {condition}:"
        yield from (f"    {line}" for line in lines)
        if all(line.startswith("#") for line in lines):
            yield "    pass"
    else:
        yield from lines
