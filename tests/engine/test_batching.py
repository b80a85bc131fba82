"""Models whose numbers overflow."""

import pytest

from conftest import LoadTiny
from llamacli import InvalidRequestError

YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e-45},
        YARN | {"llama.rope.scaling.factor": 1e-45},
        YARN | {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 3e38},
    ],
)
@pytest.mark.filterwarnings("error")
def test_keys_out_of_range_are_named_without_warnings(load_tiny: LoadTiny, metadata: dict[str, object]) -> None:
    session = load_tiny("gqa", metadata=metadata).create_session()
    session.eval([1, 2, 3])
    with pytest.raises(InvalidRequestError, match=r"cannot sample: .* keys of the model's file are out of range"):
        session.draw()
