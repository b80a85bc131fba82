"""Skeletons of plugins: their tests say what is left to do."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import checkpoint_cases
import tiny_variants
from conftest import TinyGguf
from llamacli import InvalidRequestError, ModelFormatError
from llamacli.checkpoints import CheckpointFile, Folder
from llamacli.gguf import open_gguf
from llamacli.loaders import open_model_file
from llamacli.media.encoder import MediaEncoder, SoundEncoder
from llamacli.testing import ConformanceError, check_shapes
from llamacli.testing.parametrize import checks_of
from llamacli.testing.scaffold import KINDS, Description, describe_folder, like, write_encoder_plugin, write_plugin
from llamacli.testing.scaffold.checkpoint import Layout
from llamacli.testing.tiny_media import write_mmproj
from llamacli_llama.idefics3 import Idefics3
from llamacli_llama.voxtral import Voxtral

Imported = tuple[Any, dict[str, Any], Path]
Write = Callable[..., Imported]

COMPLETE = [
    "gqa", "biases", "moe_8_2", "qwen3moe_top1", "granitemoe_shared", "gpt2", "smollm3", "olmo2", "cohere2", "phi3_gqa",
]  # fmt: skip
"""Variants whose tensors are all known to the skeleton."""

REFUSED = (
    *("hunyuan_one_expert", "gemma3n_keys", "gemma3n_shared"),  # no expert is used of one; infinite numbers
    *("deci", "rwkv6qwen2"),  # blocks without parts that the others have; heads that are not counted as such
    *("hrm_text", "hy_v3_nextn", "mimo2_nextn", "step35_nextn"),  # fewer blocks than `block_count`
    "nemotron_h_moe_puzzle",  # numbers of experts by layer
)
"""Variants whose keys do not say what their tensors are."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a skeleton and import it: its architecture and tiny variants."""
    modules: list[str] = []

    def make(description: Description, *, from_file: bool = False, layout: Layout | None = None) -> Imported:
        folder = tmp_path / "llamacli-written"
        write_plugin(folder, "written", description, from_file=from_file, layout=layout)
        monkeypatch.syspath_prepend(folder)
        modules.extend(["llamacli_written", "llamacli_written.tiny"])
        importlib.invalidate_caches()
        module, tiny = (importlib.import_module(name) for name in modules)
        modules.append("llamacli_written.checkpoints")
        return module.Written(), tiny.VARIANTS, folder

    yield make
    for name in modules:
        sys.modules.pop(name, None)


def run(architecture: Any, variants: dict[str, Any], *names: str) -> None:
    chosen = [check for check in checks_of(architecture, variants) if check.name in names and check.scope != "others"]
    assert len(chosen) == len(names)
    for check in chosen:
        check()


