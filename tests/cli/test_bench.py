"""`llamacli bench`: tests, names and columns as in llama-bench."""

import csv
import io
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import llamacli
import tiny_llama
from adapters import write_adapter
from llamacli.cli.app import app
from llamacli.util.settings import MAX_THREADS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_llama.write_llama(tmp_path_factory.mktemp("bench") / "tiny.gguf"))


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_rows(model):
    rows = json.loads(bench("-m", model, "-p", "8,16", "-n", "4", "-d", "0,8", "-r", "2", "-o", "json"))
    tests = [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows]
    assert tests == [(8, 0, 0), (16, 0, 0), (0, 4, 0), (8, 0, 8), (16, 0, 8), (0, 4, 8)]
    for row in rows:
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 2
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["stddev_ts"] >= 0
        assert row["model_type"] == "llama F32"


def test_adapters_are_applied(model, tmp_path, monkeypatch):
    file = write_adapter(tmp_path / "a.gguf", Path(model))
    used = []
    evaluate = llamacli.Session.eval
    monkeypatch.setattr(
        llamacli.Session, "eval", lambda self, tokens: (used.append(self.adapters), evaluate(self, tokens))[1]
    )
    bench("-m", model, "-p", "8", "-n", "0", "-r", "1", "--lora", f"{file}:0.5")
    assert used
    assert all([(adapter.path, scale) for adapter, scale in one] == [(file, 0.5)] for one in used)


def test_jsonl_rows(model):
    lines = bench("-m", model, "-p", "8", "-n", "4", "-r", "1", "-o", "jsonl").splitlines()
    assert [json.loads(line)["n_prompt"] for line in lines] == [8, 0]


def test_csv_rows(model):
    rows = list(csv.DictReader(io.StringIO(bench("-m", model, "-p", "8", "-n", "0", "-r", "1", "-o", "csv"))))
    assert len(rows) == 1
    assert float(rows[0]["avg_ts"]) > 0
    assert rows[0]["stddev_ts"] == "0.0"


def test_markdown_table(model):
    lines = bench("-m", model, "-p", "8", "-n", "4", "-d", "8", "-r", "2").splitlines()
    assert lines[0].split("|")[-2].strip() == "t/s"
    assert [line.split("|")[-3].strip() for line in lines[2:]] == ["pp8 @ d8", "tg4 @ d8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "x"], "is not a list of integers from 0 to 1000000, such as 128,512."),
        (["-p", "1000001"], "is not a list of integers from 0 to 1000000, such as 128,512."),
        (["-n", "-1"], "is not a list of integers from 0 to 1000000, such as 128,512."),
        (["-d", "1,,2"], "is not a list of integers from 0 to 1000000, such as 128,512."),
        (["-d", "9" * 5000], "is not a list of integers from 0 to 1000000, such as 128,512."),
        (["-r", "0"], "'0' is not an integer of at least 1."),
        (["-t", "1025"], "'1025' is not an integer from 1 to 1024."),
        (["-o", "xml"], "'xml' is not one of"),
        (["--plot", "rates.txt"], "'rates.txt' does not end in .png, .svg or .pdf."),
        (["--plot", "no/such/folder/rates.png"], "is in a directory that does not exist."),
    ],
)
def test_usage_errors(model, arguments, message):
    result = CliRunner().invoke(app, ["bench", "-m", model, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def test_every_option_has_help():
    command = app.commands["bench"]
    assert [param.name for param in command.params if isinstance(param, click.Option) and not param.help] == []


def test_range_of_threads():
    threads = next(param for param in app.commands["bench"].params if param.name == "threads")
    assert (threads.type.min, threads.type.max) == (1, MAX_THREADS)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(model, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"rates.{suffix}"
    table = bench("-m", model, "-p", "8", "-n", "4", "-d", "0,8", "-r", "2", "--plot", str(picture))
    assert table.count("\n") == 6
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == "png" else b"tiny.gguf: llama F32" in data


def test_no_plot_without_results(model, tmp_path):
    pytest.importorskip("matplotlib")
    bench("-m", model, "-p", "0", "-n", "0", "--plot", str(tmp_path / "rates.png"))
    assert list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib(model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", "-m", model, "--plot", "rates.png"])
    assert result.exit_code == 2
    assert "plots need matplotlib: pip install 'llamacli[plot]'" in result.stderr


def test_measured_tokens_are_evaluated(model, monkeypatch):
    """With prefix reuse a repeated prompt would not be evaluated."""
    reused = []
    close = llamacli.Session.close

    def closing(session):
        reused.append(session.n_reused)
        close(session)

    monkeypatch.setattr(llamacli.Session, "close", closing)
    bench("-m", model, "-p", "40,48", "-n", "4", "-d", "0,32", "-r", "2")
    assert len(reused) >= 6
    assert not any(reused)
