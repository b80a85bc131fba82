"""Settings of the HTTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class HttpSettings:
    """Settings of the HTTP layer.

    - `host`, `port`: address to listen on; port 0 takes a free one.
    - `api_keys`: keys of which a client must send one; none are asked for if there are none.
    - `cors_origins`: origins whose web pages may read responses; "*" is any.
    - `allowed_hosts`: names accepted in the header Host on loopback, besides the loopback's own.
    - `max_body`: size limit of a request's body, in bytes.
    - `total_slots`: number of texts that the engine generates at once at most, for `/props`.
    - `read_timeout`: seconds for the head of a request to arrive, and again for its body.
    - `write_timeout`: seconds for a client to take what was written.
    - `load_timeout`: seconds that a request waits for its model.
    - `shutdown_timeout`: seconds that running requests have to end after SIGTERM.
    - `schema_timeout`: seconds for compiling a grammar or schema.
    - `ping_interval`: seconds of silence after which a stream of events gets a comment.
    - `template`: chat template that replaces the models' own, as for `Model.create_chat`.
    - `sampling`, `seed`, `max_tokens`: sampling parameters, seed and limit of the tokens of a text for requests without
      them; None is a random seed, and no limit of the server's own.
    - `reasoning`: the variable `enable_thinking` of templates, for requests that say nothing else.
    - `any_model`: answer requests for unknown models with the first.
    - `strict`: refuse unknown fields of requests; without it they get a header with a warning, and a line in the log.
    - `slots`: serve `/slots`.
    - `llamacpp_metrics`: repeat metrics under llama-server's names.
    - `log_texts`: log the bodies of requests.
    - `page`: folder of static files to serve at `/`, None for none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body: int = 10 << 20
    total_slots: int = 1
    read_timeout: float = 60.0
    write_timeout: float = 60.0
    load_timeout: float = 120.0
    shutdown_timeout: float = 30.0
    schema_timeout: float = 5.0
    ping_interval: float = 15.0
    template: str | None = None
    sampling: Mapping[str, float] = attrs.field(factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = None
    reasoning: bool = True
    any_model: bool = False
    strict: bool = False
    slots: bool = False
    llamacpp_metrics: bool = False
    log_texts: bool = False
    page: Path | None = None
