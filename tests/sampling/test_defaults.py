import math

import pytest

from llamacli import SamplingParams
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.gguf import Metadata
from llamacli.sampling.defaults import params_with_defaults
from llamacli.util.sampling_params import ORDER, PARAMETERS


def test_given_before_file_before_llama_cpp() -> None:
    metadata = Metadata({"general.sampling.temp": 0.5, "general.sampling.top_k": 7})
    params = params_with_defaults({"temperature": 0.25, "min_p": None}, metadata, 512)
    assert (params.temperature, params.top_k, params.min_p, params.samplers) == (0.25, 7, 0.05, ORDER)


def test_defaults_are_valid_parameters_within_their_ranges() -> None:
    for one in PARAMETERS.values():
        for value in (one.default, one.off):
            assert one.low <= value <= (math.inf if one.high is None else one.high)
            assert type(value) is type(getattr(SamplingParams(**{one.name: value}), one.name))


def test_minus_one_is_the_whole_context() -> None:
    params = params_with_defaults({"repeat_last_n": -1, "dry_penalty_last_n": -1}, Metadata({}), 99)
    assert (params.repeat_last_n, params.dry_penalty_last_n) == (99, 99)


def test_invalid_values_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        params_with_defaults({"top_p": 2.0}, Metadata({}), 512)
    with pytest.raises(ModelFormatError, match=r"general\.sampling\.temp"):
        params_with_defaults({}, Metadata({"general.sampling.temp": -1.0}), 512)
