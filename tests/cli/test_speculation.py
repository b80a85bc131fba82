"""`llamacli run` with speculative decoding."""

import pytest

from llamacli import DraftModel, HeadDrafter, MtpHead, PromptLookup
from llamacli.cli import speculation
from llamacli.generation.drafters import LIMIT_DRAFT, MAX_DRAFT, MTP
from tiny_eagle import write_eagle3

PROMPT = "once upon a time once upon a"
GREEDY = ("--temp", "0", "--mode", "fp32", "--ignore-eos", "-n", "30")


def figures(stderr: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in stderr.splitlines()}


@pytest.mark.parametrize("sampling", [("--temp", "0"), ("--temp", "1", "-s", "7")])
def test_text_is_that_without_drafts(invoke, model, tiny_gguf, sampling) -> None:
    draft = tiny_gguf("gqa", tokenizer="spm", context_length=64, seed="draft")
    arguments = ("run", model, PROMPT, *GREEDY[2:], *sampling)
    expected = invoke(*arguments).stdout
    assert invoke(*arguments, "--lookup").stdout == expected
    assert invoke(*arguments, "--draft", draft, "--draft-max", "4").stdout == expected
    assert invoke(*arguments, "-md", draft).stdout == expected


@pytest.mark.parametrize("sampling", [("--temp", "0"), ("--temp", "1", "-s", "7")])
def test_text_is_that_without_drafts_of_the_models_own_head(invoke, tiny_gguf, monkeypatch, sampling) -> None:
    monkeypatch.setitem(MtpHead.__init__.__kwdefaults__, "min_probability", 0.0)
    file = tiny_gguf("glm4moe_nextn", tokenizer="spm", n_layer=2)
    arguments = ("run", file, PROMPT, *GREEDY[2:], *sampling)
    result = invoke(*arguments, "--draft", "mtp", "--draft-max", "4", "--stats")
    assert result.stdout == invoke(*arguments).stdout
    assert int(figures(result.stderr)["drafted"].split()[0]) > 0


@pytest.mark.parametrize("sampling", [("--temp", "0"), ("--temp", "1", "-s", "7")])
def test_a_file_of_a_draft_head_is_found_out(invoke, tiny_gguf, tmp_path, monkeypatch, sampling) -> None:
    monkeypatch.setitem(HeadDrafter.__init__.__kwdefaults__, "min_probability", 0.0)
    file = tiny_gguf("gqa", tokenizer="spm", n_layer=3)
    head = write_eagle3(tmp_path / "head.gguf", tokenizer="spm")
    arguments = ("run", file, PROMPT, *GREEDY[2:], *sampling)
    result = invoke(*arguments, "--draft", head, "--draft-max", "4", "--stats")
    assert result.stdout == invoke(*arguments).stdout
    assert int(figures(result.stderr)["drafted"].split()[0]) > 0
    result = invoke("run", tiny_gguf("gqa", tokenizer="spm", n_layer=1), PROMPT, "--draft", head)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the draft head 'tiny eagle' does not fit the model 'tiny llama'" in result.stderr
    result = invoke("run", head, PROMPT)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'eagle3' is a draft head, no model by itself" in result.stderr


def test_a_model_without_a_head_is_refused(invoke, model) -> None:
    result = invoke("run", model, PROMPT, "--draft", "mtp")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the model 'tiny llama' has no multi-token-prediction head" in result.stderr


def test_stats_count_drafted_and_accepted_tokens(invoke, model, monkeypatch) -> None:
    monkeypatch.setitem(DraftModel.__init__.__kwdefaults__, "min_probability", 0.0)
    result = invoke("run", model, PROMPT, *GREEDY, "--draft", model, "--stats")
    drafted, accepted = (int(word) for word in figures(result.stderr)["drafted"].split() if word.isdigit())
    assert 0 < accepted <= drafted
    assert "drafted" not in figures(invoke("run", model, PROMPT, *GREEDY, "--stats").stderr)


def test_length_of_drafts_is_limited(invoke, model, monkeypatch) -> None:
    lengths = []
    draft = PromptLookup.draft

    def noted(self, tokens, limit):
        lengths.append(len(draft(self, [1, 2, 1, 2, 1, 2], limit)))
        return []

    monkeypatch.setattr(PromptLookup, "draft", noted)
    invoke("run", model, PROMPT, *GREEDY, "--lookup", "--draft-max", "3")
    assert max(lengths) == 3


def test_lookup_and_draft_exclude_each_other(invoke, model) -> None:
    result = invoke("run", model, PROMPT, "--lookup", "--draft", model)
    assert result.exit_code == 2
    assert "--lookup and --draft exclude each other" in result.stderr


def test_a_draft_model_with_another_vocabulary_is_refused(invoke, model, tiny_gguf) -> None:
    result = invoke("run", model, PROMPT, "--draft", tiny_gguf("gqa"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the draft model 'tiny llama' has another vocabulary than the model 'tiny llama'" in result.stderr


def test_limits_are_those_of_the_library() -> None:
    assert (speculation.DEFAULT_DRAFT, speculation.LIMIT, speculation.MTP) == (MAX_DRAFT, LIMIT_DRAFT, MTP)
