"""Settings of the HTTP layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from llamacli.serve import compilers
from llamacli.serve.http.keys import ApiKey, as_keys
from llamacli.serve.requests import ModelSource
from llamacli.tools.mcp import McpServer


@attrs.frozen(kw_only=True)
class HttpSettings:
    """Settings of the HTTP layer.

    - `hosts`, `port`: addresses to listen on; port 0 takes a free one.
    - `ssl`: files of a certificate and of its key, for TLS; None for none.
    - `api_keys`: keys of which a client must send one; none are asked for if there are none. `api_key_file`: file of
      further ones, which is read again when it changes.
    - `cors_origins`: origins whose web pages may read responses; "*" is any, "localhost" any of this machine.
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
      them; None is a random seed, and no limit of the server's own. A limit of -1 is the rest of the context.
    - `system`, `stop`: system message and strings that end a text, for requests without them.
    - `reasoning`: the variable `enable_thinking` of templates, for requests that say nothing else.
    - `autoload`: requests load their models; without it `/models/load` does. `models_max`: models in memory at once,
      None for any number. `sources`: reads all models that are offered, None if they never change.
    - `any_model`: answer requests for unknown models with the first.
    - `strict`: refuse unknown fields of requests; without it they get a header with a warning, and a line in the log.
    - `slots`: serve `/slots`. `slot_folder`: folder of the files of saved slots, None for none.
    - `props`: let `POST /props` change the defaults of requests.
    - `metrics`: serve `/metrics`. `llamacpp_metrics`: repeat metrics under llama-server's names.
    - `media_url`: fetch pictures from addresses of http and https, of public hosts only. `media_path`: folder of files
      that `file://` addresses name, None for none.
    - `log_texts`: log the bodies of requests, and let replies have `__verbose` by default.
    - `mcp`: local MCP servers, whose tools `/tools` lists and runs.
    - `catalogue`: folder of models that clients pull, create and delete, None for none.
    - `data`: folder of the store of responses, conversations, files and batches, None for one in memory.
    - `store_size`: limit of the store in bytes; `store_age`: seconds without use after which objects are removed, None
      for never.
    - `page`: folder of static files to serve at `/`, None for none.
    - `api_prefix`: path before all others, such as `/llm`, "" for none.
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    ssl: tuple[Path, Path] | None = None
    api_keys: tuple[ApiKey, ...] = attrs.field(default=(), converter=as_keys)
    api_key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body: int = 10 << 20
    total_slots: int = 1
    read_timeout: float = 60.0
    write_timeout: float = 60.0
    load_timeout: float = 120.0
    shutdown_timeout: float = 30.0
    schema_timeout: float = compilers.SECONDS
    ping_interval: float = 15.0
    template: str | None = None
    sampling: Mapping[str, float] = attrs.field(factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = None
    system: str = ""
    stop: tuple[str, ...] = ()
    reasoning: bool = True
    autoload: bool = True
    models_max: int | None = None
    sources: Callable[[], Sequence[ModelSource]] | None = attrs.field(default=None, eq=False)
    any_model: bool = False
    strict: bool = False
    slots: bool = False
    slot_folder: Path | None = None
    props: bool = False
    metrics: bool = True
    llamacpp_metrics: bool = False
    media_url: bool = False
    media_path: Path | None = None
    log_texts: bool = False
    mcp: tuple[McpServer, ...] = ()
    catalogue: Path | None = None
    data: Path | None = None
    store_size: int = 256 << 20
    store_age: float | None = 30 * 86400.0
    page: Path | None = None
    api_prefix: str = ""
