"""Parts of files whose architecture no plugin runs."""

from pathlib import Path

import pytest

from llamacli import UnknownArchitectureError, load_model
from llamacli.gguf import Metadata
from llamacli.graph import verbs
from llamacli.parts import describe_parts, own_keys, parts_of
from llamacli.plugins import Plugins
from llamacli.testing.models import write_model

SHAPES = {
    "token_embd.weight": (100, 16),
    "output_norm.weight": (16,),
    "blk.0.attn_q.weight": (16, 16),
    "blk.0.attn_q.bias": (16,),
    "blk.1.attn_q.weight": (16, 16),
    "blk.0.attn_q_norm.weight": (4,),
    "blk.0.ffn_gate_inp.weight": (4, 16),
    "blk.0.ffn_up_shexp.weight": (32, 16),
    "blk.0.indexer.k.weight": (8, 16),
    "blk.0.wondrous": (7, 3),
}


def test_parts_are_named_once() -> None:
    found = {part.name: (part.verb, part.shape) for part in parts_of(SHAPES)}
    assert found == {
        "token_embd": ("embed", (100, 16)),
        "output_norm": ("rms_norm", (16,)),
        "attn_q": ("attention", (16, 16)),
        "attn_q_norm": ("rms_norm", (4,)),
        "ffn_gate_inp": ("moe", (4, 16)),
        "ffn_up_shexp": ("swiglu", (32, 16)),
        "indexer.k": ("", (8, 16)),
        "wondrous": ("", (7, 3)),
    }


def test_own_keys() -> None:
    keys = {"general.architecture": "x", "x.block_count": 1, "x.rope.freq_base": 1.0, "x.odd": 1, "y.other": 2}
    assert own_keys(Metadata(keys)) == ["x.odd"]


def test_description() -> None:
    metadata = Metadata({"general.architecture": "x", "x.odd": 1})
    assert describe_parts(metadata, SHAPES) == (
        "its tensors are computed by g.attention, g.embed, g.moe, g.rms_norm, g.swiglu; no verb of this core computes "
        "indexer.k (8, 16) (sparse or relative attention); unknown tensors: wondrous (7, 3); its own keys: odd"
    )


@pytest.mark.parametrize(("name", "verb"), [("ssm_conv1d", "short_conv"), ("ssm_a", "linear_state")])
def test_verbs_that_the_core_lacks_are_missing(name: str, verb: str) -> None:
    text = describe_parts(Metadata({"general.architecture": "x"}), {f"blk.0.{name}": (4, 4)})
    assert (f"no verb of this core computes {name}" in text) == (verb not in verbs())


def test_error_of_loading(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "unheard", {"unheard.odd": 3}, {"blk.0.wondrous.weight": (8, 4)}, seed="x")
    with pytest.raises(UnknownArchitectureError, match=r"'unheard' .*unknown tensors: wondrous \(8, 4\).* keys: odd"):
        load_model(path, plugins=Plugins([]))
