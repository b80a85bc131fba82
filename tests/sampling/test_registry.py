"""Sampler chains built of parameters."""

from llamacli.sampling import SamplerChain, SamplingParams, build_chain


def test_a_chain_knows_the_parameters_that_it_was_built_of() -> None:
    params = SamplingParams(temperature=0.5, top_k=3)
    chain = build_chain(params)
    assert chain.params is params
    assert chain.clone().params is params
    assert SamplerChain(chain.samplers).params is None
