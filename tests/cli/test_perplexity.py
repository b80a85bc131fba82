"""`llamacli perplexity`."""

import json
import re

import pytest

from adapters import write_adapter
from llamacli.tools import perplexity

TEXT = "once upon a time there was a little girl and the dog saw a big ball " * 4


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_text_output(invoke, model, text) -> None:
    result = invoke("perplexity", text, "-m", model, "-c", "16")
    running, last = result.stdout.splitlines()
    estimates = re.findall(r"\[(\d+)\](\d+\.\d{4}),", running)
    assert [int(number) for number, _ in estimates] == list(range(1, len(estimates) + 1))
    n = len(estimates)
    assert last.startswith(f"perplexity {estimates[-1][1]} ± ")
    assert last.endswith(f"({n} chunks of 16 tokens, {7 * n} of them scored)")


def test_json_output(invoke, model, text) -> None:
    answer = json.loads(invoke("perplexity", "-f", text, "-m", model, "-c", "16", "--chunks", "2", "-o", "json").stdout)
    assert (answer["n_ctx"], answer["n_chunks"], answer["n_scored"], len(answer["running"])) == (16, 2, 14, 2)
    assert answer["perplexity"] == answer["running"][-1]
    assert answer["error"] > 0


def test_divergence_from_a_base(invoke, model, text, tmp_path) -> None:
    base = ("--kl-divergence-base", tmp_path / "base.kld")
    saved = invoke("perplexity", text, "-m", model, "-c", "16", "-o", "json", *base).stdout
    shown = invoke("perplexity", "-m", model, "--kl-divergence", *base).stdout.splitlines()
    found = json.loads(invoke("perplexity", "-m", model, "--kl-divergence", "-o", "json", *base).stdout)
    assert found["perplexity"]["value"] == pytest.approx(json.loads(saved)["perplexity"], rel=1e-5)
    assert found["kl_divergence"]["value"] == pytest.approx(0, abs=1e-4)
    assert found["percentiles"]["dp"]["100.0"] == pytest.approx(0, abs=1e-3)
    assert [line.split()[0] for line in shown[:6]] == [
        "perplexity", "perplexity_base", "log_ratio", "kl_divergence", "rms_dp", "same_top"
    ]  # fmt: skip
    assert shown[-1] == f"{found['n_chunks']} chunks of 16 tokens, {found['n_scored']} of them scored"
    wrong = invoke("perplexity", "-m", model, "--kl-divergence", "--kl-divergence-base", text)
    assert (wrong.exit_code, "no log-probabilities of a base model" in wrong.stderr) == (1, True)
    both = invoke("perplexity", text, "-m", model, "--kl-divergence", *base)
    assert (both.exit_code, "give none" in both.stderr) == (2, True)
    alone = invoke("perplexity", "-m", model, "--kl-divergence")
    assert (alone.exit_code, "needs --kl-divergence-base" in alone.stderr) == (2, True)


def test_adapters_change_the_perplexity(invoke, model, text, tmp_path) -> None:
    file = write_adapter(tmp_path / "a.gguf", model)
    arguments = ("perplexity", text, "-m", model, "-c", "16")
    plain, none, whole = (invoke(*arguments, *more).stdout for more in ((), ("--lora", f"{file}:0"), ("--lora", file)))
    assert plain == none != whole


def test_text_from_stdin(invoke, model, text) -> None:
    piped = invoke("perplexity", "-m", model, "-c", "16", input=TEXT)
    assert piped.stdout == invoke("perplexity", text, "-m", model, "-c", "16").stdout


def test_interrupt_keeps_the_estimate(invoke, model, text, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = perplexity.perplexity

    def interrupted(*args, **options):
        yield next(measure(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(perplexity, "perplexity", interrupted)
    result = invoke("perplexity", text, "-m", model, "-c", "16")
    assert result.exit_code == 130
    assert re.search(r"interrupted: perplexity [\d.]+ ± [\d.]+ after 1 of \d+ chunks\n", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-c", "3"), 2, "'3' is not an integer from 4 to 2147483647"),
        (("--chunks", "-2"), 2, "'-2' is not an integer of at least -1"),
        (("--chunks", "0"), 2, "0 is no chunk; give at least 1, or -1 for all."),
        (("-c", "500"), 1, "chunks of 500 need at least 1000"),
        (("-f", "other.txt"), 2, "TEXT_FILE and -f exclude each other."),
    ],
)
def test_usage_errors(invoke, model, text, arguments, code, message) -> None:
    result = invoke("perplexity", text, "-m", model, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_error_for_a_model_as_text(invoke, model) -> None:
    result = invoke("perplexity", model)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"{model} is a model file, not a text: use -m for the model\n")


def test_missing_file(invoke) -> None:
    result = invoke("perplexity", "missing.txt")
    assert (result.exit_code, result.stderr) == (1, "llamacli: error: missing.txt: No such file or directory\n")
