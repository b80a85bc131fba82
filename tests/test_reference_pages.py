"""Pages of samplers and cache types, made from docstrings and tables."""

import inspect
import re
from pathlib import Path

import attrs
import pytest

import llamacli.plugin
from llamacli import SamplingParams, sampling
from llamacli.kernels.kv_types.types import KV_TYPES
from llamacli.sampling import Sampler, SamplerChain
from llamacli.util.sampling_params import SAMPLERS
from reference_pages import PAGES, cache_types_page, samplers_page

DOCS = Path(__file__).parents[1] / "docs"

OTHERS = {"stop", "samplers", "options", "n_probs", "post_sampling_probs"}
"""Fields that belong to no sampler."""


@pytest.mark.parametrize("file", PAGES)
def test_page_is_up_to_date(file: str) -> None:
    assert (DOCS / file).read_text(encoding="utf-8") == PAGES[file](), "python tools/reference_pages.py"


def test_every_sampler_has_a_section() -> None:
    described = {path.partition(".")[2] for entry in SAMPLERS for path in entry.classes.split()}
    exported = {name: getattr(sampling, name) for name in sampling.__all__}
    samplers = {name for name, kind in exported.items() if inspect.isclass(kind) and issubclass(kind, Sampler)}
    assert described == samplers - {Sampler.__name__, SamplerChain.__name__}


def test_every_parameter_has_a_section() -> None:
    of = {field.name: field.metadata.get("sampler") for field in attrs.fields(SamplingParams)}
    assert {name for name, title in of.items() if not title} == OTHERS
    assert {title for title in of.values() if title} <= {entry.title for entry in SAMPLERS}
    assert "| `general.sampling.temp` |" in samplers_page()


def test_every_name_of_a_plugin_is_described() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \| (.*) \|$", PAGES["plugin-names.md"](), re.M)
    assert sorted(name for name, _, _ in rows) == sorted(llamacli.plugin.__all__)
    assert [name for name, _, text in rows if not text] == []
    assert {(DOCS / file).is_file() for _, file, _ in rows} == {True}


def test_every_cache_type_has_a_section_and_a_size() -> None:
    page = cache_types_page()
    assert [f"\n## {name}\n" in page for name in KV_TYPES] == [True] * len(KV_TYPES)
    assert "| [`q5_1`](#q5_1) | 6 | 96 |" in page
    assert "| [`f16`](#f16) | 16 | 256 |" in page
