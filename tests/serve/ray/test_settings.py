"""Settings of replicas in a cluster."""

from __future__ import annotations

import pytest

from llamacli.errors import InvalidRequestError
from llamacli.serve.ray.settings import RaySettings


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "head.example:6379", "[::1]:6379"])
def test_addresses(address: str) -> None:
    assert RaySettings(address=address).address == address


@pytest.mark.parametrize("address", ["", "model.gguf", "head", "head:", "head:123456", "ray://head:10001"])
def test_what_is_no_address_is_refused_with_what_is(address: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"HOST:PORT, auto .* or local"):
        RaySettings(address=address)


@pytest.mark.parametrize("replicas", [(0, 1), (3, 2)])
def test_ranges_ascend_from_1(replicas: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="--ray-replicas must be"):
        RaySettings(replicas=replicas)
