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

import tiny_variants
from conftest import TinyGguf
from llamacli import InvalidRequestError, ModelFormatError
from llamacli.loaders import open_model_file
from llamacli.testing import ConformanceError, check_shapes
from llamacli.testing.parametrize import checks_of
from llamacli.testing.scaffold import KINDS, Description, like, write_plugin

Imported = tuple[Any, dict[str, Any], Path]
Write = Callable[..., Imported]

COMPLETE = [
    "gqa", "biases", "moe_8_2", "qwen3moe_top1", "granitemoe_shared", "gpt2", "smollm3", "olmo2", "cohere2", "phi3_gqa",
]  # fmt: skip
"""Variants whose tensors are all known to the skeleton."""

UNEVEN = ("gemma4", "hunyuan_one_expert")
"""Variants whose layers differ in shape, or whose counts contradict each other: the test of the table says so."""

UNUSUAL = frozenset(
    [
        "deepseek2",
        "deepseek2_groups",
        "deepseek2_legacy_yarn",
        "deepseek2_linear",
        "deepseek2_lite",
        "deepseek2_nextn",
        "deepseek2_q4_k",
        "deepseek2_q8_0",
        "deepseek2_temperature",
        "deepseek2_yarn",
        "deepseek2_yarn_multiplier",
        "gemma3n_keys",
        "gemma3n_shared",
        "jamba",
        "jamba_experts",
        "lfm2",
        "lfm2_q4_k",
        "lfm2_q8_0",
        "lfm2_untied_fused",
        "lfm2_window",
        "lfm2moe",
        "lfm2moe_q4_k",
        "lfm2moe_softmax",
        "mamba",
        "mamba2",
        "mamba2_groups",
        "mamba2_q4_k",
        "mamba2_q8_0",
        "mamba2_wide_heads",
        "mamba_normed",
        "mamba_q4_k",
        "mamba_q8_0",
        "mamba_tied",
        "minicpm3_q4_k",
        "minicpm3_tied",
        "plm_q4_k",
        "plm_wide_values",
        "rwkv7",
        "rwkv7_q4_k",
        "rwkv7_q8_0",
        "rwkv7_wide_heads",
    ]
)
"""Variants without attention or with keys that a skeleton cannot read: values of another width, arrays of floats."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a skeleton and import it: its architecture and tiny variants."""
    modules: list[str] = []

    def make(description: Description, *, from_file: bool = False) -> Imported:
        folder = tmp_path / "llamacli-written"
        write_plugin(folder, "written", description, from_file=from_file)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.syspath_prepend(folder / "tests")
        modules.extend(["llamacli_written", "tiny_written"])
        importlib.invalidate_caches()
        module, tiny = (importlib.import_module(name) for name in modules)
        return module.Written(), tiny.VARIANTS, folder

    yield make
    for name in modules:
        sys.modules.pop(name, None)


def run(architecture: Any, variants: dict[str, Any], *names: str) -> None:
    chosen = [check for check in checks_of(architecture, variants) if check.name in names and check.scope != "others"]
    assert len(chosen) == len(names)
    for check in chosen:
        check()


@pytest.mark.parametrize("kind", ["dense", "moe", "encoder"])
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
    is_left = variant.startswith(UNEVEN) or variant in UNUSUAL
    left = pytest.raises(ModelFormatError) if is_left else contextlib.nullcontext()
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


def test_keys_that_nothing_depends_on_are_left_to_do(write: Write, tiny_gguf: TinyGguf) -> None:
    _, _, folder = write(Description.of(open_model_file(tiny_gguf("granite"), [])))
    code = (folder / "llamacli_written" / "__init__.py").read_text()
    assert "# Left to do: c.logit_scale, granite.logit_scale in the file: nothing depends on it" in code
    assert "# Left to do: c.n_" not in code


def test_bound_where_llama_cpp_rounds(write: Write, tiny_gguf: TinyGguf) -> None:
    _, variants, folder = write(Description.of(open_model_file(tiny_gguf("gpt2"), [])))
    assert variants["written"][2] == 1e-5
    tiny = (folder / "tests" / "tiny_written.py").read_text()
    assert '"attention.layer_norm_epsilon": 1e-05,' in tiny
    assert 'INERT = ["*.attn_k.bias"]' in tiny


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
