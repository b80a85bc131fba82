import re
from pathlib import Path

import attrs
import numpy as np
import pytest

from llamacli import ArrayFile, Config, InvalidRequestError, ModelFormatError, PluginError, TensorTable
from llamacli.architecture import sliding_layers
from llamacli.gguf import Metadata
from llamacli.tensor_table import Params

KEYS = {
    "general.architecture": "a",
    "a.vocab_size": 50,
    "a.context_length": 512,
    "a.embedding_length": 48,
    "a.block_count": 3,
    "a.feed_forward_length": 96,
    "a.attention.head_count": 6,
    "a.attention.layer_norm_rms_epsilon": 1e-6,
}


def config(**changes: object) -> Config:
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    return Config.from_gguf(Metadata({key: value for key, value in keys.items() if value is not None}, "m.gguf"))


class TestConfig:
    def test_common_keys(self) -> None:
        assert config() == Config(
            architecture="a",
            n_vocab=50,
            context_length=512,
            n_embd=48,
            n_layer=3,
            n_head=6,
            n_head_kv=6,
            head_dim=8,
            n_ff=96,
            rms_eps=1e-6,
            n_expert=0,
            n_expert_used=0,
            n_ctx=512,
        )

    def test_head_dim_may_differ_from_n_embd_per_head(self) -> None:
        wide = config(a__attention__key_length=16, a__attention__head_count=5, a__attention__head_count_kv=1)
        assert (wide.n_head, wide.n_head_kv, wide.head_dim) == (5, 1, 16)

    def test_experts(self) -> None:
        mixture = config(a__expert_count=8, a__expert_used_count=2)
        assert (mixture.n_expert, mixture.n_expert_used) == (8, 2)

    def test_a_family_may_give_the_numbers_of_experts(self) -> None:
        dense = Config.from_gguf(Metadata(KEYS | {"a.expert_count": 1}), n_expert=0, n_expert_used=0)
        assert (dense.n_expert, dense.n_expert_used) == (0, 0)

    def test_common_keys_are_marked_as_read(self) -> None:
        metadata = Metadata(KEYS)
        Config.from_gguf(metadata)
        assert set(KEYS) <= metadata.consumed

    @pytest.mark.parametrize("key", [key for key in KEYS if key != "a.vocab_size"])
    def test_missing_keys(self, key: str) -> None:
        with pytest.raises(ModelFormatError, match=f"m.gguf: metadata key '{key}' is missing"):
            config(**{key: None})

    def test_missing_vocabulary_size(self) -> None:
        with pytest.raises(ModelFormatError, match=r"'a\.vocab_size' is missing"):
            config(a__vocab_size=None)
        assert config(a__vocab_size=None, tokenizer__ggml__tokens=["x", "y"]).n_vocab == 2

    def test_fields_of_a_family_are_frozen(self) -> None:
        @attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
        class Family(Config):
            window: int

        family = Family.from_gguf(Metadata(KEYS), window=5)
        family.n_ctx = 9
        for name in ("window", "n_layer"):
            with pytest.raises(attrs.exceptions.FrozenAttributeError):
                setattr(family, name, 1)
        with pytest.raises(InvalidRequestError):
            family.n_ctx = 0
        assert (family.n_ctx, family.window) == (9, 5)


class TestSlidingLayers:
    KEY = "a.attention.sliding_window_pattern"

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({}, [True, False, True, False, True]),
            ({KEY: 3}, [True, True, False, True, True]),
            ({KEY: 1}, [False] * 5),
            ({KEY: 0}, [True] * 5),
            ({KEY: np.array([False, False, True, True, False])}, [False, False, True, True, False]),
        ],
    )
    def test_a_period_or_a_list(self, keys: dict[str, object], expected: list[bool]) -> None:
        assert sliding_layers(Metadata(keys), "a", 5, period=2) == tuple(expected)

    @pytest.mark.parametrize("value", [-1, "2", True, 2.0, np.array([True] * 4), np.array([2.0] * 5)])
    def test_other_values_are_refused(self, value: object) -> None:
        with pytest.raises(ModelFormatError, match=self.KEY):
            sliding_layers(Metadata({self.KEY: value}), "a", 5, period=2)


