import json
import math

import attrs
import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import SamplingParams
from llamacli.cli.run import run
from llamacli.cli.sampling import sampling_params
from llamacli.gguf import Metadata
from llamacli.util.sampling_params import ORDER, PARAMETERS

SETTINGS = [param for param in run.params if param.name in PARAMETERS]
PROMPT = "once upon a time"
DEFAULTS = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    samplers=("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
)
"""Defaults of llama.cpp."""
IN_FILE = {
    "temp": 0.5,
    "top_k": 7,
    "top_p": 0.25,
    "min_p": 0.125,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "penalty_repeat": 1.5,
    "penalty_last_n": 9,
    "mirostat": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.25,
    "sequence": "temperature;top-k",
}
FIELDS = {
    "temp": "temperature",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    "sequence": "samplers",
}


def parse(*args: str) -> dict:
    """Parse the parameters of `run`."""
    with run.make_context("run", list(args)) as ctx:
        return ctx.params


def test_defaults_are_those_of_llama_cpp() -> None:
    assert sampling_params(parse(), Metadata({}), 512) == DEFAULTS


@given(st.sets(st.sampled_from(sorted(IN_FILE))), st.sets(st.sampled_from(SETTINGS)))
def test_precedence_of_options_file_and_defaults(in_file: set[str], given_: set) -> None:
    expected = {FIELDS.get(name, name): IN_FILE[name] for name in in_file}
    if "sequence" in in_file:
        expected["samplers"] = ("temperature", "top-k")
    arguments = []
    for setting in given_:
        expected[setting.name] = (
            1 if isinstance(setting.type, click.IntRange) else 0.75 if setting.type.min < 1 else 1.25
        )
        arguments += [setting.opts[-1], str(expected[setting.name])]
    metadata = Metadata({f"general.sampling.{name}": IN_FILE[name] for name in in_file})
    assert sampling_params(parse(*arguments), metadata, 512) == attrs.evolve(DEFAULTS, **expected)


def test_every_parameter_has_an_option() -> None:
    others = {"logit_bias", "dry_sequence_breakers", "samplers", "n_probs", "grammar", "json_schema", "stop"}
    others |= {"options", "reasoning_budget_message"}
    by_program_only = {"suppress_tokens", "grammar_triggers", "grammar_after", "reasoning_markers"}
    by_program_only |= {"post_sampling_probs", "allowed_token_ids", "bad_words", "end_token_ids"}
    fields = {field.name for field in attrs.fields(SamplingParams)}
    assert fields == {setting.name for setting in SETTINGS} | others | by_program_only


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_values_out_of_range_are_usage_errors(setting, invoke) -> None:
    wrong = [setting.type.min - 1] if setting.type.max is None else [setting.type.min - 1, setting.type.max + 1]
    for value in [*wrong, "x"]:
        for flag in setting.opts:
            result = invoke("run", "-p", PROMPT, flag, value)
            assert result.exit_code == 2
            assert flag in result.stderr
    result = invoke("run", "-p", PROMPT, setting.opts[0], wrong[0])
    low, high = setting.type.min, setting.type.max
    said = f"of at least {low}." if high is None else f"from {low:.15g} to {high:.15g}."
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize("value", ["15043", "+1", "5+", "5+x", "5+nan", "-5+1", "5+1e9", "5+1000001", "५+1"])
def test_invalid_logit_bias(value: str, invoke) -> None:
    result = invoke("run", "-p", PROMPT, "--logit-bias", value)
    assert result.exit_code == 2
    assert "is not a token id and a number from -1000000 to 1000000 or inf" in result.stderr


def test_logit_biases_add_up() -> None:
    params = sampling_params(
        parse("-l", "7+1.5", "-l", "7-1", "-l", "8-inf", "-l", "8+5", "-l", "9+.5"), Metadata({}), 512
    )
    assert params.logit_bias == ((7, 0.5), (8, -math.inf), (9, 0.5))


