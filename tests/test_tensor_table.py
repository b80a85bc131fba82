"""Tensor tables: names without suffix, biases of vectors, scales of matrices."""

from pathlib import Path

import numpy as np
import pytest

from llamacli import ArrayFile, Config, ModelFormatError, PluginError, TensorTable
from llamacli.architecture import sliding_layers
from llamacli.gguf import Metadata

KEYS = {
    "general.architecture": "a", "a.vocab_size": 50, "a.context_length": 64, "a.embedding_length": 12,
    "a.block_count": 1, "a.attention.head_count": 3, "a.feed_forward_length": 24,
}  # fmt: skip


def file(**shapes: tuple[int, ...]) -> ArrayFile:
    arrays = {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return ArrayFile(Path("m"), Metadata({}), arrays)


def test_tensors_without_the_suffix_weight() -> None:
    table = TensorTable()
    block = table.block()
    block.add_tensor("ssm_a", 4)
    block.add_tensor("ssm_dt.bias", 4)
    block.add_tensor("exp_probs_b.bias", 6, optional=True)
    params = table.bind(file(blk__0__ssm_a=(4,), blk__0__ssm_dt__bias=(4,))).blk[0]
    assert (params.ssm_a.weight.name, params.ssm_a.weight.shape) == ("blk.0.ssm_a", (4,))
    assert params.ssm_dt_bias.weight.name == "blk.0.ssm_dt.bias"
    assert params.exp_probs_b_bias is None
    with pytest.raises(ModelFormatError, match=r"tensor blk\.0\.ssm_dt\.bias is missing, expected \(4,\)"):
        table.bind(file(blk__0__ssm_a=(4,)))
    with pytest.raises(ModelFormatError, match=r"tensor blk\.0\.ssm_a has shape \(5,\), expected \(4,\)"):
        table.bind(file(blk__0__ssm_a=(5,), blk__0__ssm_dt__bias=(4,)))


def test_dots_in_names() -> None:
    table = TensorTable()
    table.add("shortconv.in_proj", 8, 4)
    params = table.bind(file(shortconv__in_proj__weight=(8, 4)))
    assert params.shortconv_in_proj.weight.name == "shortconv.in_proj.weight"


def test_leading_ones_of_shapes_may_be_missing() -> None:
    table = TensorTable()
    table.add_tensor("lerp.weight", 1, 1, 4)
    for shape in ((4,), (1, 4), (1, 1, 4)):
        assert table.bind(file(lerp__weight=shape)).lerp_weight.weight.shape == (1, 1, 4)
    with pytest.raises(ModelFormatError, match=r"tensor lerp\.weight has shape \(4, 1\), expected \(1, 1, 4\)"):
        table.bind(file(lerp__weight=(4, 1)))


def test_blocks_of_an_encoder_and_a_decoder() -> None:
    table = TensorTable()
    for prefix, width in (("enc.blk", 3), ("dec.blk", 5), ("enc.blk", 4)):
        table.block(prefix).add_fused("attn_kv", attn_k=(2, width), attn_v=(2, width))
    assert table.shapes(fused=True).keys() == {
        f"{place}.attn_kv.weight" for place in ("enc.blk.0", "enc.blk.1", "dec.blk.0")
    }
    stored = {"enc__blk__0__attn_kv__weight": (4, 3), "dec__blk__0__attn_k__weight": (2, 5)}
    stored |= {"dec__blk__0__attn_v__weight": (2, 5), "enc__blk__1__attn_kv__weight": (4, 4)}
    weights = table.bind(file(**stored))
    assert [block.attn_v.weight.name for block in weights.enc_blk] == [f"enc.blk.{i}.attn_kv.weight" for i in (0, 1)]
    assert [block.attn_k.weight.shape for block in weights.dec_blk] == [(2, 5)]
    assert weights.blk == []


def test_similar_names_are_suggested() -> None:
    table = TensorTable()
    table.add("token_embd", 8, 4)
    with pytest.raises(PluginError, match=r"'tok_embd' is not in .* tensors; did you mean 'token_embd'\?"):
        _ = table.bind(file(token_embd__weight=(8, 4))).tok_embd


def test_norms_may_have_a_bias() -> None:
    table = TensorTable()
    table.add("output_norm", 8, bias=True)
    table.add("attn_norm", 8, needs_bias=True)
    shapes = {"output_norm__weight": (8,), "attn_norm__weight": (8,), "attn_norm__bias": (8,)}
    params = table.bind(file(**shapes))
    assert (params.output_norm.bias, params.attn_norm.bias.shape) == (None, (8,))
    del shapes["attn_norm__bias"]
    with pytest.raises(ModelFormatError, match=r"tensor attn_norm\.bias is missing, expected \(8,\)"):
        table.bind(file(**shapes))


def test_every_matrix_may_have_a_scale() -> None:
    table = TensorTable()
    table.add("attn_q", 8, 4)
    table.add("ffn_up_exps", 3, 8, 4)
    table.add("attn_norm", 4)
    shapes = {"attn_q__weight": (8, 4), "ffn_up_exps__weight": (3, 8, 4), "attn_norm__weight": (4,)}
    scales = {"attn_q__scale": (1,), "ffn_up_exps__scale": (3,)}
    params = table.bind(file(**shapes, **scales))
    assert (params.attn_q.scale.name, params.ffn_up_exps.scale.shape) == ("attn_q.scale", (3,))
    assert table.bind(file(**shapes)).attn_q.scale is None
    table.bind(file(**shapes, attn_q__input_scale=(1,), ffn_up_exps__input_scale=(3,)))  # read by nothing
    with pytest.raises(ModelFormatError, match=r"tensor attn_x\.input_scale \(1,\) is not one that"):
        table.bind(file(**shapes, attn_x__input_scale=(1,)))
    with pytest.raises(ModelFormatError, match=r"tensor attn_norm\.scale \(1,\) is not one that"):
        table.bind(file(**shapes, attn_norm__scale=(1,)))


def test_families_with_layer_norm_need_no_epsilon_of_rms_norm() -> None:
    metadata = Metadata(KEYS | {"a.attention.layer_norm_epsilon": 1e-3})
    config = Config.from_gguf(metadata, layer_norm_eps=metadata.get_float("a.attention.layer_norm_epsilon"))
    assert (config.layer_norm_eps, config.rms_eps) == (1e-3, 0.0)
    with pytest.raises(ModelFormatError, match=r"'a\.attention\.layer_norm_rms_epsilon' is missing"):
        Config.from_gguf(metadata)


def test_blocks_of_prediction_heads_are_used_by_heads_only() -> None:
    table = TensorTable()
    table.block().add("attn_norm", 4)
    assert not table.has_nextn
    block = table.block(nextn=True)
    block.add("nextn.eh_proj", 4, 8)
    block.add("nextn.shared_head_norm", 4, optional=True)
    assert table.has_nextn
    used, head = {"blk__0__attn_norm__weight": (4,)}, {"blk__1__nextn.eh_proj__weight": (4, 8)}
    for shapes in (used, used | head):
        weights = table.bind(file(**shapes))
        assert (len(weights.blk), weights.nextn) == (1, [])
    weights = table.bind(file(**used, **head), nextn=True)
    assert (len(weights.blk), len(weights.nextn)) == (1, 1)
    assert weights.nextn[0].nextn_eh_proj.weight.name == "blk.1.nextn.eh_proj.weight"
    assert weights.nextn[0].nextn_shared_head_norm is None
    assert table.shapes() == {"blk.0.attn_norm.weight": (4,)}
    with pytest.raises(ModelFormatError, match=r"tensor blk\.1\.nextn\.eh_proj\.weight is missing, expected \(4, 8\)"):
        table.bind(file(**used), nextn=True)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.uint8])
