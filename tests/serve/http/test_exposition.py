from prometheus_client.parser import text_string_to_metric_families

from http_server import wait_for
from llamacli.serve.http.exposition import HttpMetrics, exposition
from llamacli.serve.metrics import HISTOGRAMS, EngineStats, Histogram, ModelStats


def stats() -> EngineStats:
    histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
    for value in (0.01, 0.2, 1000):
        histograms["decode_seconds"].observe(value)
    for n in (2, 3):
        histograms["step_sequences"].observe(n)
    one = ModelStats(
        n_tokens_max=60, drafts=4, running=2, waiting=3, prompt_tokens=40, generation_tokens=50,
        prefix_tokens={"true": 6}, refused={"queue_full": 7},
        histograms={name: one.snapshot() for name, one in histograms.items()},
    )  # fmt: skip
    return EngineStats("ok", {"demo": one})


def samples(text: bytes) -> dict:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_numbers_of_the_engine() -> None:
    found = samples(exposition(stats(), HttpMetrics()))
    model = ("model", "demo")
    assert found["llamacli_requests_running", (model,)] == 2
    assert found["llamacli_generation_tokens_total", (model,)] == 50
    assert found["llamacli_refused_total", (("code", "queue_full"), model)] == 7
    assert found["llamacli_prefix_tokens_total", (("hit", "true"), model)] == 6
    assert found["llamacli_decode_seconds_bucket", (("le", "0.05"), model)] == 1
    assert found["llamacli_decode_seconds_bucket", (("le", "0.25"), model)] == 2
    assert found["llamacli_decode_seconds_bucket", (("le", "+Inf"), model)] == 3
    assert found["llamacli_decode_seconds_count", (model,)] == 3
    assert found["llamacli_decode_seconds_sum", (model,)] == 1000.21
    for name in HISTOGRAMS:
        assert (f"llamacli_{name}_count", (model,)) in found


def test_names_of_llama_server() -> None:
    assert b"llamacpp:" not in exposition(stats(), HttpMetrics())
    text = exposition(stats(), HttpMetrics(), llamacpp=True)
    found = samples(text)
    assert found["llamacpp:prompt_tokens_total", ()] == 40
    assert found["llamacpp:requests_deferred", ()] == 3
    assert found["llamacpp:prompt_tokens_cached_total", ()] == 6
    assert found["llamacpp:spec_decode_num_drafts_total", ()] == 4
    assert found["llamacpp:n_busy_slots_per_decode", ()] == 2.5
    assert text.count(b"# TYPE llamacpp:") == text.count(b"# HELP llamacpp:") == 15
    assert b"# TYPE llamacpp:n_tokens_max counter\nllamacpp:n_tokens_max 60.0\n" in text


def test_the_longest_text_of_several_models() -> None:
    models = {str(n): ModelStats(n_tokens_max=n, generation_tokens=n) for n in (3, 5)}
    text = exposition(EngineStats("ok", models), HttpMetrics(), llamacpp=True)
    assert b"llamacpp:n_tokens_max 5.0\n" in text
    assert b"llamacpp:tokens_predicted_total 8.0\n" in text


def test_metrics_that_are_off(serve) -> None:
    assert serve(metrics=False).send("/metrics").status == 501


def test_requests_are_counted_by_endpoint_and_status(http) -> None:
    def count(path: str, status: int, reason: str = "") -> float:
        found = samples(http.send("/metrics").body)
        labels = (("endpoint", path), ("finish_reason", reason), ("status", str(status)))
        return found.get(("llamacli_requests_total", labels), 0)

    before = count("/v1/models", 200)
    http.send("/models")
    http.send("/v1/models")
    wait_for(lambda: count("/v1/models", 200) == before + 2)
    before = count("/v1/chat/completions", 200, "stop")
    http.chat()
    wait_for(lambda: count("/v1/chat/completions", 200, "stop") == before + 1)
    assert any(name.startswith("process_") for name, _ in samples(http.send("/metrics").body))
