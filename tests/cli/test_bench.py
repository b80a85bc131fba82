"""`llamacli bench`: tests, names and columns as in llama-bench."""

import csv
import io
import json

import pytest
from click.testing import CliRunner

import tiny_models
from llamacli.cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models.write_llama(tmp_path_factory.mktemp("bench") / "tiny.gguf"))


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


def test_jsonl_is_a_row_a_line(model):
    lines = bench("-m", model, "-p", "8", "-n", "4", "-r", "1", "-o", "jsonl").splitlines()
    assert [json.loads(line)["n_prompt"] for line in lines] == [8, 0]


def test_csv(model):
    rows = list(csv.DictReader(io.StringIO(bench("-m", model, "-p", "8", "-n", "0", "-r", "1", "-o", "csv"))))
    assert len(rows) == 1
    assert float(rows[0]["avg_ts"]) > 0
    assert rows[0]["stddev_ts"] == "0.0"


def test_md(model):
    lines = bench("-m", model, "-p", "8", "-n", "4", "-d", "8", "-r", "2").splitlines()
    assert lines[0].split("|")[-2].strip() == "t/s"
    assert [line.split("|")[-3].strip() for line in lines[2:]] == ["pp8 @ d8", "tg4 @ d8"]


@pytest.mark.parametrize("arguments", [["-p", "x"], ["-n", "-1"], ["-r", "0"], ["-d", "1,,2"], ["-o", "xml"]])
def test_wrong_usage(model, arguments):
    assert CliRunner().invoke(app, ["bench", "-m", model, *arguments]).exit_code == 2
