"""llama2.c checkpoints, written here byte by byte, and the ones that llama2.c's author trained."""

import math
import struct
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, TokenizerError, load_model, load_tokenizer
from llamacli.engine import ReferenceEngine
from llamacli.loaders import open_model_file
from llamacli.plugins import ARCHITECTURES, GENERAL, Plugins
from llamacli_llama import llama2c

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT.parent / "shared" / "models"

SIZES = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 270, "seq_len": 32}
KV_DIM = 8


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins(
        [
            EntryPoint("llama", "llamacli_llama", ARCHITECTURES),
            EntryPoint("llama2c", "llamacli_llama.llama2c", GENERAL),
        ]
    )


@pytest.fixture
def load(plugins: Plugins) -> Callable[[Path], Model]:
    return lambda path: load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())


def weights(shared: bool) -> dict[str, np.ndarray]:
    """Random weights, every layer's in one array, under the names that llama2.c's run.c has for them."""
    random = np.random.RandomState(3)
    dim, hidden, n, vocab = SIZES["dim"], SIZES["hidden_dim"], SIZES["n_layers"], SIZES["vocab_size"]
    shapes = {
        "tokens": (vocab, dim), "att_norm": (n, dim), "wq": (n, dim, dim), "wk": (n, KV_DIM, dim),
        "wv": (n, KV_DIM, dim), "wo": (n, dim, dim), "ffn_norm": (n, dim), "w1": (n, hidden, dim),
        "w2": (n, dim, hidden), "w3": (n, hidden, dim), "final_norm": (dim,), "wcls": (vocab, dim),
    }  # fmt: skip
    arrays = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    if shared:
        del arrays["wcls"]
    return arrays


GGUF_NAMES = {
    "att_norm": "attn_norm", "wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output",
    "ffn_norm": "ffn_norm", "w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up",
    "tokens": "token_embd", "final_norm": "output_norm", "wcls": "output",
}  # fmt: skip


def v0(shared: bool = True, **sizes: int) -> bytes:
    """A version 0 file; with other sizes, only its header changes."""
    header = SIZES | {"vocab_size": SIZES["vocab_size"] * (1 if shared else -1)} | sizes
    arrays = weights(shared)
    order = ["tokens", "att_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3", "final_norm"]
    parts = [struct.pack("<7i", *header.values()), *(arrays[name].tobytes() for name in order)]
    parts.append(bytes(4 * 2 * SIZES["seq_len"] * 2))  # cosines and sines of 2 pairs a head, which run.c skips
    return b"".join(parts) + (b"" if shared else arrays["wcls"].tobytes())


def v2(shared: bool = True, group: int = 8, flag: int | None = None, version: int = 2, **sizes: int) -> bytes:
    """A version 2 file; a group that cannot be stands in the header only."""
    arrays = weights(shared)
    header = struct.pack("<Ii7i", 0x616B3432, version, *(SIZES | sizes).values())
    header += struct.pack("<Bi", int(shared) if flag is None else flag, group)
    group = group if group in (4, 8, 16) else 8
    parts = [header.ljust(256, b"\0"), *(arrays[name].tobytes() for name in ("att_norm", "ffn_norm", "final_norm"))]
    matrices = ["tokens", "wq", "wk", "wv", "wo", "w1", "w2", "w3", *([] if shared else ["wcls"])]
    for name in matrices:
        for matrix in [arrays[name]] if arrays[name].ndim == 2 else arrays[name]:
            q, scales = quantised(matrix, group)
            parts += [q.tobytes(), scales.tobytes()]
    return b"".join(parts)


def quantised(matrix: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    groups = matrix.reshape(-1, group)
    scales = (np.abs(groups).max(1) / 127).astype(np.float32)
    return np.rint(groups / scales[:, None]).astype(np.int8), scales


def vocabulary(**changes: Any) -> bytes:
    """270 tokens as tokenizer.py of llama2.c writes them: specials, bytes, letters and a few words."""
    words = [" a", " ", " once", "on", "ce", "once", "é"]
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), *"aonce"[:4], *words]
    tokens = tokens[:270]
    raw = {i: token.encode() for i, token in enumerate(tokens)} | changes.get("tokens", {})
    scores = {i: -float(i) for i in raw} | changes.get("scores", {})
    lengths = {i: len(text) for i, text in raw.items()} | changes.get("lengths", {})
    parts = [struct.pack("<i", changes.get("longest", 8))]
    parts += [struct.pack("<fi", scores[i], lengths[i]) + raw[i] for i in sorted(raw)]
    return b"".join(parts)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(checkpoint: bytes, tokenizer: bytes | None = None, name: str = "tok270.bin") -> Path:
        if tokenizer is not None:
            (tmp_path / name).write_bytes(tokenizer)
        (path := tmp_path / "model.bin").write_bytes(checkpoint)
        return path

    return write


