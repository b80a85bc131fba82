"""Table of sampling parameters, and what derives from it."""

import ast
from pathlib import Path

import attrs
import msgspec
import pytest

import llamacli
from llamacli import InvalidRequestError, SamplingParams
from llamacli.cli.numbers import Integer
from llamacli.cli.run import run
from llamacli.sampling import BUILT_IN, sampler_type
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.common import SAMPLING_FIELDS, Sampling
from llamacli.serve.http.schemas.ollama import OllamaOptions
from llamacli.util.sampling_params import DEFAULT_ORDER, ORDER, PARAMETERS, SAMPLERS

CORE = Path(llamacli.__file__).parent
TABLE = "util/sampling_params.py"

ELSEWHERE = {
    "sampling/registry.py": "the sampler that draws is chosen by them",
    "sampling/defaults.py": "windows of -1 are the context",
    "serve/http/schemas/common.py": "a second name",
    "serve/http/schemas/ollama.py": "the options that ollama has",
    "serve/http/schemas/responses.py": "the fields that OpenAI has",
    "serve/http/openai/responses.py": "the fields that OpenAI has",
    "chat/completions.py": "the arguments that llama-cpp-python has",
    "compat/llama_cpp.py": "the defaults that llama-cpp-python has",
    "prefix/session.py": "the arguments that its API has",
}
"""Files with names of parameters beside the table and samplers, and why."""

EVERYDAY = {"temperature", "top_k", "top_p", "mirostat"}
"""Names that programs set, or that are words."""


def names_in(path: Path) -> set[str]:
    """Names, attributes, arguments and texts of a source that are parameters."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.keyword(arg=str(name))
                | ast.Constant(value=str(name))
            ):
                found.add(name)
    return found & PARAMETERS.keys()


def test_a_parameter_is_named_by_the_table_and_its_sampler_alone() -> None:
    modules = {entry.title: f"sampling/{entry.classes.partition('.')[0]}.py" for entry in SAMPLERS}
    for path in CORE.rglob("*.py"):
        file = str(path.relative_to(CORE))
        if file == TABLE or file in ELSEWHERE:
            continue
        others = {name for name in names_in(path) if modules[PARAMETERS[name].sampler] != file}
        assert others <= EVERYDAY, file


def test_the_search_finds_names(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("f(min_p=1); x.xtc_threshold; ['typical_p']; dry_base = 1")
    assert names_in(source) == {"min_p", "xtc_threshold", "typical_p", "dry_base"}


def test_samplers_are_in_both_orders_or_first_or_draw() -> None:
    named = {entry.name for entry in SAMPLERS if entry.name}
    assert named == {kind.name for kind in BUILT_IN}
    others = {"adaptive_p", "infill"}  # one draws, one is for a single use
    assert {*DEFAULT_ORDER} == {*ORDER} == {one.name for one in SAMPLERS if one.name and not one.first} - others
    assert all(sampler_type(alias) for entry in SAMPLERS for alias in (entry.name, *entry.aliases) if alias)


@pytest.mark.parametrize("one", PARAMETERS.values(), ids=lambda one: one.name)
def test_option_and_schema_have_the_range(one) -> None:
    (option,) = (param for param in run.params if param.name == one.name)
    assert (option.type.min, option.type.max) == (one.low, one.high)
    assert isinstance(option.type, Integer) == one.is_integer
    assert one.help in option.help
    assert SAMPLING_FIELDS[one.name] == one.name
    for kind in (Sampling, OllamaOptions) if one.name in OllamaOptions.__struct_fields__ else (Sampling,):
        assert getattr(msgspec.convert({one.name: one.default}, kind), one.name) == one.default
        for wrong in [one.low - 1] if one.high is None else [one.low - 1, one.high + 1]:
            with pytest.raises(msgspec.ValidationError, match=one.name):
                msgspec.convert({one.name: wrong}, kind)
    if one.high is not None:
        with pytest.raises(InvalidRequestError, match=one.name):
            SamplingParams(**{one.name: one.high + 1})


def test_fields_are_typed_and_described() -> None:
    for field in attrs.fields(SamplingParams):
        assert f"`{field.name}`: " in (SamplingParams.__doc__ or "")
        if field.name in PARAMETERS:
            assert field.type == ("int" if PARAMETERS[field.name].is_integer else "float")
    described = msgspec.json.schema(ChatRequest)["$defs"]["ChatRequest"]["properties"]["min_p"]["anyOf"]
    assert PARAMETERS["min_p"].help in str(described)