@pytest.mark.medium
def test_an_encoder_passes_all_checks(write: Write) -> None:
    architecture, variants, folder = write(like("encoder", "written"))
    assert "causal=False" in (folder / "llamacli_written" / "__init__.py").read_text()
    inert = importlib.import_module("llamacli_written.tiny").INERT
    names = []
    for check in checks_of(architecture, variants, inert=inert):
        if check.models():
            check()
            names.append(check.name)
    assert {"tables", "parameters", "batches", "threads", "mode_q8", "memory"} < set(names)
    assert not {"fork", "rewind", "cut", "saved_state"} & set(names)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("seen", None),
        pytest.param("seen_again", Idefics3(), marks=pytest.mark.slow),
        pytest.param("heard", None, marks=pytest.mark.slow),
        ("heard_again", Voxtral()),
    ],
    ids=["like vision", "from a file", "like sound", "from a file of sound"],
)
def test_a_media_encoder_passes_all_checks(
    name: str, source: MediaEncoder | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, hears = tmp_path / "plugin", name.startswith("heard")
    keys = {"projector.stack_factor": 4} if hears else None
    file = open_gguf(write_mmproj(tmp_path / "mmproj.gguf", architecture=source, keys=keys)) if source else None
    with contextlib.closing(file) if file else contextlib.nullcontext():
        write_encoder_plugin(folder, name, file, hears=hears)
    projector = source.name if source else name
    assert f'"{projector}" = "llamacli_{name}"' in (folder / "pyproject.toml").read_text().split('"llamacli.media"]')[1]
    monkeypatch.syspath_prepend(folder)
    module, tiny = (importlib.import_module(f"llamacli_{name}{part}") for part in ("", ".tiny"))
    encoder = getattr(module, name.title().replace("_", ""))()
    assert isinstance(encoder, SoundEncoder) == hears
    names = []
    for check in checks_of(encoder, tiny.MEDIA, inert=tiny.INERT):
        if check.models():
            check()
            names.append(check.name)
    assert {"tables", "keys", "tensors", "layouts", "parameters", "threads", "mode_q8", "memory"} <= set(names)
    assert "pieces" not in names


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_kinds_pass_their_checks(kind: str, write: Write) -> None:
    architecture, variants, _ = write(like(kind, "written"))
    run(architecture, variants, "tables", "keys", "tensors", "last_rows", "mode_fp32")


def test_what_is_left_to_do_is_said(write: Write) -> None:
    architecture, variants, folder = write(like("hybrid", "written"))
    with pytest.raises(ConformanceError, match=r"the forward pass leaves out blk\.0\.attn_norm\.weight, .*ssm_a"):
        run(architecture, variants, "tables")
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert "if (i + 1) % c.full_attention_interval == 0:" in code
    assert "# Left to do: block.ssm_conv1d (64, 4): causal convolution, " in code


@pytest.mark.parametrize("variant", COMPLETE)
def test_tables_fit_the_file_that_they_are_made_from(variant: str, write: Write, tiny_gguf: TinyGguf) -> None:
    architecture, variants, folder = write(Description.of(open_model_file(tiny_gguf(variant), [])), from_file=True)
    file = json.loads((folder / "tests" / "file.json").read_text())
    check_shapes(architecture, file["keys"], file["shapes"])
    run(architecture, variants, "tables", "tensors")


@pytest.mark.parametrize("variant", sorted(tiny_variants.VARIANTS))
@pytest.mark.slow
def test_every_variant_can_be_described(variant: str, write: Write, tiny_gguf: TinyGguf) -> None:
    architecture, _, folder = write(Description.of(open_model_file(tiny_gguf(variant), [])), from_file=True)
    file = json.loads((folder / "tests" / "file.json").read_text())
    left = pytest.raises(ModelFormatError) if variant in REFUSED else contextlib.nullcontext()
    with left:
        check_shapes(architecture, file["keys"], file["shapes"])


def test_shapes_are_in_terms_of_the_configuration(write: Write, tiny_gguf: TinyGguf) -> None:
    _, _, folder = write(Description.of(open_model_file(tiny_gguf("qwen3moe"), [])), from_file=True)
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    for line in (
        'block.add("attn_q", n_q, c.n_embd)',
        'block.add("attn_q_norm", c.head_dim)',
        'block.add("ffn_up_exps", c.n_expert, c.expert_feed_forward_length, c.n_embd)',
        'expert_feed_forward_length=metadata.get_int(f"{self.name}.expert_feed_forward_length", minimum=0),',
    ):
        assert line in code


def test_sizes_that_differ_between_layers(write: Write, tiny_gguf: TinyGguf) -> None:
    _, _, folder = write(Description.of(open_model_file(tiny_gguf("lfm2"), [])))
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert 'block.add("attn_k", c.attention_head_count_kv[i] * c.head_dim, c.n_embd)' in code
    assert "attention_head_count_kv: tuple[int, ...]" in code


def test_keys_by_layer(write: Write, tiny_gguf: TinyGguf) -> None:
    """The tiny models of a skeleton have fewer layers than its file."""
    described = Description.of(open_model_file(tiny_gguf("gqa"), []))
    n, keys = 7, dict(described.keys)
    shapes = {name: shape for name, shape in described.shapes.items() if not name.startswith("blk.")}
    for i in range(n):
        shapes |= {name.replace("blk.0", f"blk.{i}"): x for name, x in described.shapes.items() if "blk.0." in name}
    keys |= {"block_count": n, "feed_forward_length": [96] * n, "rope.pattern": [True, False] * 3 + [True]}
    architecture, variants, folder = write(Description("written", keys, shapes), from_file=True)
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert 'n_layer = metadata.get_int(f"{self.name}.block_count", minimum=1, maximum=1 << 10)' in code
    assert 'max(1, *metadata.get_ints(f"{self.name}.feed_forward_length", n_layer, minimum=0))' in code
    assert 'metadata.get_bools(f"{self.name}.rope.pattern", n_layer)' in code
    run(architecture, variants, "tables", "keys", "tensors", "mode_fp32")


def test_keys_of_layers_are_preferred_in_conditions(write: Write, tiny_gguf: TinyGguf) -> None:
    described = Description.of(open_model_file(tiny_gguf("gqa"), []))
    keys = described.keys | {"expert_shared_count": 1, "leading_dense_block_count": 1}
    shapes = {**described.shapes, "blk.0.ffn_odd.weight": (3, 3)}
    _, _, folder = write(Description("written", keys, shapes))
    assert "if i < c.leading_dense_block_count:" in (folder / "llamacli_written" / "__init__.py").read_text()


def test_sizes_of_layers_without_a_rule(write: Write, tiny_gguf: TinyGguf) -> None:
    described = Description.of(open_model_file(tiny_gguf("gqa"), []))
    odd = described.shapes | {"blk.0.ffn_up.weight": (96, 64), "blk.1.ffn_up.weight": (80, 64)}
    _, _, folder = write(Description("written", described.keys, odd))
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert 'block.add("ffn_up", {0: 96, 1: 80}[i], c.n_embd)' in code
    assert "for i in range(c.n_layer):" in code


def test_values_of_another_width(write: Write, tiny_gguf: TinyGguf) -> None:
    _, _, folder = write(Description.of(open_model_file(tiny_gguf("plm_wide_values"), [])))
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert '"head_dim": metadata.get_int(f"{self.name}.attention.key_length", minimum=1),' in code
    assert "attention_value_length: int" in code


def test_keys_that_nothing_depends_on_are_left_to_do(write: Write, tiny_gguf: TinyGguf) -> None:
    _, _, folder = write(Description.of(open_model_file(tiny_gguf("granite"), [])))
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert "# Left to do: c.logit_scale, granite.logit_scale in the file: nothing depends on it" in code
    assert "# Left to do: c.n_" not in code


def test_bound_where_llama_cpp_rounds(write: Write, tiny_gguf: TinyGguf) -> None:
    _, variants, folder = write(Description.of(open_model_file(tiny_gguf("gpt2"), [])))
    assert variants["written"][2] == 1e-5
    tiny = (folder / "llamacli_written" / "tiny.py").read_text()
    assert '"attention.layer_norm_epsilon": 1e-05,' in tiny
    assert 'INERT = ["*.attn_k.bias"]' in tiny


def unheard(folder: Path, case: str, **fields: object) -> Folder:
    """Folder of a class that no plugin reads."""
    path = checkpoint_cases.write_checkpoint(folder, case)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["UnheardForCausalLM"]} | fields))
    return Folder(path)


