import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import InvalidRequestError
from llamacli.graph import AttentionState
from llamacli.kv import PAGE, KVCache

states = st.lists(st.builds(AttentionState, st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3)


@given(states, st.integers(1, 100), st.sampled_from(["f32", "f16"]))
def test_whole_pages_of_every_layer(layers: list[AttentionState], seq_len: int, kv_type: str) -> None:
    cache = KVCache(layers, seq_len, kv_type)
    n_pages = -(-seq_len // PAGE)
    size = {"f32": 4, "f16": 2}[kv_type]
    assert cache.n_bytes == sum(2 * n_pages * PAGE * layer.n_head_kv * layer.head_dim * size for layer in layers)
    for k, v, layer in zip(cache.k, cache.v, layers, strict=True):
        assert k.shape == (n_pages, layer.n_head_kv, layer.head_dim, PAGE)
        assert v.shape == (n_pages, layer.n_head_kv, PAGE, layer.head_dim)
        assert k.itemsize == v.itemsize == size
        assert not k.any()
        assert not v.any()
    assert (cache.kv_type, cache.seq_len) == (kv_type, seq_len)


def test_layers_share_nothing() -> None:
    cache = KVCache([AttentionState(2, 4)] * 2, 20, "f32")
    arrays = [*cache.k, *cache.v]
    for i, array in enumerate(arrays):
        array[...] = i + 1
    assert [np.unique(array).tolist() for array in arrays] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("kv_type", ["F32", "q8_0", "", None])
def test_unknown_types(kv_type: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not one of f32, f16"):
        KVCache([AttentionState(1, 4)], 16, kv_type)
