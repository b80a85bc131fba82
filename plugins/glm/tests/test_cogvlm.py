"""Checks of CogVLM.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

from pathlib import Path

import numpy as np
import pytest

from llamacli import Inputs, InvalidRequestError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_glm.cogvlm import CogVlm
from tiny_cogvlm import VARIANTS


@parametrize_with_checks([CogVlm()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_embeddings_of_pictures_are_refused(tmp_path: Path) -> None:
    write, options, _ = VARIANTS["cogvlm"]
    path = write(tmp_path / "model.gguf", **options)
    with (
        load_model(path, plugins=Plugins.of(CogVlm()), engine=ReferenceEngine()) as model,
        model.create_session() as session,
        pytest.raises(InvalidRequestError, match="takes none"),
    ):
        session.eval(Inputs.of(embeddings=np.zeros((2, 64), np.float32)))
