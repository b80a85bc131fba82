"""Descriptions of models, loaded or not."""

from pathlib import Path

import pytest

import llamacli
from llamacli.errors import ModelFormatError
from llamacli.serve.models import Entry, ModelSource, load, unloaded_info
from llamacli.serve.settings import EngineSettings
from llamacli.tools.embedding import Pooling

DEMO = Path(llamacli.__file__).parent / "data" / "demo.gguf"


def test_file_describes_a_model_that_is_not_loaded() -> None:
    info = Entry(ModelSource("demo", DEMO, ("story",))).info
    assert (info.name, info.aliases, info.loaded, info.n_ctx) == ("demo", ("story",), False, None)
    assert info.n_bytes == DEMO.stat().st_size
    assert info.created == int(DEMO.stat().st_mtime)
    missing = unloaded_info(ModelSource("none", DEMO.with_name("none.gguf")))
    assert (missing.n_bytes, missing.created) == (0, 0)


def test_loaded_model_is_described_and_fingerprints_tell_types_of_the_cache() -> None:
    source, settings = ModelSource("demo", DEMO), EngineSettings(n_ctx=100, threads=1)
    loaded, other = (load(source, EngineSettings(n_ctx=100, threads=1, kv_type=kind)) for kind in (None, "q8_0"))
    again = load(source, settings)
    info = loaded.info
    assert (info.n_ctx, info.n_ctx_train, info.n_vocab, info.loaded) == (100, 1024, 2048, True)
    assert info.fingerprint == again.info.fingerprint != other.info.fingerprint
    assert (info.architecture, info.file_type) == ("llama", "Q8_0")
    assert loaded.scheduler.pooling.default is Pooling.MEAN
    for one in (loaded, other, again):
        one.model.close()


def test_files_without_pooling_have_the_mean_unless_none_is_asked_for() -> None:
    for wanted, found in ((None, Pooling.MEAN), (Pooling.NONE, Pooling.NONE), (Pooling.LAST, Pooling.LAST)):
        loaded = load(ModelSource("demo", DEMO), EngineSettings(n_ctx=100, threads=1, pooling=wanted))
        assert (loaded.info.pooling, loaded.info.ranks) == (found, False)
        loaded.close()
    with pytest.raises(llamacli.InvalidRequestError, match=r"pooling rank: .* has no classifier head"):
        load(ModelSource("demo", DEMO), EngineSettings(n_ctx=100, threads=1, pooling=Pooling.RANK))


def test_model_is_closed_if_its_scheduler_cannot_be_made() -> None:
    closed = []

    def load_model(*args: object, **options: object) -> llamacli.Model:
        model = llamacli.load_model(DEMO, threads=1)
        close = model.close
        model.close = lambda: (closed.append(True), close())  # type: ignore[method-assign,assignment,func-returns-value]
        return model

    with pytest.raises(llamacli.InvalidRequestError, match="bytes of KV cache"):
        load(ModelSource("demo", DEMO), EngineSettings(n_ctx=512, kv_memory=1000), load_model)
    assert closed == [True]


def test_broken_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError):
        load(ModelSource("broken", path), EngineSettings())
