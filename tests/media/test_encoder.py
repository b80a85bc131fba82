"""Media encoders compared with llama.cpp's recorded embeddings of pictures, and their files."""

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llamacli import MediaError, Model, ModelFormatError, load_model
from llamacli.engine import Engine, QuantMode, ReferenceEngine, default_engine
from llamacli.errors import ClosedError, UnknownArchitectureError
from llamacli.gguf import open_gguf
from llamacli.media.encoder import LoadedEncoder, Tile, compile_encoder, find_mmproj
from llamacli.media.pictures import Picture
from llamacli.plugins import Plugins
from llamacli.testing.models import write_gguf
from llamacli.testing.tiny_media import drawn, mmproj_contents
from media_cases import CASES, prompt, write_mmproj, write_text
from oracle.goldens import DIRECTORY, nmse, sha256
from oracle.media import AFTER, BEFORE, N_CTX, thinned

GOLDEN = np.load(DIRECTORY / "media.npz")
LOGITS = {
    "gemma3": 2e-7, "gemma3 odd": 2e-7, "gemma3 q8_0": 5e-3, "idefics3 f16": 5e-3, "qwen3vl": 5e-8, "qwen35": 3e-7,
    "mistral3": 5e-8, "internvl norms": 1e-7, "gemma4v": 5e-6, "gemma4v silu": 2e-7, "gemma4uv": 2e-7,
}  # fmt: skip
"""Bounds of the logits' NMSE beside 1e-8: the peer reads GELU from a float16 table, and rounds what it multiplies by
weights of F16 and Q8_0."""
ROWS = {"gemma4v": 5e-6}
"""Bounds of the rows' NMSE beside 2e-7: sharp attention of normalised queries and keys multiplies an NMSE of its input
by 20."""


def encoder_of(path: Path, name: str, engine: Engine | None = None, mode: QuantMode = QuantMode.FP32) -> LoadedEncoder:
    with closing(open_gguf(path)) as file:
        return compile_encoder(CASES[name].encoder, file, mode, engine or default_engine(1))


def tiles(encoder: LoadedEncoder, picture: np.ndarray) -> list[Tile]:
    return [part for part in encoder.layout(Picture.of(picture)) if isinstance(part, Tile)]


def embeddings(encoder: LoadedEncoder, picture: np.ndarray) -> np.ndarray:
    return np.concatenate([encoder.encode(tile) for tile in tiles(encoder, picture)])


