"""Checks of the encoders beside BERT.

`tests/tools/test_embedding.py` of the core compares results with llama.cpp's.
"""

import pytest

from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from tiny_encoders import CLASSIFIERS, ENCODERS, INERT, MODELS


@parametrize_with_checks(MODELS, ENCODERS | CLASSIFIERS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()