def test_window_patterns_may_be_stored_as_integers(dtype) -> None:
    key = "a.attention.sliding_window_pattern"
    layers = sliding_layers(Metadata({key: np.array([1, 0, 1], dtype)}), "a", 3, period=2)
    assert layers == (True, False, True)
    assert all(isinstance(layer, bool) for layer in layers)
    if dtype is not np.bool_:
        with pytest.raises(ModelFormatError, match=key):
            sliding_layers(Metadata({key: np.array([1, 2, 1], dtype)}), "a", 3, period=2)


def test_unused_blocks_may_be_in_files() -> None:
    table = TensorTable()
    table.block().add("attn_norm", 4)
    block = table.block(unused=True)
    block.add_fused("attn_qkv", bias=True, attn_q=(4, 4), attn_k=(4, 4))
    block.add_tensor("exp_probs_b.bias", 6)
    used, unused = (
        {"blk__0__attn_norm__weight": (4,)},
        {"blk__1__attn_k__bias": (4,), "blk__1__exp_probs_b__bias": (6,)},
    )
    for shapes in (used, used | unused):
        assert len(table.bind(file(**shapes)).blk) == 1
    assert {name.replace("__", ".") for name in unused} < table.unused
    assert "blk.0.attn_norm.weight" not in table.unused
    with pytest.raises(ModelFormatError, match=r"tensor blk\.1\.attn_k\.bias has shape \(5,\), expected \(4,\)"):
        table.bind(file(**used, blk__1__attn_k__bias=(5,)))