class TestTensorTable:
    def table(self) -> TensorTable:
        table = TensorTable()
        table.add("token_embd", 8, 4)
        table.add("output", 8, 4, optional=True)
        for _ in range(2):
            table.block().add("attn_q", 4, 4, bias=True)
        return table

    def file(self, **shapes: tuple[int, ...]) -> ArrayFile:
        arrays = {
            "token_embd.weight": (8, 4), "blk.0.attn_q.weight": (4, 4), "blk.1.attn_q.weight": (4, 4)
        } | {key.replace("__", "."): shape for key, shape in shapes.items()}  # fmt: skip
        return ArrayFile(Path("m"), Metadata({}), {key: np.zeros(s, np.float32) for key, s in arrays.items() if s})

    def test_names_and_shapes(self) -> None:
        assert {name: (spec.shape, spec.optional) for name, spec in self.table().items()} == {
            "token_embd.weight": ((8, 4), False),
            "output.weight": ((8, 4), True),
            "blk.0.attn_q.weight": ((4, 4), False),
            "blk.0.attn_q.bias": ((4,), True),
            "blk.1.attn_q.weight": ((4, 4), False),
            "blk.1.attn_q.bias": ((4,), True),
            **{f"{name}.scale": ((1,), True) for name in ("token_embd", "output", "blk.0.attn_q", "blk.1.attn_q")},
        }

    def test_parameters_by_name(self) -> None:
        weights = self.table().bind(self.file(blk__1__attn_q__bias=(4,)))
        assert weights.token_embd.weight.name == "token_embd.weight"
        assert weights.output is None
        first, second = (block.attn_q for block in weights.blk)
        assert first.bias is None
        assert (second.weight.shape, second.bias.name) == ((4, 4), "blk.1.attn_q.bias")

    def test_all_mismatches_are_reported_together(self) -> None:
        broken = self.file(token_embd__weight=None, output__weight=(4, 8), blk__2__attn_q__weight=(4, 4), x=(1,))
        with pytest.raises(ModelFormatError) as raised:
            self.table().bind(broken)
        assert str(raised.value).split("; ") == [
            "m: tensor token_embd.weight is missing, expected (8, 4)",
            "tensor output.weight has shape (4, 8), expected (8, 4)",
            "tensor blk.2.attn_q.weight (4, 4) is not one that the architecture reads",
            "tensor x (1,) is not one that the architecture reads",
        ]

    def test_long_lists_of_mismatches_are_truncated(self) -> None:
        broken = self.file(**{f"x{i}": (1,) for i in range(200)})
        with pytest.raises(ModelFormatError) as raised:
            self.table().bind(broken)
        problems = str(raised.value).split("; ")
        assert len(problems) == 9
        assert problems[7:] == ["tensor x7 (1,) is not one that the architecture reads", "and 192 more"]

    def test_undeclared_names(self) -> None:
        weights = self.table().bind(self.file())
        for scope in (weights, weights.blk[0]):
            with pytest.raises(PluginError, match="'attn_k' is not in the architecture's table of tensors"):
                _ = scope.attn_k

    def fusing(self) -> TensorTable:
        table = TensorTable()
        table.block().add_fused("attn_qkv", attn_q=(8, 4), attn_k=(2, 4), attn_v=(2, 4))
        return table

    def test_fused_or_separate(self) -> None:
        apart = {
            f"blk.0.attn_{name}.weight": np.zeros((n, 4), np.float32) for name, n in zip("qkv", (8, 2, 2), strict=True)
        }
        whole = {"blk.0.attn_qkv.weight": np.zeros((12, 4), np.float32)}
        for arrays in (apart, whole):
            block = self.fusing().bind(ArrayFile(Path("m"), Metadata({}), arrays)).blk[0]
            found = [block.attn_q.weight, block.attn_k.weight, block.attn_v.weight]
            assert [tensor.shape for tensor in found] == [(8, 4), (2, 4), (2, 4)]
            if arrays is whole:
                assert {tensor.name for tensor in found} == {"blk.0.attn_qkv.weight"}
                assert [tensor.first_row for tensor in found] == [0, 8, 10]

    def test_neither_fused_nor_separate(self) -> None:
        shapes = {"attn_k": (2, 4)}, {"attn_qkv": (13, 4)}, {"attn_qkv": (12, 4), "attn_k": (2, 4)}
        messages = (
            "tensor blk.0.attn_q.weight is missing, expected (8, 4); tensor blk.0.attn_v.weight is missing",
            "tensor blk.0.attn_qkv.weight has shape (13, 4), expected (12, 4)",
            "tensor blk.0.attn_k.weight (2, 4) is not one that the architecture reads",
        )
        for names, message in zip(shapes, messages, strict=True):
            arrays = {f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in names.items()}
            with pytest.raises(ModelFormatError, match=re.escape(f"m: {message}")):
                self.fusing().bind(ArrayFile(Path("m"), Metadata({}), arrays))

    def test_required_scale_and_bias(self) -> None:
        file = ArrayFile(Path("m"), Metadata({}), {"router.weight": np.zeros((3, 4), np.float32)})
        table = TensorTable()
        table.add("router", 3, 4, bias=True, scale=(4,))
        router = table.bind(file).router
        assert (router.bias, router.scale) == (None, None)
        table.add("router", 3, 4, needs_bias=True, scale=(4,), needs_scale=True)
        message = r"router\.bias is missing, expected \(3,\); tensor router\.scale is missing, expected \(4,\)"
        with pytest.raises(ModelFormatError, match=message):
            table.bind(file)

    def test_fused_or_separate_with_biases(self) -> None:
        def bound(**shapes: tuple[int, ...]) -> Params:
            table = TensorTable()
            table.block().add_fused("attn_kv", bias=True, attn_k=(2, 4), attn_v=(3, 4))
            arrays = {f"blk.0.attn_{name.replace('_', '.')}": np.zeros(n, np.float32) for name, n in shapes.items()}
            return table.bind(ArrayFile(Path("m"), Metadata({}), arrays)).blk[0]

        apart = bound(k_weight=(2, 4), v_weight=(3, 4), v_bias=(3,))
        assert (apart.attn_k.bias, apart.attn_v.bias.name) == (None, "blk.0.attn_v.bias")
        fused = bound(kv_weight=(5, 4), kv_bias=(5,))
        assert {fused.attn_k.bias.name, fused.attn_v.bias.name} == {"blk.0.attn_kv.bias"}
        assert [(b.shape, b.first_row) for b in (fused.attn_k.bias, fused.attn_v.bias)] == [((2,), 0), ((3,), 2)]
        with pytest.raises(ModelFormatError, match=r"attn_k\.bias \(2,\) is not one"):
            bound(kv_weight=(5, 4), k_bias=(2,))
        with pytest.raises(ModelFormatError, match=r"attn_kv\.bias \(5,\) is not one"):
            bound(k_weight=(2, 4), v_weight=(3, 4), kv_bias=(5,))

    def test_errors_name_the_keys_behind_a_shape(self) -> None:
        metadata = Metadata(KEYS)
        Config.from_gguf(metadata)
        with pytest.raises(ModelFormatError, match=r"; expected by a\.attention\.head_count = 6, .*vocab_size = 50$"):
            self.table().bind(ArrayFile(Path("m"), metadata, {}))
