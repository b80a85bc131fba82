"""Slices of a step table, between which Ctrl-C is handled."""

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import load_model
from llamacli.engine import native
from llamacli.plugins import Plugins

TOKENS = np.random.default_rng(3).integers(0, 128, 200).tolist()


@pytest.mark.parametrize("slice_work", [1.0, 1e5, 1e6])
@pytest.mark.parametrize("variant", ["gqa", "moe_8_2"])
def test_logits_do_not_depend_on_slices(
    variant: str, slice_work: float, tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_gguf(variant), "auto", plugins=plugins, engine=native.NativeEngine())
    with model.create_session() as session:
        expected = session.eval(TOKENS, all_logits=True)
    monkeypatch.setattr(native, "_SLICE_WORK", slice_work)
    with model.create_session() as session:
        np.testing.assert_array_equal(session.eval(TOKENS, all_logits=True), expected)