class TestCheckpoints:
    @pytest.mark.parametrize("shared", [True, False])
    def test_v0_weights_are_unchanged(self, shared: bool, write: Callable[..., Path], plugins: Plugins) -> None:
        file = open_model_file(write(v0(shared)), plugins)
        self.check(file, weights(shared))

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("group", [8, 16, 4])
    def test_v2_weights_are_scaled_integers(
        self, shared: bool, group: int, write: Callable[..., Path], plugins: Plugins
    ) -> None:
        expected = weights(shared)
        for name, array in expected.items():
            if not name.endswith("norm"):
                q, scales = quantised(array, group)
                expected[name] = (q * scales[:, None]).reshape(array.shape)
        self.check(open_model_file(write(v2(shared, group)), plugins), expected)

    def check(self, file: Any, expected: dict[str, np.ndarray]) -> None:
        read = {name: file.data(name).view(np.float32).reshape(info.shape) for name, info in file.tensors.items()}
        for name, array in expected.items():
            gguf = GGUF_NAMES[name]
            if name in ("tokens", "final_norm", "wcls"):
                np.testing.assert_array_equal(read.pop(f"{gguf}.weight"), array)
            else:
                for i, layer in enumerate(array):
                    np.testing.assert_array_equal(read.pop(f"blk.{i}.{gguf}.weight"), layer)
        assert read == {}

    def test_metadata(self, write: Callable[..., Path], load: Callable[[Path], Model]) -> None:
        model = load(write(v0(), vocabulary()))
        config = model.config
        assert (config.n_embd, config.n_ff, config.n_layer, config.n_vocab, config.seq_len) == (16, 24, 2, 270, 32)
        assert (config.n_head, config.n_head_kv, config.head_dim, config.rms_eps) == (4, 2, 4, 1e-5)
        assert (config.rope.base, config.rope.n_dims, config.rope.interleaved) == (10000.0, 4, True)

    @pytest.mark.parametrize("shared", [True, False])
    def test_versions_0_and_2_agree(
        self, shared: bool, write: Callable[..., Path], load: Callable[[Path], Model]
    ) -> None:
        logits = []
        for checkpoint in (v0(shared), v2(shared)):
            logits.append(load(write(checkpoint)).create_session().eval([5, 261, 17], all_logits=True))
        error = np.square(logits[0] - logits[1]).mean() / np.square(logits[0]).mean()
        assert 0 < error < 1e-3

    def test_logits_match_run_c(self, write: Callable[..., Path], load: Callable[[Path], Model]) -> None:
        tokens = [1, 262, 9, 30]
        expected = run_c(weights(False), tokens)
        got = load(write(v0(False))).create_session().eval(tokens, all_logits=True)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def run_c(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """What run.c computes, in float64: pairs of neighbours turned, key and value heads shared by two query heads."""
    w = {name: array.astype(np.float64) for name, array in w.items()}
    keys: list[list[np.ndarray]] = [[], []]
    values: list[list[np.ndarray]] = [[], []]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt(np.mean(x * x) + 1e-5)

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        z = x.reshape(-1, 2, 2)[..., 0] + 1j * x.reshape(-1, 2, 2)[..., 1]
        z = z * np.exp(1j * position * np.array([1.0, 10000 ** (-2 / 4)]))
        return np.stack([z.real, z.imag], -1).reshape(-1, 4)

    rows = []
    for position, token in enumerate(tokens):
        x = w["tokens"][token]
        for layer in range(2):
            h = norm(x, w["att_norm"][layer])
            q = turn(w["wq"][layer] @ h, position)
            keys[layer].append(turn(w["wk"][layer] @ h, position))
            values[layer].append((w["wv"][layer] @ h).reshape(-1, 4))
            heads = []
            for head in range(4):
                scores = np.array([q[head] @ k[head // 2] for k in keys[layer]]) / 2
                p = np.exp(scores - scores.max())
                heads.append(sum(p_i * v[head // 2] for p_i, v in zip(p / p.sum(), values[layer], strict=True)))
            x = x + w["wo"][layer] @ np.concatenate(heads)
            h = norm(x, w["ffn_norm"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        rows.append(w["wcls"] @ norm(x, w["final_norm"]))
    return np.array(rows)


class TestVocabulary:
    def test_text(self, write: Callable[..., Path], load: Callable[[Path], Model]) -> None:
        model = load(write(v0(), vocabulary()))
        ids = model.encode("once a é€")
        assert ids[0] == model.tokenizer.bos_id == 1
        assert model.tokenizer.eos_id == 2
        assert [model.piece(token) for token in ids[1:3]] == [" once", " a"]
        assert model.decode(ids) == "once a é€"
        assert model.encode("€", add_special=False)[1:] == [3 + byte for byte in "€".encode()]

    @pytest.mark.parametrize("name", ["tok270.bin", "tokenizer.bin"])
    def test_vocabulary_is_found_next_to_the_checkpoint(self, name: str, write: Callable[..., Path], plugins: Plugins) -> None:
        path = write(v2(), vocabulary(), name)
        assert load_tokenizer(path, plugins=plugins).n_vocab == 270

    def test_vocabulary_of_matching_size_comes_first(self, write: Callable[..., Path], plugins: Plugins) -> None:
        path = write(v0(), vocabulary())
        path.with_name("tokenizer.bin").write_bytes(b"of another model")
        assert load_tokenizer(path, plugins=plugins).n_vocab == 270

    def test_missing_vocabulary_allows_token_ids_only(
        self, write: Callable[..., Path], load: Callable[[Path], Model]
    ) -> None:
        path = write(v0())
        model = load(path)
        assert len(list(model.create_session().generate([1], max_tokens=5))) == 5
        with pytest.raises(TokenizerError) as raised:
            model.encode("once")
        for name in ("model.bin", "tok270.bin", "tokenizer.bin"):
            assert str(path.with_name(name)) in str(raised.value)

    @pytest.mark.parametrize(
        ("tokenizer", "message"),
        [
            (b"", "it ends in max_token_length"),
            (vocabulary()[:-1], "it ends in token 269"),
            (vocabulary()[:100], "it ends in token"),
            (vocabulary() + b"\0", "there is more after the last token"),
            (vocabulary(longest=0), "max_token_length is 0"),
            (vocabulary(longest=1 << 30), "max_token_length is 1073741824"),
            (vocabulary(longest=5), "token 2 has 6 bytes; max_token_length is 5"),
            (vocabulary(lengths={4: -1}), "token 4 has -1 bytes"),
            (vocabulary(tokens={7: b"\xff"}), "token 7 is not UTF-8"),
            (vocabulary(scores={9: math.nan}), "the score of token 9 is nan"),
        ],
    )
    def test_broken_vocabularies(self, tokenizer: bytes, message: str, write: Callable[..., Path], plugins: Plugins) -> None:
        with pytest.raises(
            ModelFormatError, match=rf"tok270\.bin: not a llama2\.c vocabulary of 270 tokens: {message}"
        ):
            open_model_file(write(v0(), tokenizer), plugins)

    def test_unreadable_vocabulary(self, write: Callable[..., Path]) -> None:
        with pytest.raises(ModelFormatError, match=r"none\.bin: cannot read the file"):
            llama2c.read_vocabulary(write(v0()).with_name("none.bin"), 270)


class TestRecognition:
    def test_checkpoints(self, write: Callable[..., Path]) -> None:
        for checkpoint in (v0(), v0(False), v2(), v2(False)):
            assert llama2c.matches(write(checkpoint))

    @pytest.mark.parametrize(
        "other",
        [
            b"",
            b"\0" * 27,
            b"\0" * 4096,
            b"GGUF" + bytes(1000),
            b"PK\3\4" + bytes(range(256)) * 8,
            bytes(range(256)) * 64,
            v0()[:-1],
            v0() + b"\0",
            v0(n_heads=0),
            v0(n_heads=3),
            v0(n_kv_heads=3),
            v0(seq_len=31),
            v0(vocab_size=-270),
            struct.pack("<7i", *[2**31 - 1] * 7),
        ],
        ids=lambda other: f"{len(other)} bytes",
    )
    def test_other_files(self, other: bytes, write: Callable[..., Path]) -> None:
        assert not llama2c.matches(write(other))

    def test_unreadable_files(self, tmp_path: Path) -> None:
        assert not llama2c.matches(tmp_path)
        assert not llama2c.matches(tmp_path / "missing")

    @pytest.mark.parametrize(
        ("checkpoint", "message"),
        [
            (v2(version=1), r"version 1 is not supported \(0 and 2 are\)"),
            (v2(version=-7), "version -7"),
            (v2()[:100], "a header has 256 bytes, not 100"),
            (v2()[:-1], r"a llama2\.c checkpoint with this header has \d+ bytes, not \d+"),
            (v2() + b"\0", "with this header has"),
            (v2(flag=2), "shared_classifier is 2"),
            (v2(flag=0), "with this header has"),
            (v2(group=0), "group_size is 0"),
            (v2(group=-8), "group_size is -8"),
            (v2(group=7), r"group_size 7 does not divide token_embd \(270, 16\)"),
            *((v2(**{field: 0}), f"{field} is 0") for field in SIZES),
            *((v2(**{field: -4}), f"{field} is -4") for field in SIZES),
            (v2(n_heads=5), "dim 16 does not make n_heads 5 of even width"),
            (v2(n_heads=16), "dim 16 does not make n_heads 16 of even width"),
            (v2(n_kv_heads=3), "n_heads 4 is no multiple of n_kv_heads 3"),
            (v2(**dict.fromkeys(SIZES, 2**31 - 1) | {"n_heads": 1, "dim": 2**31 - 8}), "n_heads 1 is no multiple"),
            (v2(n_layers=2**31 - 1, vocab_size=2**31 - 1, hidden_dim=2**31 - 8), "with this header has"),
        ],
        ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)} bytes",
    )
    def test_broken_checkpoints(
        self, checkpoint: bytes, message: str, write: Callable[..., Path], plugins: Plugins
    ) -> None:
        path = write(checkpoint)
        with pytest.raises(ModelFormatError, match=message) as raised:
            open_model_file(path, plugins)
        assert str(path) in str(raised.value)

    def test_opening_a_file_that_does_not_match(self, write: Callable[..., Path]) -> None:
        for other in (v0()[:-4], b"", b"abc"):
            with pytest.raises(ModelFormatError, match=r"model\.bin: "):
                llama2c.open_checkpoint(write(other))


@pytest.mark.skipif(not MODELS.is_dir(), reason=f"{MODELS} is not there")
class TestTrained:
    def story(self, model: Model, n: int) -> list[int]:
        return [token.id for token in model.create_session().generate([1], max_tokens=n, ignore_eos=True)]

    def test_v0_matches_its_gguf(self, load: Callable[[Path], Model]) -> None:
        bin_, gguf = load(MODELS / "stories260K.bin"), load(MODELS / "stories260K.gguf")
        recorded = np.load(ROOT / "tests" / "goldens" / "stories260K.gguf.npy").tolist()
        assert self.story(bin_, 200) == self.story(gguf, 200) == recorded
        text = "Once upon a time, there was a little girl named Lily."
        ids = bin_.encode(text)
        assert ids == gguf.encode(text)
        assert bin_.decode(self.story(bin_, 40)).startswith(text)
        logits = [model.create_session().eval(ids, all_logits=True) for model in (bin_, gguf)]
        np.testing.assert_array_equal(*logits)

    def test_v2_generates_text(self, load: Callable[[Path], Model]) -> None:
        exact, rounded = load(MODELS / "stories260K.bin"), load(MODELS / "stories260K-q8.llama2c-v2.bin")
        text = rounded.decode(self.story(rounded, 100))
        assert text.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")
        ids = self.story(exact, 100)
        logits = [model.create_session().eval(ids, all_logits=True) for model in (exact, rounded)]
        assert np.square(logits[0] - logits[1]).mean() / np.square(logits[0]).mean() < 1e-3
