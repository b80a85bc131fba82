import json
from pathlib import Path

import pytest

import llamacli.cli.run
from adapters import write_adapter
from llamacli import QuantMode, Token, load_model
from llamacli.cli.run import run
from llamacli.hub.demo import demo_path
from llamacli.kv import KV_TYPES
from llamacli.util.system import peak_rss

GREEDY = ("--temp", "0", "--mode", "fp32")
PROMPT = "once upon a time"


@pytest.fixture
def greedy(model: Path, plugins):
    """Greedy continuation of a prompt by the Python API: ids and text."""

    def generate(prompt: str, max_tokens: int, **options) -> tuple[list[int], str]:
        with load_model(model, "fp32", plugins=plugins) as loaded, loaded.create_session() as session:
            tokens = list(session.generate(loaded.encode(prompt), max_tokens=max_tokens, **options))
        return [token.id for token in tokens], "".join(token.piece for token in tokens)

    return generate


@pytest.fixture
def ending(tiny_gguf, greedy):
    """The model with its fourth token after PROMPT as EOS token."""
    ids, _ = greedy(PROMPT, 4)
    assert ids[3] not in ids[:3]
    return tiny_gguf("gqa", tokenizer="spm", context_length=64, metadata={"tokenizer.ggml.eos_token_id": ids[3]})


