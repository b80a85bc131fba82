"""The catalog names every kernel that there is."""

import ast
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

import llamacli.kernels.catalog as catalog_module
from conftest import TinyGguf
from llamacli import load_model
from llamacli.engine.catalog import _steps_of, catalog
from llamacli.engine.examples import op_classes
from llamacli.kernels.jit import Compiled, Kernel
from llamacli.kernels.team import Team
from llamacli.plugins import ARCHITECTURES, GENERAL, Plugins
from paths import is_of_this_project
from random_graphs import MAKERS, random_example
from suite import REPRESENTATIVES
from tiny_variants import ENCODERS, VARIANTS

SOURCES = sorted(Path(catalog_module.__file__).parent.glob("*.py"))


def made() -> set[str]:
    """Public functions that make kernels, by their annotations."""
    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            match node:
                case ast.FunctionDef(name=name, returns=ast.Name(id="Kernel")) if not name.startswith("_"):
                    found.add(name)
    return found - {"kernel"}


def test_every_maker_of_kernels_is_in_it() -> None:
    of_ops = {"lanewise", "state_kernel", "kernel_of"}  # made for ops, which give examples of themselves
    of_ops |= {"product_of"}  # of a packing, as the makers of the catalog call it
    assert {make.__name__ for make, _ in catalog_module._FAMILIES} | of_ops == made()


def test_every_module_with_kernels_is_in_it() -> None:
    decorated = set()
    for source in SOURCES:
        if any(
            line.startswith(("@kernel", "@compiled", "@array_function")) for line in source.read_text().splitlines()
        ):
            decorated.add(source.stem)
    assert decorated <= {module.__name__.rsplit(".", 1)[1] for module in catalog_module._MODULES}


TESTS = Path(__file__).parents[1]

RANDOM = {
    "pack_kernel": "kernels/test_linear.py::test_packed_rows_of_random_shapes",
    "embedding": "kernels/test_linear.py::test_packed_rows_of_random_shapes",
    "linear": "kernels/test_linear.py::test_products_of_random_shapes_strides_and_groups",
    "tiled_linear": "kernels/test_prompt_tiles.py::test_products_have_the_bits_of_simulated_tiles",
    "round_activations": "kernels/test_linear.py::test_activations_of_random_shapes_and_strides",
    "store_kv": "kernels/test_attention.py::test_attention_of_random_shapes_and_strides",
    "attention": "kernels/test_attention.py::test_attention_of_random_shapes_and_strides",
    "tiled_attention": "kernels/test_attention.py::test_attention_of_random_shapes_and_strides",
    "latent_attention": "kernels/test_attention.py::test_attention_of_random_shapes_and_strides",
    "linear_state": "ops/test_random_shapes.py::test_kernels_compute_what_numpy_does",
    "deepstack": "ops/test_deepstack.py::test_rows_of_random_shapes_add_their_parts",
    "encode_scaled": "kernels/test_encoding.py::test_codes_of_random_shapes_are_the_nearest",
    "encode_shifted": "kernels/test_encoding.py::test_codes_of_random_shapes_are_the_nearest",
    "encode_groups": "kernels/test_codebook_encoding.py::test_finite_numbers_stay_finite",
    "kth_largest": "kernels/test_sampling_kernels.py::test_kth_largest",
    "apply_steps": "kernels/test_sampling_kernels.py::test_keep_from",
    "keep_where": "kernels/test_sampling_kernels.py::test_keep_where",
    "sort_falling": "kernels/test_sampling_kernels.py::test_falling_order",
    "log_sum_exp": "kernels/test_sampling_kernels.py::test_exponentials",
    "softmax": "kernels/test_sampling_kernels.py::test_exponentials",
    "entropy": "kernels/test_sampling_kernels.py::test_exponentials",
    "deviation": "kernels/test_sampling_kernels.py::test_deviation",
    "repeat_lengths": "kernels/test_sampling_kernels.py::test_repeat_lengths",
    "fill_slots": "tokenizer/test_merging.py::test_ranked_merges_match_the_definition",
    "join_merges": "tokenizer/test_merging.py::test_ranked_merges_match_the_definition",
    "foreign_merge": "tokenizer/test_merging.py::test_ranked_merges_match_the_definition",
    "mark_joints": "tokenizer/test_merging.py::test_merges_by_score_match_the_definition",
    "merge_words": "tokenizer/test_merging.py::test_merges_by_score_match_the_definition",
    "decode_bytes": "tokenizer/test_byte_level.py::test_round_trip",
    "fill_trie": "tokenizer/test_unigram.py::test_sum_of_scores_is_the_best_of_all",
    "encode_unigram": "tokenizer/test_unigram.py::test_sum_of_scores_is_the_best_of_all",
    "normalize": "tokenizer/test_unigram.py::test_longest_key_is_replaced",
}
"""Test by Hypothesis of each function that makes kernels, and of each single one; those of ops have random graphs."""