def load(folder: Path, name: str, **options: object) -> Model:
    case = CASES[name]
    path = folder / "text.gguf"
    if not path.exists():
        write_text(path, name)
        write_mmproj(folder / "mmproj-text.gguf", name)
    plugins = Plugins.of(case.text, media=[case.encoder])
    return load_model(path, "fp32", plugins=plugins, threads=1, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", [ReferenceEngine(), default_engine(1)], ids=["reference", "native"])
def test_embeddings_are_those_of_the_peer(tmp_path: Path, name: str, engine: Engine) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", name)
    assert sha256(path) == str(GOLDEN[f"{name} sha256"])
    is_rounded = "type" in CASES[name].options
    with closing(encoder_of(path, name, engine, QuantMode.AUTO if is_rounded else QuantMode.FP32)) as encoder:
        for picture, size in CASES[name].pictures.items():
            rows = thinned(picture, embeddings(encoder, drawn(*size)))
            found = nmse(GOLDEN[f"{name} {picture} rows"], rows)
            assert found < (2e-4 if is_rounded else ROWS.get(name, 2e-7))


@pytest.mark.parametrize("name", CASES)
def test_ids_and_logits_are_those_of_the_peer(tmp_path: Path, name: str) -> None:
    with load(tmp_path, name) as model:
        assert sha256(tmp_path / "text.gguf") == str(GOLDEN[f"{name} text sha256"])
        for picture, size in CASES[name].pictures.items():
            inputs = prompt(model, BEFORE, Picture.of(drawn(*size)), AFTER)
            ids = inputs.ids.copy()
            ids[inputs.rows] = -1
            np.testing.assert_array_equal(ids, GOLDEN[f"{name} {picture} ids"])
            expected = GOLDEN[f"{name} {picture} logits"]
            with model.create_session(n_ctx=N_CTX) as session:
                logits = session.eval(inputs, all_logits=True)
            assert logits is not None
            assert nmse(expected, logits[-len(expected) :]) < LOGITS.get(name, 1e-8)


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[LoadedEncoder]:
    with closing(encoder_of(write_mmproj(tmp_path / "mmproj.gguf", "idefics3"), "idefics3")) as loaded:
        yield loaded


def test_layers_share_one_layer_of_the_cache(encoder: LoadedEncoder) -> None:
    assert encoder.config.n_layer == 2
    assert len(encoder.program.states) == 1


def test_threads_change_no_bit(tmp_path: Path, encoder: LoadedEncoder) -> None:
    with closing(encoder_of(tmp_path / "mmproj.gguf", "idefics3", default_engine(2))) as other:
        np.testing.assert_array_equal(embeddings(encoder, drawn(61, 33)), embeddings(other, drawn(61, 33)))


@pytest.mark.parametrize("name", ["idefics3", "gemma3 odd", "gemma3 q8_0"])
def test_pieces_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, counts = write_mmproj(tmp_path / "mmproj.gguf", name), []
    with closing(encoder_of(path, name, mode=QuantMode.AUTO)) as encoder:
        rows = embeddings(encoder, drawn(61, 33))
    for work, n_rows in ((1e9, 96), (1e5, 96), (1.0, 5)):
        monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", work)
        monkeypatch.setattr("llamacli.engine.native._PIECE_ROWS", n_rows)
        with closing(encoder_of(path, name, mode=QuantMode.AUTO)) as encoder:
            tile = tiles(encoder, drawn(61, 33))[0]
            pieces = encoder.encode_in_pieces(tile)
            counts.append(sum(1 for _ in pieces))
            np.testing.assert_array_equal(encoder.encode(tile), rows[: len(tile.ids)])
    assert counts[0] < 4 < counts[1] < counts[2]


def test_a_tile_that_is_given_up_is_encoded_anew(encoder: LoadedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", 1e4)
    one, other = tiles(encoder, drawn(61, 33))[:2]
    rows = encoder.encode(one).copy()
    encoder._kept.clear()
    begun = encoder.encode_in_pieces(one)
    for _ in range(5):
        next(begun)
    begun.close()
    encoder.encode(other)
    np.testing.assert_array_equal(encoder.encode(one), rows)


def test_a_tile_is_encoded_once(encoder: LoadedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embeddings(encoder, drawn(50, 40))
    monkeypatch.setattr(encoder, "_encoded", None)
    np.testing.assert_array_equal(embeddings(encoder, drawn(50, 40)), first)
    with pytest.raises(TypeError):
        embeddings(encoder, drawn(50, 40, seed=1))


def test_rows_are_kept_within_a_limit(encoder: LoadedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llamacli.media.encoder.KEPT_BYTES", 3 * encoder.encode(tiles(encoder, drawn(32, 32))[0]).nbytes
    )
    embeddings(encoder, drawn(50, 40))
    assert len(encoder._kept) == 3


def test_keys_are_of_pixels_and_encoder(tmp_path: Path, encoder: LoadedEncoder) -> None:
    one, again, other = (tiles(encoder, drawn(32, 32, seed)) for seed in (0, 0, 1))
    assert one == again
    assert [tile.ids for tile in one] == [tile.ids for tile in again]
    assert not {key for tile in one for key in tile.ids} & {key for tile in other for key in tile.ids}
    path = write_mmproj(tmp_path / "other.gguf", "idefics3", seed="2")
    with closing(encoder_of(path, "idefics3")) as second:
        assert not {tile.key for tile in one} & {tile.key for tile in tiles(second, drawn(32, 32))}


def test_extreme_proportions_make_whole_tiles(encoder: LoadedEncoder) -> None:
    for size in ((1, 1), (1, 5000), (5000, 1)):
        found = tiles(encoder, drawn(*size))
        assert {tile.pixels.shape for tile in found if tile.pixels is not None} == {(32, 32, 3)}


def test_a_closed_encoder_encodes_nothing(encoder: LoadedEncoder) -> None:
    tile = tiles(encoder, drawn(32, 32))[0]
    encoder.close()
    with pytest.raises(ClosedError):
        encoder.encode(tile)


class TestFiles:
    def test_a_language_model_is_no_encoder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFormatError, match=r"text\.gguf: general\.architecture = 'llama': not a mmproj file"):
            load(tmp_path, "idefics3", mmproj=tmp_path / "text.gguf")

    def test_an_encoder_is_no_language_model(self, tmp_path: Path) -> None:
        path = write_mmproj(tmp_path / "mmproj.gguf", "idefics3")
        with pytest.raises(ModelFormatError, match=r"mmproj\.gguf: it is a mmproj file, the encoder of pictures"):
            load_model(path, plugins=Plugins.of(CASES["idefics3"].text))

    def test_the_encoder_of_another_model(self, tmp_path: Path) -> None:
        other = write_mmproj(tmp_path / "other.gguf", "idefics3", keys={"projection_dim": 96})
        message = (
            "encoder 'tiny idefics3' makes embeddings of 96 numbers, and the model 'tiny media idefics3' has .* 64"
        )
        with pytest.raises(ModelFormatError, match=message):
            load(tmp_path, "idefics3", mmproj=other)

    def test_an_unknown_projector(self, tmp_path: Path) -> None:
        other = write_mmproj(tmp_path / "other.gguf", "idefics3", **{"clip.projector_type": "cubist"})
        with pytest.raises(UnknownArchitectureError, match=r"clip\.projector_type = 'cubist' \(installed: idefics3\)"):
            load(tmp_path, "idefics3", mmproj=other)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (
                {"patch_size": 5},
                "clip.vision.image_size = 32 is not a multiple of 2 patches of clip.vision.patch_size = 5",
            ),
            ({"image_std": [0.5, 0.0, 0.5]}, "clip.vision.image_std"),
            ({"attention.head_count": 5}, "clip.vision.embedding_length = 48 is not a multiple"),
        ],
    )
    def test_keys_out_of_range(self, tmp_path: Path, keys: dict[str, object], message: str) -> None:
        with pytest.raises(ModelFormatError, match=message):
            write_mmproj(tmp_path / "bad.gguf", "idefics3", keys=keys)

    def test_an_encoder_of_sound_in_the_same_file(self, tmp_path: Path) -> None:
        metadata, tensors = mmproj_contents(CASES["idefics3"].encoder, seed="idefics3")
        sound = dict.fromkeys(("a.blk.0.ln1.weight", "mm.a.fc.weight"), tensors["v.post_ln.weight"])
        write_gguf(tmp_path / "both.gguf", "clip", metadata, tensors | sound)
        with closing(encoder_of(tmp_path / "both.gguf", "idefics3")) as encoder:
            assert embeddings(encoder, drawn(32, 32)).shape[1] == 64

    def test_a_file_without_vision(self, tmp_path: Path) -> None:
        path = write_mmproj(tmp_path / "bad.gguf", "idefics3", **{"clip.has_vision_encoder": False})
        with pytest.raises(ModelFormatError, match="has_vision_encoder = false"):
            encoder_of(path, "idefics3")

    def test_a_projector_of_another_width(self, tmp_path: Path) -> None:
        path = write_mmproj(tmp_path / "bad.gguf", "idefics3", **{"clip.vision.projection_dim": 32})
        with pytest.raises(ModelFormatError, match=r"tensor mm\.model\.fc\.weight has shape \(64, 192\)"):
            encoder_of(path, "idefics3")