@pytest.mark.parametrize("case", ["gemma3", "qwen3moe", "phi2"])
def test_folders_that_no_plugin_reads(case: str, write: Write, tmp_path: Path) -> None:
    folder = unheard(tmp_path, case)
    description, layout = describe_folder(folder, "written")
    architecture, variants, written = write(description, from_file=True, layout=layout)
    assert '"UnheardForCausalLM" = "llamacli_written.checkpoints"' in (written / "pyproject.toml").read_text()
    file = CheckpointFile(folder, importlib.import_module("llamacli_written.checkpoints").CHECKPOINT)
    found = Description.of(file)
    assert (found.keys, found.shapes) == (description.keys, description.shapes)
    assert "tokenizer.ggml.tokens" in file.metadata
    check_shapes(architecture, description.keys, description.shapes)
    assert variants["written"][1]["keys"]["block_count"] >= 2


def test_what_is_left_to_do_of_a_folder(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    fields = {"layer_types": kinds, "odd_scale": 0.5, "hidden_act": "relu2", "odd": [1, "a"], "hidden_dropout": 0.1}
    folder = unheard(tmp_path, "qwen2", partial_rotary_factor=0.5, **fields)
    cut = {name: entry for name, entry in folder.entries.items() if "lm_head" not in name}
    folder.entries = {**cut, "model.layers.0.odd_mixer.dt_bias": cut["model.norm.weight"]}
    (folder.path / "tokenizer.json").write_text('{"model": {"type": "Odd"}}')
    description, layout = describe_folder(folder, "written")
    assert description.keys["rope.dimension_count"] == 8
    assert (description.keys["attention.sliding_window_pattern"], description.keys["odd_scale"]) == ([True, False], 0.5)
    assert layout.left == {"hidden_act": "relu2", "odd": [1, "a"]}
    assert layout.vocabulary == ()
    assert layout.tensors["model.layers.{}.odd_mixer.dt_bias"] == "blk.{}.odd_mixer_dt_bias"
    assert description.shapes["blk.0.odd_mixer_dt_bias"] == (64,)
    assert layout.config["num_hidden_layers"] == 2
    assert layout.config["tie_word_embeddings"]


@pytest.mark.slow
def test_a_folder_that_was_written_by_transformers(write: Write, tmp_path: Path) -> None:
    """StarCoder 2: the skeleton is whole, its random models agree."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "starcoder2", vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "folder")
    description, layout = describe_folder(Folder(tmp_path / "folder"), "written")
    architecture, variants, _ = write(description, from_file=True, layout=layout)
    models = importlib.import_module("llamacli_written.tiny").TRANSFORMERS["written"]
    check = checks_of(architecture, variants, transformers=models)[0]
    assert (check.name, len(check.models())) == ("transformers", 2)
    check()


@pytest.mark.parametrize("name", ["My", "1x", "a b", "class", ""])
def test_names_are_checked(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="must be lower-case letters"):
        write_plugin(tmp_path / "x", name, like("dense", "x"), from_file=False)


def test_existing_folders_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="exists already"):
        write_plugin(tmp_path, "x", like("dense", "x"), from_file=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tests_of_skeletons_run(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "llamacli-written"
    write_plugin(folder, "written", like(kind, "written"), from_file=False)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "tables or tensors or pieces"],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (kind != "hybrid"), done.stdout
    assert ("the forward pass leaves out" in done.stdout) == (kind == "hybrid")
