"""Messages between the ingress and its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.sampling import SamplerChain
from llamacli.serve.metrics import LoadStats, ModelStats
from llamacli.serve.ray.blocks import chain_hashes
from llamacli.serve.ray.policy import Load
from llamacli.serve.requests import GenerationRequest, Request


@attrs.frozen
class Route:
    """Where a call may go.

    - `call`: its id. `hashes`, `n_tokens`: the blocks of its first prompt, and the tokens of all.
    - `only`: the one replica that it is for, "" for any. `avoid`: replicas that it must not go to.
    """

    call: str = ""
    hashes: tuple[bytes, ...] = ()
    n_tokens: int = 0
    only: str = ""
    avoid: frozenset[str] = frozenset()


@attrs.frozen
class Hello:
    """First answer of a replica to a call: its id."""

    replica: str


@attrs.frozen
class Report:
    """State of a replica, with the calls that it covers.

    `status` is that of `llamacli.serve.metrics.EngineStats`.
    """

    load: Load
    received: tuple[str, ...]
    status: str
    stats: ModelStats
    loads: LoadStats


def _pair(values: Sequence[int]) -> tuple[int, int]:
    low, high = values
    return low, high


def _pair_of_texts(values: Sequence[str]) -> tuple[str, str]:
    first, second = values
    return first, second


def _pairs(values: Sequence[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple(map(_pair_of_texts, values))


@attrs.frozen
class Setup:
    """Settings of the replicas: what it loads, and what that must be.

    - `identity`: `llamacli.Model.identity` of the ingress's file.
    - `path`, `name`: the model. `settings`: fields of `llamacli.serve.settings.EngineSettings`.
    - `adapters`: files of LoRA adapters, with the SHA-256 of each.
    - `cpus`: CPUs of each replica. `replicas`: how many there are, from and to.
    - `shutdown_timeout`: seconds that running requests have when a replica ends.
    - `mtp`: true to draft with the model's multi-token-prediction head.
    - `mmproj`: file of the media encoder with its SHA-256, None without one.
    """

    identity: str
    path: str
    name: str
    settings: Mapping[str, Any]
    cpus: float
    replicas: tuple[int, int] = attrs.field(converter=_pair)
    shutdown_timeout: float
    adapters: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_pairs)
    mtp: bool = False
    mmproj: tuple[str, str] | None = attrs.field(default=None, converter=attrs.converters.optional(_pair_of_texts))


def route_of(request: Request, call: str, avoid: frozenset[str] = frozenset()) -> Route:
    """Route of a request."""
    hashes = chain_hashes(request.prompts[0], salt=salt_of(request))
    return Route(call, hashes, sum(map(len, request.prompts)), avoid=avoid)


def salt_of(request: Request) -> bytes:
    """Bytes that are equal for equal LoRA adapters, none without."""
    applied = sorted((number, float(scale)) for number, scale in request.adapters if scale)
    return repr(applied).encode() if applied else b""


def portable(request: Request) -> Request:
    """Request with sampling parameters in place of a chain, to be pickled.

    Raises InvalidRequestError for a chain that was not built of parameters.
    """
    if not isinstance(request, GenerationRequest) or not isinstance(request.params, SamplerChain):
        return request
    if request.params.params is None:
        raise InvalidRequestError("a sampler chain that was not built of parameters cannot be sent to a replica")
    return attrs.evolve(request, params=request.params.params)
