"""KL divergence, compared with llama.cpp's code as loops, and with the definition."""

import math
from pathlib import Path

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import InvalidRequestError
from llamacli.tools.divergence import BaseFile, compared, divergence, encoded, save_base, summary
from llamacli.tools.perplexity import perplexity

F = np.float32
TOKENS = np.random.RandomState(3).randint(3, 128, 100).tolist()


def random_logits(seed: int, n: int) -> np.ndarray:
    return (np.random.RandomState(seed).standard_normal(n) * 6).astype(np.float32)


@pytest.mark.parametrize("n", [5, 64])
def test_rows_of_a_file(n: int) -> None:
    """`log_softmax` of llama.cpp's perplexity.cpp, which writes a row."""
    logits = random_logits(n, n)
    raw = encoded(logits)
    assert len(raw) == 8 + 2 * (n + n % 2)
    scale, smallest = np.frombuffer(raw[:8], "<f4")
    log_total = F(math.log(sum(float(np.exp(F(x - logits.max()))) for x in logits)))
    low = max(logits.min(), F(logits.max() - F(16)))
    assert scale == F((logits.max() - low) / F(65535))
    assert smallest == F(F(low - logits.max()) - log_total)
    codes = np.frombuffer(raw[8:], "<u2")
    for x, code in zip(logits, codes[:n], strict=True):
        assert code == (round(float(F(F(F(1) / scale) * F(x - low)))) if x > low else 0)
    assert not codes[n:].any()


def test_equal_logits_have_no_scale() -> None:
    raw = encoded(np.full(4, 2.0, np.float32))
    assert np.frombuffer(raw[:8], "<f4").tolist() == [0.0, pytest.approx(-math.log(4))]
    assert not any(raw[8:])


def test_a_token_by_the_definition() -> None:
    base, other = random_logits(1, 40).astype(np.float64) / 3, random_logits(2, 40).astype(np.float64) / 3
    p, q = (np.exp(x) / np.exp(x).sum() for x in (base, other))
    row = np.frombuffer(encoded(base.astype(np.float32)), "<u2")
    surprise, of_base, kld, dp, same = compared(other.astype(np.float32), row, 7)
    assert surprise == pytest.approx(-math.log(q[7]), rel=1e-5)
    assert of_base == pytest.approx(-math.log(p[7]), rel=1e-4)
    assert kld == pytest.approx(float((p * np.log(p / q)).sum()), abs=1e-3)
    assert dp == pytest.approx(q[7] - p[7], abs=1e-4)
    assert same == float(p.argmax() == q.argmax())


def test_statistics() -> None:
    values = np.random.RandomState(0).rand(50, 5)
    values[:, 4] = values[:, 4] > 0.3
    found = summary(2, values)
    a, b, kld, dp, same = values.T
    error = np.std(a) / 7
    assert found.perplexity == (pytest.approx(np.exp(a.mean())), pytest.approx(np.exp(a.mean()) * error))
    assert found.log_ratio == (pytest.approx(a.mean() - b.mean()), pytest.approx(np.std(a - b) / 7))
    assert found.kld == (pytest.approx(kld.mean()), pytest.approx(np.std(kld) / 7))
    rms = math.sqrt((dp**2).mean())
    assert found.rms_dp == (pytest.approx(rms), pytest.approx(np.std(dp**2) / 7 / 2 / rms))
    assert found.same_top == (same.mean(), pytest.approx(math.sqrt(same.mean() * (1 - same.mean()) / 49)))
    assert found.percentiles(found.klds)[50.0] == pytest.approx(np.median(kld))


@pytest.mark.parametrize("n_ctx", [5, 16])
def test_a_model_from_itself_and_from_another(load_tiny: LoadTiny, tmp_path: Path, n_ctx: int) -> None:
    model, path = load_tiny(), tmp_path / "base.kld"
    saved = list(save_base(model, TOKENS, path, n_ctx=n_ctx))
    assert saved == list(perplexity(model, TOKENS, n_ctx=n_ctx))
    base = BaseFile.open(path)
    assert (base.n_ctx, base.n_chunks, base.tokens) == (n_ctx, 100 // n_ctx, TOKENS[: 100 // n_ctx * n_ctx])
    *_, last = divergence(model, base)
    assert last.perplexity[0] == pytest.approx(saved[-1].value, rel=1e-5)
    assert last.kld[0] == pytest.approx(0, abs=1e-5)
    assert last.same_top[0] > 0.95
    assert len(list(divergence(model, base, max_chunks=2))) == 2
    *_, other = divergence(load_tiny(seed=5), base)
    assert other.kld[0] > 10 * abs(last.kld[0])
    assert other.base == last.base
    assert list(tmp_path.iterdir()) == [path]


def test_wrong_files(load_tiny: LoadTiny, tmp_path: Path) -> None:
    model, path = load_tiny(), tmp_path / "base.kld"
    list(save_base(model, TOKENS, path, n_ctx=16))
    whole = path.read_bytes()

    def expect(data: bytes, text: str) -> None:
        path.write_bytes(data)
        with pytest.raises(InvalidRequestError, match=text):
            list(divergence(model, BaseFile.open(path)))

    expect(whole[:-2], r"base\.kld has \d+ bytes, expected")
    expect(whole[:12], "no log-probabilities")
    expect(b"text" * 20, "no log-probabilities")
    expect(b"", "cannot read the file")
    expect(whole[:8] + b"\0\0\0\0" + whole[12:], "n_ctx, n_vocab, n_chunks = 0")
    expect(whole[:20] + b"\xff" * 4 + whole[24:], "a token is not one of 128")
    raw = np.zeros(4 * (4 + 2), "<u2").tobytes()
    expect(b"_logits_" + np.array([4, 2, 4, *[1] * 16], "<i4").tobytes() + raw, "vocabulary of 2 tokens")
    with pytest.raises(InvalidRequestError, match="is no folder"):
        list(save_base(model, TOKENS, tmp_path / "none" / "base", n_ctx=16))
