"""Values of ops, and their comparison with dumps in llama-eval-callback's format."""

import io
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path

import attrs
import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError, MediaError, Rope, load_model
from llamacli.engine import QuantMode, ReferenceEngine
from llamacli.gguf import Metadata
from llamacli.media.encoder import MediaEncoder
from llamacli.media.pictures import Picture
from llamacli.media.sound import Sound
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing.dump import _print_numbers, write_dump, write_encoder_dump
from llamacli.testing.tiny import TinyEncoder
from llamacli.testing.tiny_media import drawn, embeddings, write_mmproj
from llamacli.tools.op_values import (
    DIFFERENT,
    EQUAL,
    UNKNOWN,
    OpValues,
    Recorded,
    compare,
    first_difference,
    read_dump,
)
from llamacli_llama import Llama, LlamaConfig
from llamacli_llama.idefics3 import Idefics3
from llamacli_qwen.vision import Qwen3Vision
from sound_cases import CASES, PEER_CASES, PEER_SOUNDS, write_hearing

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture
def recorded(tiny_gguf: TinyGguf, plugins: Plugins) -> Recorded:
    return Recorded.of(tiny_gguf("gqa"), plugins)


def dump_of(values: Iterable[OpValues], path: Path, change: Callable[[str, np.ndarray], None] | None = None) -> Path:
    """Write a dump with our own values; `change` may change a tensor's."""
    out = io.StringIO()
    for value in values:
        op, rows = value.op, value.rows.copy()
        name = f"{op.verb}{op.number}-{op.layer}" if op.layer is not None else op.verb
        if change:
            change(name, rows)
        sources = ", ".join(f"{tensor}{{1, 1, 1, 1}}" for tensor in op.tensors)
        sizes = f"{rows.shape[1]}, {rows.shape[0]}, 1, 1"
        print(f"ggml_debug: {name:>24} = (f32) {'OP':>10}({sources}}}) = {{{sizes}}}", file=out)
        _print_numbers(rows[None, None], out)
    path.write_text(f"a line of the program\n{out.getvalue()}another\n")
    return path


def test_the_last_op_computes_the_logits(recorded: Recorded, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    values = recorded.values(TOKENS)
    with load_model(tiny_gguf("gqa"), "fp32", plugins=plugins, engine=ReferenceEngine()) as model:
        expected = model.create_session().eval(TOKENS, all_logits=True)
    np.testing.assert_array_equal(values[-1].rows, expected)
    assert values[-1].norm == pytest.approx(np.linalg.norm(expected))


def test_ops_have_their_layer_tensors_and_inputs(recorded: Recorded) -> None:
    embed, norm, q, rotate = recorded.ops[:4]
    assert (embed.verb, embed.layer, embed.tensors, embed.inputs) == ("embed", None, ("token_embd.weight",), ())
    assert (norm.verb, norm.layer, norm.inputs) == ("rms_norm", 0, (0,))
    assert (q.verb, q.tensors, q.inputs, q.width) == ("linear", ("blk.0.attn_q.weight",), (1,), 64)
    assert (rotate.verb, rotate.layer, rotate.tensors) == ("rotate", 0, ())
    assert "store" not in {value.op.verb for value in recorded.values(TOKENS)}


@pytest.mark.parametrize("tokens", [[], [-1], [128]])
def test_invalid_tokens(tokens: list[int], recorded: Recorded) -> None:
    with pytest.raises(InvalidRequestError, match="tokens must be ids from 0 to 127"):
        recorded.values(tokens)


def test_dump_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    out = io.StringIO()
    print(
        "common_debug_cb_eval:  Qcur-0 = (f32) MUL_MAT(blk.0.attn_q.weight{8, 8, 1, 1}, norm-0{8, 9, 1, 1}}) =",
        end="",
        file=out,
    )
    print(" {8, 9, 2, 1}", file=out)
    array = np.arange(144, dtype=np.float32).reshape(1, 2, 9, 8)
    _print_numbers(array, out)
    path.write_text(out.getvalue())
    (tensor,) = read_dump(path)
    assert (tensor.name, tensor.op, tensor.shape) == ("Qcur-0", "MUL_MAT", (8, 9, 2, 1))
    assert tensor.sources == ("blk.0.attn_q.weight", "norm-0")
    assert len(tensor.numbers) == 2 * 6 * 6
    np.testing.assert_array_equal(array.reshape(-1)[tensor.places], tensor.numbers)


@pytest.mark.parametrize("text", ["", "no tensor", "f: x = (f32) OP() = {2, 1, 1, 1}\n [ 1.0000],\nsum = 1.0\n"])
def test_broken_dumps_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "dump.txt").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"no tensor as llama-eval-callback|has 1 numbers, not 2"):
        read_dump(tmp_path / "dump.txt")