OF_TEAMS = {"_run_job", "_worker_loop", "_prepare", "_spin", "_handle_fault"}
"""Functions that run kernels, and the handler of faults: they compute nothing themselves."""


def of_ops() -> set[str]:
    """Names of the kernels that random graphs of ops run."""
    team, names = Team(1), set()
    for maker in MAKERS:
        for seed in range(4):
            for step in _steps_of(random_example(maker, random.Random(seed).randint), team):
                kernels = (
                    [step.kernel] if isinstance(step.kernel, Kernel | None) else map(step.kernel, catalog_module.CACHES)
                )
                names |= {kernel.name for kernel in kernels if kernel}
    return names


def plain(name: str) -> str:
    """Name of a tokenizer function in its module."""
    return name.removeprefix("tokenizer_")


def test_every_kernel_is_compared_on_random_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [op for op in op_classes() if is_of_this_project(op)]  # other tests define some
    monkeypatch.setattr("llamacli.engine.catalog.op_classes", lambda: ops)
    families = {
        kernel.name: make.__name__ for make, variants in catalog_module._FAMILIES for kernel in map(make, variants())
    }
    of_graphs = of_ops()
    missing = {
        kernel.name
        for kernel in catalog()
        if families.get(kernel.name, plain(kernel.name)) not in RANDOM and kernel.name not in OF_TEAMS | of_graphs
    }
    assert missing == set()


@pytest.mark.parametrize("test", sorted(set(RANDOM.values())))
def test_comparisons_are_by_hypothesis(test: str) -> None:
    path, name = test.split("::")
    (found,) = [
        node for node in ast.parse((TESTS / path).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]  # fmt: skip
    assert any(ast.unparse(decorator).startswith("given(") for decorator in found.decorator_list)


LIMITED = {name for name, variant in VARIANTS.items() if variant.family in ("bailing", "deepseek", "llama")}
"""Models whose SwiGLU has a limit from the file, with a kernel for each."""


def check_listed(names: Iterable[str], tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load tiny models, and evaluate a token of those that have logits."""
    used, compile_one = dict[str, str](), Compiled.compile

    def compile_noted(kernel: Compiled) -> int:
        used.setdefault(kernel.name, name)
        return compile_one(kernel)

    for group in (GENERAL, ARCHITECTURES):
        plugins.load_group(group)
    monkeypatch.setattr(Compiled, "compile", compile_noted)
    for name in sorted(names):
        with load_model(tiny_gguf(name), plugins=plugins) as model:
            if name in VARIANTS:
                with model.create_session(n_ctx=16) as session:
                    session.eval(model.encoder_inputs([1]) if model.program.has_encoder else [1])
    listed = {kernel.name for kernel in catalog()}
    assert len(used) > 20
    missing = {name: variant for name, variant in used.items() if name not in listed}
    assert {
        (name, variant) for name, variant in missing.items() if not (variant in LIMITED and "_gated_" in name)
    } == set()


@pytest.mark.medium
def test_kernels_of_architectures_are_listed(tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch) -> None:
    check_listed(REPRESENTATIVES, tiny_gguf, plugins, monkeypatch)


@pytest.mark.slow
def test_kernels_of_every_tiny_model_are_listed(tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch) -> None:
    check_listed(VARIANTS | ENCODERS, tiny_gguf, plugins, monkeypatch)


def test_names_are_unique() -> None:
    kernels = catalog()
    assert len({kernel.name for kernel in kernels}) == len(kernels) > 40
    names = {kernel.name for kernel in kernels}
    assert {"rms_norm", "_run_job", "linear_Q4_K", "pack_floats_4_1_4", "attention_f16"} <= names
    assert any(name.startswith("lanewise_gated_vv_") for name in names)