def run_json(invoke, *args, **options) -> dict:
    result = invoke("run", *args, "--json", **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- where the prompt and the model come from


def test_text_is_prompt_and_continuation(invoke, model, greedy) -> None:
    result = invoke("run", model, PROMPT, *GREEDY, "-n", "8")
    assert result.stdout == f"{PROMPT}{greedy(PROMPT, 8)[1]}\n"
    assert result.stderr == ""


def test_all_ways_to_give_the_prompt_are_equal(invoke, model, tmp_path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(f"{PROMPT}\r\n".encode())
    expected = invoke("run", model, PROMPT, *GREEDY, "-n", "8").stdout
    for args, options in [
        ((model, "-p", PROMPT), {}),
        (("-m", model, PROMPT), {}),
        (("-m", model, "-p", PROMPT), {}),
        ((model, "-f", file), {}),
        ((model,), {"input": f"{PROMPT}\n"}),
        ((PROMPT, "-m", model), {}),
        ((), {"input": PROMPT, "env": {"LLAMACLI_RUN_MODEL": str(model)}}),
        ((model, PROMPT), {"env": {"LLAMACLI_RUN_MODEL": "no such model"}}),
        ((model, "-f", "-"), {"input": PROMPT}),
        ((model, "-p", r"once\x20upon\x20a time"), {}),
    ]:
        assert invoke("run", *args, *GREEDY, "-n", "8", **options).stdout == expected, args


def test_text_of_stdin_comes_before_the_prompt(invoke, model, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text("Sum up:\n")
    for args in (["Sum up:"], ["-p", "Sum up:"], ["-f", tmp_path / "prompt.txt"]):
        assert run_json(invoke, model, "-n", "0", *args, input="a\nb\n")["prompt"] == "a\nb\n\nSum up:"
    assert run_json(invoke, model, "-n", "0", "", input="a\n")["prompt"] == "a"


def test_escapes_are_those_of_the_option(invoke, model) -> None:
    assert run_json(invoke, model, "-n", "0", "-p", r"a\nb")["prompt"] == "a\nb"
    assert run_json(invoke, model, "-n", "0", "-p", r"a\nb", "--no-escape")["prompt"] == r"a\nb"
    assert run_json(invoke, model, "-n", "0", r"a\nb")["prompt"] == r"a\nb"


def test_stop_string_ends_the_text(invoke, model, greedy) -> None:
    _, text = greedy(PROMPT, 20)
    stop = text[7:9]
    for option in ("--stop", "-r"):
        record = run_json(invoke, model, PROMPT, *GREEDY, "-n", "20", option, "never", option, stop)
        assert (record["text"], record["stop"]) == (text.partition(stop)[0], "stop")
    escaped = "".join(f"\\x{byte:02x}" for byte in stop.encode())
    assert run_json(invoke, model, PROMPT, *GREEDY, "-n", "20", "-r", escaped)["stop"] == "stop"
    assert run_json(invoke, model, PROMPT, *GREEDY, "-n", "20", "-r", escaped, "--no-escape")["stop"] == "length"


def test_empty_stop_string_is_a_usage_error(invoke, model) -> None:
    result = invoke("run", model, PROMPT, "--stop", "")
    assert result.exit_code == 2
    assert "Invalid value for '--stop': it is empty" in result.stderr


def test_one_final_newline_is_removed_from_the_prompt(invoke, model) -> None:
    assert run_json(invoke, model, "-n", "0", input="a\n\n")["prompt"] == "a\n"
    assert run_json(invoke, model, "-n", "0", "a\n")["prompt"] == "a\n"


@pytest.mark.parametrize("more", [("x", "-p", "x"), ("x", "-f", "x"), ("-p", "x", "-f", "x"), ("-m", "x", "x", "x")])
def test_two_prompts_or_models_are_usage_errors(more: tuple[str, ...], invoke, model) -> None:
    args = more if "-m" in more else (model, *more)
    assert invoke("run", *args).exit_code == 2


def test_generation_without_prompt(invoke, model, greedy) -> None:
    assert invoke("run", model, *GREEDY, "-n", "8").stdout == f"{greedy('', 8)[1]}\n"


def test_default_model_is_the_demo(invoke, model, monkeypatch, greedy) -> None:
    monkeypatch.setattr("llamacli.cli.run.demo_path", lambda: model)
    assert invoke("run", *GREEDY, "-n", "8").stdout == f"{greedy('', 8)[1]}\n"
    assert invoke("run", *GREEDY, "-n", "8", "-p", PROMPT).stdout == f"{PROMPT}{greedy(PROMPT, 8)[1]}\n"


def test_demo_model_continues_texts_without_a_name_and_chats_with_one(invoke) -> None:
    prompt = "Tell me a story about a fox."
    assert invoke("run", "-p", prompt, "-n", "4").stdout.startswith(prompt)
    replies = [
        invoke("run", *args, "--temp", "0", "-n", "40").stdout
        for args in (("demo", prompt), ("-p", prompt, "--chat-template", "chatml"), (demo_path(), prompt))
    ]
    assert len(set(replies)) == 1
    assert "fox" in replies[0]
    assert not replies[0].startswith(prompt)


def test_demo_model_is_in_the_package() -> None:
    assert demo_path() == Path(llamacli.__file__).parent / "data" / "demo.gguf"


def test_error_for_a_prompt_instead_of_a_model(invoke) -> None:
    result = invoke("run", "Once upon a time")
    assert result.exit_code == 1
    assert "Once upon a time: no such file (a prompt for the demo model: llamacli run demo PROMPT)" in result.stderr


@pytest.mark.parametrize("args", [("",), ("-p", "")])
def test_error_for_empty_prompt(args: tuple[str, ...], invoke, model) -> None:
    result = invoke("run", model, *args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the prompt is empty" in result.stderr


def test_error_for_empty_model_name(invoke) -> None:
    for args in (("-m", "", "-p", "x"), ("", "x"), ("",)):
        result = invoke("run", *args)
        assert (result.exit_code, result.stderr) == (1, "llamacli: error: the name of the model's file is empty\n")


@pytest.mark.parametrize(("source", "name"), [("stdin", "stdin"), ("file", "prompt.txt")])
def test_error_for_prompt_in_invalid_utf8(source: str, name: str, invoke, model, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9 au lait")
    args, data = ((), b"caf\xe9 au lait") if source == "stdin" else (("-f", tmp_path / "prompt.txt"), b"")
    result = invoke("run", model, *args, input=data)
    assert result.exit_code == 1
    assert f"{name} is not UTF-8: " in result.stderr
    assert "at byte 3" in result.stderr


def test_error_for_argument_in_invalid_utf8(invoke, model) -> None:
    result = invoke("run", model, "caf\udce9")
    assert result.exit_code == 1
    assert "the text on the command line is not UTF-8: " in result.stderr


def test_error_for_unreadable_prompt_file(invoke, model) -> None:
    result = invoke("run", model, "-f", "nowhere.txt")
    assert (result.exit_code, result.stderr) == (1, "llamacli: error: nowhere.txt: No such file or directory\n")


def test_special_tokens_in_the_prompt_are_parsed(invoke, model) -> None:
    with_special = run_json(invoke, model, "once</s>", "-n", "0")["stats"]["n_prompt"]
    assert with_special == run_json(invoke, model, "once", "-n", "0")["stats"]["n_prompt"] + 1


def test_prompt_has_no_eos(invoke, tiny_gguf, model) -> None:
    path = tiny_gguf("gqa", tokenizer="spm", context_length=64, metadata={"tokenizer.ggml.add_eos_token": True})
    assert (
        invoke("run", path, PROMPT, *GREEDY, "-n", "8").stdout
        == invoke("run", model, PROMPT, *GREEDY, "-n", "8").stdout
    )


def test_model_without_bos_needs_a_prompt(invoke, tiny_gguf) -> None:
    path = tiny_gguf("gqa", tokenizer="spm", metadata={"tokenizer.ggml.add_bos_token": False})
    result = invoke("run", path, "-n", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "give a prompt" in result.stderr
    assert invoke("run", path, PROMPT, "-n", "1").exit_code == 0


def test_error_without_vocabulary(invoke, tiny_gguf) -> None:
    result = invoke("run", tiny_gguf("gqa"), PROMPT)
    assert result.exit_code == 1
    assert "no vocabulary" in result.stderr


# --- what is written


def test_no_display_prompt(invoke, model, greedy) -> None:
    result = invoke("run", model, PROMPT, "--no-display-prompt", *GREEDY, "-n", "8")
    assert result.stdout == f"{greedy(PROMPT, 8)[1]}\n"


def test_no_second_final_newline(invoke, model, monkeypatch) -> None:
    def generate(self, *_args, **_options):
        yield Token(1, "one\n")

    monkeypatch.setattr("llamacli.session.Session.generate", generate)
    assert invoke("run", model, "--no-display-prompt", "x").stdout == "one\n"


def test_json_output(invoke, model, greedy) -> None:
    ids, text = greedy(PROMPT, 8)
    answer = run_json(invoke, model, PROMPT, *GREEDY, "-n", "8", "-s", "7")
    stats = answer.pop("stats")
    assert answer == {
        "model": str(model),
        "arch": "llama",
        "prompt": PROMPT,
        "text": text,
        "tokens": ids,
        "stop": "length",
    }
    assert (stats["n_gen"], stats["seed"]) == (8, 7)
    assert min(stats[name] for name in ("load_s", "ttft_s", "n_prompt", "prefill_tps", "gen_tps", "peak_rss")) > 0


def test_stats_on_stderr(invoke, model) -> None:
    result = invoke("run", model, PROMPT, "-n", "8", "-s", "7", "--stats")
    figures = {line[:14].strip(): line[14:] for line in result.stderr.splitlines()}
    assert list(figures) == ["load", "prompt", "first token", "generated", "peak memory", "seed"]
    assert figures["prompt"].startswith("5 tokens, ")
    assert figures["generated"].startswith("8 tokens, ")
    assert figures["seed"] == "7"
    assert result.stdout == invoke("run", model, PROMPT, "-n", "8", "-s", "7").stdout


def test_peak_rss_grows_with_allocated_memory() -> None:
    before = peak_rss()
    block = bytearray(200 << 20)
    block[::4096] = bytes(len(block[::4096]))
    peak = peak_rss()
    assert before is not None
    assert peak is not None
    assert 200 << 20 < peak < 16 << 30


def test_same_seed_gives_same_text(invoke, model) -> None:
    def text(*flags: str) -> str:
        return run_json(invoke, model, PROMPT, "-n", "20", "--temp", "2", "--top-k", "0", *flags)["text"]

    assert text("-s", "1") == text("-s", "1")
    assert text("-s", "1") != text("-s", "2")
    assert text() != text()  # without one, each run draws its own


# --- when it stops


def test_stop_at_eos(invoke, ending, greedy) -> None:
    answer = run_json(invoke, ending, PROMPT, *GREEDY)
    assert (answer["tokens"], answer["stop"]) == (greedy(PROMPT, 3)[0], "eos")


def test_ignore_eos(invoke, ending, greedy) -> None:
    answer = run_json(invoke, ending, PROMPT, *GREEDY, "--ignore-eos", "-n", "5")
    assert (len(answer["tokens"]), answer["tokens"][:4], answer["stop"]) == (5, greedy(PROMPT, 4)[0], "length")


@pytest.mark.parametrize("flags", [(), ("-n", "-1"), ("-n", "1000")])
def test_stop_at_full_context_with_a_hint(flags: tuple[str, ...], invoke, model) -> None:
    result = invoke("run", model, PROMPT, *GREEDY, "--ignore-eos", *flags, "--json")
    answer = json.loads(result.stdout)
    assert (answer["stop"], answer["stats"]["n_prompt"] + len(answer["tokens"])) == ("context", 64)
    assert result.stderr == "llamacli: the context of 64 tokens is full; -c sets a longer one\n"


def test_context_length(invoke, model) -> None:
    assert "context of 20 tokens" in invoke("run", model, PROMPT, *GREEDY, "--ignore-eos", "-c", "20").stderr
    assert run_json(invoke, model, PROMPT, *GREEDY, "--ignore-eos", "-c", "70")["stats"]["n_gen"] == 65
    assert run_json(invoke, model, PROMPT, *GREEDY, "--ignore-eos", "-c", "0")["stats"]["n_gen"] == 59


def test_max_tokens_of_zero(invoke, model) -> None:
    answer = run_json(invoke, model, PROMPT, "-n", "0")
    assert (answer["tokens"], answer["text"], answer["stop"]) == ([], "", "length")
    assert invoke("run", model, PROMPT, "-n", "0").stdout == f"{PROMPT}\n"


def test_prompt_that_fills_the_context(invoke, model) -> None:
    answer = run_json(invoke, model, PROMPT, "-c", "5")
    assert (answer["stats"]["n_prompt"], answer["tokens"], answer["stop"]) == (5, [], "context")


def test_prompt_too_long_is_one_line(invoke, model) -> None:
    result = invoke("run", model, PROMPT, "-c", "4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "llamacli: error: the prompt has 5 tokens and the context only 4: shorten it or raise -c\n"
    )


# --- options


@pytest.mark.parametrize(
    ("option", "value", "range_"),
    [
        ("--temp", "-0.1", "from 0 to 1000000"),
        ("--temp", "nan", "from 0 to 1000000"),
        ("--temp", "inf", "from 0 to"),
        ("--top-k", "-2", "of at least -1"),
        ("--top-k", "1.5", "integer"),
        ("--top-p", "1.1", "from 0 to 1"),
        ("--min-p", "-1", "from 0 to 1"),
        ("--repeat-penalty", "-1", "from 0 to 1000000"),
        ("--repeat-last-n", "-2", "of at least -1"),
        ("-n", "-2", "of at least -1"),
        ("-c", "-1", "from 0 to 2147483647"),
        ("-t", "0", "from 1 to 1024"),
        ("-s", "4294967296", "from -1 to 4294967295"),
        ("--mode", "q5", "q4"),
        ("--kv-type", "q8", "f16"),
    ],
)
def test_value_out_of_range_is_a_usage_error(option, value, range_: str, invoke, model) -> None:
    result = invoke("run", model, PROMPT, option, value)
    assert result.exit_code == 2
    assert range_ in result.stderr
    assert option in result.stderr


@pytest.mark.parametrize(
    "names",
    [
        ("-n", "--max-tokens", "--predict", "--n-predict"),
        ("-c", "--ctx-size"),
        ("-t", "--threads"),
        ("-s", "--seed"),
        ("-m", "--model"),
        ("-p", "--prompt"),
        ("-f", "--file"),
        ("--temp", "--temperature"),
        ("--raw", "--no-chat"),
    ],
)
def test_names_of_options(names: tuple[str, ...]) -> None:
    assert [param for param in run.params if set(names) == set(param.opts)] != []


def test_choices_are_those_of_the_engine() -> None:
    choices = {param.name: tuple(getattr(param.type, "choices", ())) for param in run.params}
    assert choices["mode"] == tuple(QuantMode)
    for name in ("kv_type", "cache_type_k", "cache_type_v"):
        assert choices[name] == tuple(KV_TYPES)


@pytest.mark.parametrize("mode", ["auto", "fp32", "q8", "q4"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_modes_and_cache_types(mode: str, kv_type: str, invoke, model) -> None:
    answer = run_json(invoke, model, PROMPT, "--mode", mode, "--kv-type", kv_type, "-n", "4", "--ignore-eos")
    assert len(answer["tokens"]) == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), None),
        (("--kv-type", "q8_0"), "q8_0"),
        (("-ctk", "q8_0"), ("q8_0", "f16")),
        (("-ctk", "q8_0", "-ctv", "q4_0"), ("q8_0", "q4_0")),
        (("--cache-type-v", "q4_0", "--kv-type", "f32"), ("f32", "q4_0")),
    ],
)
def test_cache_types_of_keys_and_values(options, expected, invoke, model, monkeypatch) -> None:
    seen = []
    create = llamacli.Model.create_session

    def spy(self, **options):
        seen.append(options["kv_type"])
        return create(self, **options | {"kv_type": None})

    monkeypatch.setattr(llamacli.Model, "create_session", spy)
    assert invoke("run", model, PROMPT, "-n", "1", *options).exit_code == 0
    assert seen == [expected]


def test_options_reach_the_model(invoke, model, monkeypatch) -> None:
    seen = {}
    load = llamacli.load_model

    def spy(*args, **options):
        seen["load"] = args, options
        return load(*args, **options)

    monkeypatch.setattr(llamacli, "load_model", spy)
    assert invoke("run", model, PROMPT, "-t", "2", "--mode", "q8", "--raw", "-n", "1").exit_code == 0
    assert seen["load"][0] == (str(model), "q8")
    assert seen["load"][1]["threads"] == 2


def test_options_from_environment_variables(invoke, model) -> None:
    env = {"LLAMACLI_RUN_MAX_TOKENS": "3", "LLAMACLI_RUN_SEED": "5", "LLAMACLI_RUN_IGNORE_EOS": "1"}
    answer = run_json(invoke, model, PROMPT, env=env)
    assert (len(answer["tokens"]), answer["stats"]["seed"]) == (3, 5)
    assert len(run_json(invoke, model, PROMPT, "-n", "2", env=env)["tokens"]) == 2


# --- LoRA adapters


def test_adapters_change_the_text(invoke, model, tmp_path, plugins) -> None:
    file = write_adapter(tmp_path / "a:b.gguf", model)
    texts = {}
    for scale in (1.0, 0.5, 0.0):
        options = {"plugins": plugins, "lora_path": file, "lora_scale": scale}
        with load_model(model, "fp32", **options) as loaded, loaded.create_session() as session:
            texts[scale] = "".join(token.piece for token in session.generate(PROMPT, max_tokens=8))
    assert len(set(texts.values())) == 3
    for given, scale in (
        (("--lora", file), 1.0),
        (("--lora", f"{file}:0.5"), 0.5),
        (("--lora-scaled", f"{file}:0"), 0),
    ):
        assert invoke("run", model, PROMPT, *GREEDY, "-n", "8", *given).stdout == f"{PROMPT}{texts[scale]}\n"


def test_wrong_adapters_are_named(invoke, model, tmp_path) -> None:
    file = write_adapter(tmp_path / "a.gguf", model, metadata={"general.architecture": "qwen2"})
    for given, message in (
        (f"{file}:much", "'much' is not a number; expected FILE or FILE:SCALE, as in adapter.gguf:0.5"),
        (str(file), "general.architecture is 'qwen2'"),
        (str(tmp_path / "none.gguf"), "none.gguf"),
        (f"{tmp_path / 'none.gguf'}:0.5", "none.gguf"),
    ):
        result = invoke("run", model, PROMPT, "--lora", given)
        assert (result.exit_code != 0, message in result.stderr) == (True, True), result.stderr


def test_the_prompt_of_an_encoder_is_not_continued(invoke, tiny_gguf, plugins) -> None:
    keys = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 2}
    path = tiny_gguf("t5", tokenizer="spm", metadata=keys)
    with load_model(path, "fp32", plugins=plugins) as loaded, loaded.create_session() as session:
        tokens = list(session.generate(PROMPT, max_tokens=8))
        n_prompt = session.stats.n_prompt
    assert n_prompt == len(loaded.encode(PROMPT)) + 1  # with EOS, and the decoder's first token
    result = invoke("run", path, PROMPT, "-n", 8, *GREEDY)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(token.piece for token in tokens) + "\n"
