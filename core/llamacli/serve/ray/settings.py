"""Settings of replicas in a cluster."""

from __future__ import annotations

import re

import attrs

from llamacli.errors import InvalidRequestError

_ADDRESS = re.compile(r"auto|local|(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


def _is_address(_: object, __: object, value: str) -> None:
    if not _ADDRESS.fullmatch(value):
        raise InvalidRequestError(
            f"--ray: {value!r} is not the address of a cluster: give HOST:PORT, auto (the cluster of this machine) or "
            "local (a new one), as in --ray=auto"
        )


def _is_range(_: object, __: object, value: tuple[int, int]) -> None:
    if not 1 <= value[0] <= value[1]:
        raise InvalidRequestError(f"--ray-replicas must be N or LEAST:MOST, from 1, not {value[0]}:{value[1]}")


@attrs.frozen(kw_only=True)
class RaySettings:
    """Settings of replicas in a cluster.

    - `address`: "auto" for the cluster that this machine belongs to, "local" for a new one, or HOST:PORT of its head,
      where this machine is a node of it.
    - `app`: name of the Ray Serve application.
    - `replicas`: fewest and most; they are scaled between by the requests that run.
    - `cpus`: CPUs of a replica, None for all of the smallest node.
    - `keep`: leave the replicas running when this server ends.
    """

    address: str = attrs.field(default="auto", validator=_is_address)
    app: str = "llamacli"
    replicas: tuple[int, int] = attrs.field(default=(1, 1), validator=_is_range)
    cpus: float | None = None
    keep: bool = False