def test_equal_values(recorded: Recorded, tmp_path: Path) -> None:
    values = recorded.values(TOKENS)
    matches = compare(values, read_dump(dump_of(values, tmp_path / "dump.txt")))
    assert {match.status for match in matches} == {EQUAL}
    assert first_difference(matches) is None


def test_first_difference_is_found(recorded: Recorded, tmp_path: Path) -> None:
    def change(name: str, rows: np.ndarray) -> None:
        if name in ("linear9-0", "add10-0") or name.endswith("-1"):
            rows += 0.1

    values = recorded.values(TOKENS)
    matches = compare(values, read_dump(dump_of(values, tmp_path / "dump.txt", change)))
    assert [match.status for match in matches[:9]] == [EQUAL] * 8 + [DIFFERENT]
    first, suspects = first_difference(matches)
    assert (first.values.op.number, first.values.op.tensors) == (9, ("blk.0.attn_output.weight",))
    assert suspects == []


def test_ops_without_counterpart_are_suspects(recorded: Recorded, tmp_path: Path) -> None:
    def change(name: str, rows: np.ndarray) -> None:
        if name.startswith(("rotate", "attention")) or name == "linear9-0":
            rows += 0.3 + np.arange(rows.shape[1], dtype=np.float32)

    values = recorded.values(TOKENS)
    matches = compare(values, read_dump(dump_of(values, tmp_path / "dump.txt", change)))
    first, suspects = first_difference(matches)
    assert first.values.op.number == 9
    assert [match.values.op.verb for match in suspects] == ["rotate", "attention"]
    assert {match.status for match in matches if match.values.op.verb == "attention"} == {UNKNOWN}


def test_last_rows_alone_are_compared(recorded: Recorded, tmp_path: Path) -> None:
    values = recorded.values(TOKENS)
    last = [*values[:-1], OpValues(values[-1].op, values[-1].rows[-1:])]
    assert compare(values, read_dump(dump_of(last, tmp_path / "dump.txt")))[-1].status == EQUAL


