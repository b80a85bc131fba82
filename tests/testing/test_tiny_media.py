"""Checks of media encoders: right ones pass, faults are found."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli.blocks.sound import SoundConfig
from llamacli.blocks.vision import VisionConfig
from llamacli.media.encoder import MediaEncoder
from llamacli.media.pictures import Pixels
from llamacli.media.sound import Mel, Samples
from llamacli.testing import ConformanceError, parametrize_with_checks
from llamacli.testing.parametrize import Check, checks_of
from llamacli.testing.tiny_media import write_mmproj
from llamacli_llama.idefics3 import Idefics3
from llamacli_qwen.sound import Qwen3Sound
from paths import PLUGINS, add_plugin_paths
from sound_cases import PeerQwen3Sound
from suite import slow_but

add_plugin_paths()
MODULES = [importlib.import_module(path.stem) for path in sorted(PLUGINS.glob("*/tests/tiny_*_media.py"))]
MEDIA = {name: variant for module in MODULES for name, variant in module.MEDIA.items()}
INERT = [pattern for module in MODULES for pattern in getattr(module, "INERT", ())]
ENCODERS = [options["architecture"] for _, options, _ in MEDIA.values()]


@parametrize_with_checks(ENCODERS, MEDIA, inert=INERT, slow=pytest.mark.slow)
def test_encoders(check: Check) -> None:
    check()


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", slow_but(("gemma3", "qwen2vl"), [name for name, (_, _, bound) in MEDIA.items() if bound])
)
def test_embeddings_are_those_of_mtmd(name: str) -> None:
    pytest.importorskip("llama_cpp")
    check_peer(*MEDIA[name])


@pytest.mark.medium
def test_embeddings_of_sound_are_those_of_mtmd() -> None:
    pytest.importorskip("llama_cpp")
    write, options, _ = MEDIA["qwen3a"]
    check_peer(write, options | {"architecture": PeerQwen3Sound()}, 5e-10)


def check_peer(write: Callable[..., Path], options: Mapping[str, Any], bound: float) -> None:
    (check,) = (
        c for c in checks_of(options["architecture"], {"tiny": (write, options, bound)}, peer=True) if c.name == "peer"
    )
    measured = check()
    assert measured is not None
    assert 0 < measured <= bound


class Moody(Idefics3):
    """Encoder whose tiles do not depend on the picture's pixels alone."""

    n_calls = 0

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        self.n_calls += 1
        return [np.full((config.image_size, config.image_size, 3), self.n_calls, np.uint8)]


class Blind(Idefics3):
    """Encoder that divides every picture into the same tile."""

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        return [np.zeros((config.image_size, config.image_size, 3), np.uint8)]


class Deaf(Qwen3Sound):
    """Encoder that hears silence only."""

    def layout(self, samples: Samples, config: SoundConfig) -> list[str | Mel]:
        return super().layout(np.zeros_like(samples), config)


class Empty(Idefics3):
    """Encoder that makes text of a picture."""

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        return ["a picture"]


def run(encoder: MediaEncoder, name: str, **options: Any) -> None:
    variants = {"tiny": (write_mmproj, {"architecture": encoder} | options, None)}
    (check,) = (c for c in checks_of(encoder, variants) if c.name == name and c.scope != "others")
    check()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Moody, "the tiles of a picture of 1 x 1 pixels do not depend on it alone"),
        (Blind, "the tiles of a picture of 1 x 1 pixels do not depend on it alone"),
        (Empty, "a picture of 1 x 1 pixels has no tiles"),
    ],
)
def test_wrong_layouts_are_found(kind: type[Idefics3], message: str) -> None:
    with pytest.raises(ConformanceError, match=f"idefics3, variant tiny: {message}"):
        run(kind(), "layouts")


def test_wrong_layouts_of_sound_are_found() -> None:
    message = "qwen3a, variant tiny: the tiles of sound of 6.25e-05 s do not depend on it alone"
    with pytest.raises(ConformanceError, match=message):
        run(Deaf(), "layouts", fields={"n_channels": 16})


def test_what_cancels_out_is_named() -> None:
    with pytest.raises(ConformanceError, match=r"tensor v\.blk\.0\.attn_k\.bias changes no logit"):
        run(Idefics3(), "parameters")


def test_the_peer_refuses_an_unknown_projector(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")

    class Unknown(Idefics3):
        name = "cubist"

    encoder = Unknown()
    variants = {"tiny": (write_mmproj, {"architecture": encoder}, 1e-7)}
    (check,) = (c for c in checks_of(encoder, variants, peer=True) if c.name == "peer")
    with pytest.raises(ConformanceError, match=r"cubist, variant tiny: mtmd refuses .*gguf"):
        check()