def test_dry_sequence_breakers() -> None:
    def breakers(*args: str) -> tuple[str, ...]:
        return sampling_params(parse(*args), Metadata({}), 512).dry_sequence_breakers

    assert breakers() == ("\n", ":", '"', "*")
    assert breakers("--dry-sequence-breaker", "a", "--dry-sequence-breaker", "\n") == ("a", "\n")
    assert breakers("--dry-sequence-breaker", "none") == ()


def test_last_n_of_minus_one_is_the_whole_context() -> None:
    params = sampling_params(parse("--repeat-last-n", "-1", "--dry-penalty-last-n", "-1"), Metadata({}), 512)
    assert (params.repeat_last_n, params.dry_penalty_last_n) == (512, 512)


def test_order_of_samplers() -> None:
    params = sampling_params(parse("--samplers", "Temp; top-k;;nucleus"), Metadata({}), 512)
    assert params.samplers == ("Temp", "top-k", "nucleus")
    assert sampling_params(parse("--samplers", ""), Metadata({}), 512).samplers == ()


def test_unknown_sampler_is_a_usage_error(invoke, model) -> None:
    result = invoke("run", model, PROMPT, "--samplers", "top_k;top_q")
    assert result.exit_code == 2
    assert "Invalid value for '--samplers': unknown sampler 'top_q'" in result.stderr


def test_unknown_sampler_names_the_known_ones_of_plugins_too() -> None:
    with pytest.raises(click.UsageError, match=r"unknown sampler 'x'; known are adaptive_p; .*; banish; dry; .*; xtc"):
        sampling_params(parse("--samplers", "x"), Metadata({}), 512, lambda name: None, lambda: ["banish"])


def test_options_of_plugin_samplers() -> None:
    given = ("weight=0.5", "tokens=[1, 2]", "name=a=b", "switch=true")
    arguments = [word for one in given for word in ("--sampler-option", one)]
    options = sampling_params(parse(*arguments), Metadata({}), 512).options
    assert options == {"weight": 0.5, "tokens": [1, 2], "name": "a=b", "switch": True}
    for wrong in ("weight", "=1"):
        with pytest.raises(click.UsageError, match=f"'{wrong}' is not NAME=VALUE, as in strength=0.5"):
            parse("--sampler-option", wrong)


ONLY = """
from llamacli import hookimpl
from llamacli.sampling import Sampler, SamplerType
LLAMACLI_API = 1
class Only(Sampler):
    def __init__(self, token):
        self.token = token
    def apply(self, candidates):
        candidates.keep_where(candidates.ids == self.token)
@hookimpl
def register_samplers(register):
    register(SamplerType("only", lambda params, tokenizer: Only(params.options["only"]), when_greedy=True))
"""


def test_sampler_of_a_plugin_with_its_option(program, model, site, install) -> None:
    install(site, "llamacli-only", "[llamacli]\nonly = only_plugin\n", only_plugin=ONLY)
    options = ("run", model, PROMPT, "-n", "3", "--json", "--samplers")
    result = program(*options, "only", "--sampler-option", "only=300")
    assert json.loads(result.stdout)["tokens"] == [300, 300, 300]
    assert "; only; " in " ".join(program(*options, "one").stderr.split())


def test_unknown_samplers_in_a_file_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    metadata = Metadata({"general.sampling.sequence": "top_k;unheard_of;temperature"})
    assert sampling_params(parse(), metadata, 512).samplers == ("top_k", "temperature")
    assert "general.sampling.sequence has unknown samplers: unheard_of" in caplog.text
    assert sampling_params(parse(), Metadata({"general.sampling.sequence": "unheard_of"}), 512).samplers == ORDER