class TestFolder:
    def test_a_model_without_a_file(self, tmp_path: Path) -> None:
        with load(tmp_path, "idefics3") as model:
            (tmp_path / "mmproj-text.gguf").unlink()
            with pytest.raises(MediaError, match="no encoder of pictures or sound: there is no mmproj file"):
                model.media_encoder()

    def test_the_one_that_fits_is_taken(self, tmp_path: Path) -> None:
        write_mmproj(tmp_path / "a.mmproj.gguf", "idefics3", keys={"projection_dim": 96})
        with load(tmp_path, "idefics3") as model:
            assert model.media_encoder().n_embd == 64
            assert model.media_encoder() is model.media_encoder()

    def test_several_that_fit_are_refused(self, tmp_path: Path) -> None:
        write_mmproj(tmp_path / "mmproj-F16.gguf", "idefics3")
        with (
            load(tmp_path, "idefics3") as model,
            pytest.raises(ModelFormatError, match=r"mmproj-F16\.gguf, mmproj-text\.gguf; name one by `mmproj`"),
        ):
            model.media_encoder()

    def test_the_root_of_a_repository(self, tmp_path: Path) -> None:
        root = tmp_path / "snapshots" / ("1" * 40)
        (root / "Q4").mkdir(parents=True)
        write_mmproj(root / "mmproj-F16.gguf", "idefics3")
        model = write_text(root / "Q4" / "text.gguf", "idefics3")
        with closing(find_mmproj(model, 64)) as found:
            assert found.path == root / "mmproj-F16.gguf"

    def test_blobs_of_ollama(self, tmp_path: Path) -> None:
        blobs, manifests = tmp_path / "blobs", tmp_path / "manifests" / "registry" / "library"
        blobs.mkdir()
        (manifests / "tiny").mkdir(parents=True)
        model = write_text(blobs / f"sha256-{1:064x}", "idefics3")
        write_mmproj(blobs / f"sha256-{2:064x}", "idefics3")
        assert find_mmproj(model, 64) is None
        kind = "application/vnd.ollama.image"
        layers = [
            {"mediaType": f"{kind}.{name}", "digest": f"sha256:{i:064x}"}
            for i, name in ((1, "model"), (2, "projector"))
        ]
        (manifests / "tiny" / "other").write_text(json.dumps({"layers": layers[1:]}))
        (manifests / "tiny" / "broken").write_text("{")
        assert find_mmproj(model, 64) is None
        (manifests / "tiny" / "latest").write_text(json.dumps({"layers": layers}))
        case = CASES["idefics3"]
        with load_model(model, "fp32", plugins=Plugins.of(case.text, media=[case.encoder]), threads=1) as loaded:
            assert loaded.media_encoder().metadata.source.endswith(f"sha256-{2:064x}")

    def test_closing_the_model_frees_it(self, tmp_path: Path) -> None:
        """Weights, cells and rows, while a session is still there."""
        with load(tmp_path, "idefics3") as model:
            encoder, session = model.media_encoder(), model.create_session()
            rows = weakref.ref(encoder.encode(tiles(encoder, drawn(32, 32))[0]))
            freed = [weakref.ref(encoder.program), weakref.ref(encoder._pool), rows]
            assert encoder._pool.n_used_bytes == 0
            del encoder
        gc.collect()
        assert [one() for one in freed] == [None] * 3
        session.close()

    def test_closing_the_model_closes_it(self, tmp_path: Path) -> None:
        with load(tmp_path, "idefics3") as model:
            encoder = model.media_encoder()
        with pytest.raises(ClosedError):
            _ = encoder.program
        with pytest.raises(ClosedError):
            model.media_encoder()
