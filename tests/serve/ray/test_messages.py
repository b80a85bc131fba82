"""Messages between the ingress and its replicas."""

from __future__ import annotations

import pickle

import pytest

from llamacli.errors import InvalidRequestError
from llamacli.sampling import SamplerChain, SamplingParams, build_chain
from llamacli.serve.ray.blocks import BLOCK, chain_hashes
from llamacli.serve.ray.messages import Setup, portable, route_of
from llamacli.serve.requests import EmbeddingRequest, GenerationRequest

PROMPT = tuple(range(2 * BLOCK))


def test_a_route_has_the_blocks_of_the_first_prompt() -> None:
    route = route_of(GenerationRequest(id="a", model="m", prompts=(PROMPT, (1, 2))), "i/1", frozenset({"x"}))
    assert (route.call, route.n_tokens, route.avoid) == ("i/1", len(PROMPT) + 2, {"x"})
    assert route.hashes == chain_hashes(PROMPT)


def test_adapters_keep_prefixes_apart() -> None:
    plain, zero, one, same, other = (
        route_of(GenerationRequest(id="a", model="m", prompts=(PROMPT,), adapters=adapters), "i/1").hashes
        for adapters in ((), ((0, 0.0),), ((0, 1.0), (1, 0.5)), ((1, 0.5), (0, 1)), ((0, 0.5),))
    )
    assert plain == zero
    assert one == same
    assert len({plain, one, other}) == 3


def test_requests_are_sent_with_parameters_in_place_of_chains() -> None:
    params = SamplingParams(temperature=0.5)
    request = GenerationRequest(id="a", model="m", prompts=(PROMPT,), params=build_chain(params))
    sent = portable(request)
    assert isinstance(sent, GenerationRequest)
    assert sent.params is params
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert portable(sent) is sent
    vectors = EmbeddingRequest(id="a", model="m", prompts=(PROMPT,))
    assert portable(vectors) is vectors
    own = GenerationRequest(id="a", model="m", prompts=(PROMPT,), params=SamplerChain([]))
    with pytest.raises(InvalidRequestError, match="not built of parameters"):
        portable(own)


def test_equal_settings_are_equal_after_their_way() -> None:
    setup = Setup("id", "/m.gguf", "m", {"n_ctx": 8}, 1.0, (1, 2), 30.0)
    assert pickle.loads(pickle.dumps(setup)) == setup
    assert Setup("id", "/m.gguf", "m", {"n_ctx": 8}, 1.0, [1, 2], 30.0) == setup  # type: ignore[arg-type]