def test_settings_of_the_file_are_used(invoke, tiny_gguf) -> None:
    path = tiny_gguf("gqa", tokenizer="spm", context_length=64, metadata={"general.sampling.temp": 0.0})
    texts = [
        json.loads(invoke("run", path, PROMPT, "--mode", "fp32", "-n", "8", "--json", *temp).stdout)["tokens"]
        for temp in ((), ("--temp", "0"))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("value", [-1.0, float("nan"), "hot"])
def test_setting_of_the_file_out_of_range_is_an_error_without_option(value, tiny_gguf, invoke) -> None:
    path = tiny_gguf("gqa", tokenizer="spm", metadata={"general.sampling.temp": value})
    result = invoke("run", path, PROMPT, "-n", "1")
    assert result.exit_code == 1
    assert "general.sampling.temp" in result.stderr
    assert invoke("run", path, PROMPT, "-n", "1", "--temp", "1").exit_code == 0


def test_setting_of_the_file_without_option_is_a_warning(invoke, tiny_gguf) -> None:
    path = tiny_gguf("gqa", tokenizer="spm", metadata={"general.sampling.beams": 2})
    assert "general.sampling.beams" in invoke("run", path, PROMPT, "-n", "1").stderr


class TestGrammar:
    def test_grammar_and_json_schema(self, invoke, model, tmp_path) -> None:
        pytest.importorskip("llguidance")
        file = tmp_path / "a file"
        for option, text, expected in (
            ("--grammar", 'root ::= " the " ("dog" | "girl")', (" the dog", " the girl")),
            ("--json-schema", '{"enum": [1, "é"]}', ("1", '"é"')),
        ):
            file.write_text(text, encoding="utf-8")
            for arguments in ((option, text), (f"{option}-file", file)):
                result = json.loads(invoke("run", model, PROMPT, "-n", "30", *arguments, "--json").stdout)
                assert result["text"] in expected
                assert result["stop"] == "eos"

    @pytest.mark.parametrize(
        ("option", "text", "message"),
        [
            ("--grammar", "root ::= (\n[a]", "grammar: line 2, column 4: expected an item, | or ) for the ("),
            ("--json-schema", '{"type":\n"text"}', "json_schema: line 2: Invalid type: text"),
            ("-j", "{", "json_schema: line 1, column 2: Expecting property name"),
            ("--logit-bias", f"{10**30}+1", "is not in the vocabulary of "),
        ],
    )
    def test_invalid_constraints_are_one_line(self, option: str, text: str, message: str, invoke, model) -> None:
        pytest.importorskip("llguidance")
        result = invoke("run", model, PROMPT, option, text)
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1

    def test_grammar_and_schema_exclude_each_other(self, invoke, model) -> None:
        result = invoke("run", model, PROMPT, "--grammar", "root ::= [a]", "-jf", "schema.json")
        assert result.exit_code == 2
        assert "--grammar and --json-schema-file exclude each other" in result.stderr

    def test_missing_grammar_file(self, invoke, model) -> None:
        result = invoke("run", model, PROMPT, "--grammar-file", "no such file")
        assert result.exit_code == 1
        assert "no such file" in result.stderr


class TestLogprobs:
    def test_logprobs_in_json(self, invoke, model) -> None:
        result = json.loads(invoke("run", model, PROMPT, "-n", "4", "--temp", "0", "--logprobs", "3", "--json").stdout)
        assert [entry["id"] for entry in result["logprobs"]] == result["tokens"]
        for entry in result["logprobs"]:
            assert len(entry["top_logprobs"]) == 3
            values = [other["logprob"] for other in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert entry["logprob"] == values[0] < 0
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]

    def test_logprobs_as_lines(self, invoke, model) -> None:
        result = invoke("run", model, PROMPT, "-n", "4", "--temp", "0", "--logprobs", "2")
        header, *lines = result.stderr.splitlines()[-5:]
        assert header.split() == ["logprob", "token", "likeliest"]
        assert all(line.count("%") == 2 for line in lines)

    def test_no_logprobs_by_default(self, invoke, model) -> None:
        assert "logprobs" not in json.loads(invoke("run", model, PROMPT, "-n", "1", "--json").stdout)