def test_a_weight_may_have_another_shape() -> None:
    table = TensorTable()
    table.add("gate", 4, 8, bias=True, other=(16, 8))
    for n in (4, 16):
        gate = table.bind(file(gate__weight=(n, 8), gate__bias=(n,))).gate
        assert (gate.weight.shape, gate.bias.shape) == ((n, 8), (n,))
    with pytest.raises(ModelFormatError, match=r"tensor gate\.weight has shape \(5, 8\), expected \(4, 8\)"):
        table.bind(file(gate__weight=(5, 8)))


def choice() -> TensorTable:
    table = TensorTable()
    for name in ("router", "experts", "up", "down"):
        table.add(name, 8, 8)
    table.choose(["router", "experts"], ["up", "down"])
    return table


def test_files_have_the_first_or_the_second_choice() -> None:
    square, table = (8, 8), choice()
    assert set(table.shapes()) == {"router.weight", "experts.weight"}
    first = table.bind(file(router__weight=square, experts__weight=square))
    assert first.router
    assert first.up is None
    second = table.bind(file(up__weight=square, down__weight=square))
    assert second.up
    assert second.router is None
    for given, missing in (("experts", "router"), ("up", "down"), ("down", "up")):
        with pytest.raises(ModelFormatError, match=rf"tensor {missing}\.weight is missing"):
            table.bind(file(**{f"{given}__weight": square}))


def test_second_choices_are_ignored_beside_the_first() -> None:
    square, table = (8, 8), choice()
    both = file(router__weight=square, experts__weight=square, up__weight=square)
    assert table.bind(both).router
    assert "up.weight" in table.ignored(both)
    assert "experts.weight" not in table.ignored(both)


def test_parameters_are_ignored_without_those_that_they_need() -> None:
    table = TensorTable()
    table.add("q_norm", 8, optional=True)
    table.add("k_norm", 8, optional=True, only_with="q_norm")
    assert "k_norm.weight" in table.ignored(file(k_norm__weight=(8,)))
    assert table.ignored(file(q_norm__weight=(8,), k_norm__weight=(8,))) == set()


def test_biases_may_be_unused() -> None:
    table = TensorTable()
    table.add("q", 8, 4)
    table.add_unused("q", 8, kind="bias")
    assert table.bind(file(q__weight=(8, 4), q__bias=(8,))).q.bias is None
    assert table.unused == {"q.bias"}