class WrongPairs(Llama):
    """Llama with the other style of RoPE."""

    def configure(self, metadata: Metadata) -> LlamaConfig:
        common = super().configure(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        return LlamaConfig.from_gguf(metadata, rope=rope)


class TestPeer:
    """Dumps of llama.cpp itself."""

    @pytest.fixture
    def dump(self, tiny_gguf: TinyGguf, tmp_path: Path) -> Path:
        pytest.importorskip("llama_cpp")
        with (tmp_path / "dump.txt").open("w") as out:
            write_dump(tiny_gguf("gqa"), TOKENS, out)
        return tmp_path / "dump.txt"

    def test_all_ops_are_equal(self, dump: Path, recorded: Recorded) -> None:
        matches = compare(recorded.values(TOKENS), read_dump(dump))
        assert {match.status for match in matches} == {EQUAL}

    def test_wrong_rope_is_found(self, dump: Path, tiny_gguf: TinyGguf) -> None:
        wrong = Recorded.of(tiny_gguf("gqa"), Plugins.of(WrongPairs()))
        first, suspects = first_difference(compare(wrong.values(TOKENS), read_dump(dump)))
        assert first.values.op.tensors == ("blk.0.attn_output.weight",)
        assert [match.values.op.verb for match in suspects] == ["rotate", "attention"]


def test_entry_points_are_used(tiny_gguf: TinyGguf) -> None:
    plugins = Plugins([EntryPoint("llama", "llamacli_llama", ARCHITECTURES)])
    assert Recorded.of(tiny_gguf("gqa"), plugins).config.architecture == "llama"


def test_models_with_an_encoder_are_refused(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with pytest.raises(InvalidRequestError, match="an encoder and a decoder have a text each"):
        Recorded.of(tiny_gguf("t5"), plugins).values(TOKENS)


class TestPictures:
    @pytest.fixture
    def mmproj(self, tmp_path: Path) -> Path:
        return write_mmproj(tmp_path / "mmproj.gguf", architecture=Idefics3(), keys={"preproc_image_size": 64})

    def test_the_last_op_computes_the_embeddings(self, mmproj: Path) -> None:
        values = Recorded.of(mmproj, Plugins.of(media=[Idefics3()])).values_of_medium(Picture.of(drawn(32, 32)))
        tiny = TinyEncoder(Idefics3(), "", mmproj, None)
        with closing(tiny.load_encoder(QuantMode.FP32, ReferenceEngine())) as loaded:
            rows = embeddings(loaded, [drawn(32, 32)])
        np.testing.assert_array_equal(values[-1].rows, rows[-len(values[-1].rows) :])
        assert {value.op.layer for value in values} == {None, 0, 1}

    def test_text_and_pictures_are_told_apart(self, mmproj: Path, recorded: Recorded) -> None:
        encoder = Recorded.of(mmproj, Plugins.of(media=[Idefics3()]))
        with pytest.raises(InvalidRequestError, match=r"mmproj\.gguf: it is a media encoder: it has no tokens"):
            encoder.values([1])
        with pytest.raises(InvalidRequestError, match="it is a language model, which reads no media by itself"):
            recorded.values_of_medium(Picture.of(drawn(32, 32)))

    @pytest.mark.medium
    @pytest.mark.parametrize(
        ("encoder", "keys"),
        [(Idefics3(), {"preproc_image_size": 64}), (Qwen3Vision(), {"is_deepstack_layers": [True, False]})],
        ids=["idefics3", "qwen3vl"],
    )
    def test_dumps_of_mtmd_agree(self, encoder: MediaEncoder, keys: dict[str, object], tmp_path: Path) -> None:
        pytest.importorskip("llama_cpp")
        is_qwen = isinstance(encoder, Qwen3Vision)
        mmproj = write_mmproj(tmp_path / "mmproj.gguf", architecture=encoder, keys=keys, fused=is_qwen)
        with (tmp_path / "dump").open("w") as out:
            write_encoder_dump(mmproj, Picture.of(drawn(61, 33)), out)
        values = Recorded.of(mmproj).values_of_medium(Picture.of(drawn(61, 33)))
        dump = read_dump(tmp_path / "dump")
        matches = compare(values, dump)
        assert first_difference(matches) is None
        assert sum(match.status == EQUAL for match in matches) >= len(matches) - 2
        wrong = compare([attrs.evolve(value, rows=value.rows + 1, others=()) for value in values], dump)
        assert first_difference(wrong) is not None


class TestSound:
    def test_the_other_medium_is_refused(self, tmp_path: Path) -> None:
        write_hearing(tmp_path, "qwen3a")
        recorded = Recorded.of(tmp_path / "mmproj-text.gguf", Plugins.of(media=[CASES["qwen3a"].encoder]))
        with pytest.raises(
            MediaError, match=r"mmproj-text\.gguf' is one of sound: the model has no encoder of pictures"
        ):
            recorded.values_of_medium(Picture.of(drawn(32, 32)))

    @pytest.mark.medium
    @pytest.mark.parametrize("name", PEER_CASES)
    def test_products_of_mtmd_agree(self, name: str, tmp_path: Path) -> None:
        pytest.importorskip("llama_cpp")
        write_hearing(tmp_path, name)
        mmproj, sound = tmp_path / "mmproj-text.gguf", Sound.of(PEER_SOUNDS["short"])
        with (tmp_path / "dump").open("w") as out:
            write_encoder_dump(mmproj, sound, out)
        values = Recorded.of(mmproj, Plugins.of(media=[PEER_CASES[name].encoder])).values_of_medium(sound)
        products = [value for value in values if value.op.verb == "linear"]
        assert len(products) >= 14
        dump = read_dump(tmp_path / "dump")
        assert {match.status for match in compare(products, dump)} == {EQUAL}
        wrong = [attrs.evolve(value, rows=value.rows + 1, others=()) for value in products]
        assert EQUAL not in {match.status for match in compare(wrong, dump)}
