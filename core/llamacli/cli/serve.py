"""`llamacli serve`: a server of OpenAI's and ollama's APIs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from llamacli.cli.command import Command, in_group
from llamacli.cli.hub import REFERENCE, model_from_hub, resolve_model
from llamacli.cli.model_sources import Offer, divided, model_sources
from llamacli.cli.numbers import ByteSize, Form, Integer, Number
from llamacli.cli.options import (
    PATH,
    StderrHandler,
    global_options,
    kv_type_options,
    load_option,
    lora_option,
    mmproj_option,
    mode_option,
    option,
    prompts_option,
    threads_option,
)
from llamacli.cli.output import human_bytes, note
from llamacli.cli.overrides import override_options, pop_overrides
from llamacli.cli.progress import Task, shown, working
from llamacli.cli.sampling import number_options
from llamacli.cli.speculation import MTP, expect_one_drafter
from llamacli.cli.speculation import OPTIONS as SPECULATION
from llamacli.cli.text import argument, read_file
from llamacli.cli.workers import expect_alone, pop_workers, worker_options
from llamacli.errors import ChatTemplateError, InvalidRequestError
from llamacli.util.files import make_own_folder
from llamacli.util.sampling_params import PARAMETERS
from llamacli.util.settings import MAX_CONTEXT
from llamacli.util.system import available_memory

if TYPE_CHECKING:
    from llamacli.serve.http.settings import HttpSettings
    from llamacli.serve.models import LoadedModel, ModelSource
    from llamacli.serve.ray.engine import RayEngine
    from llamacli.serve.ray.settings import RaySettings
    from llamacli.serve.ray.stages import RayWorkers
    from llamacli.serve.requests import ModelInfo
    from llamacli.serve.settings import EngineSettings
    from llamacli.stages.link import WorkerSource

_COUNT, _COUNT_OR_0 = Integer(1), Integer(0)
_SECONDS = Number(0, 1_000_000)
_MODELS_SHARE = 0.8
_NEEDED = ("starlette", "uvicorn", "msgspec", "prometheus_client")


class ReplicaRange(click.ParamType[tuple[int, int]]):
    """Number of replicas, or the fewest and the most as in 1:8."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parse a range."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(value).strip(), re.ASCII)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high:
            self.fail(f"{value!r} is not a number of replicas such as 2, or 1:8.", param, ctx)
        return low, high


_ALIAS = Form(r"\S(?:.*\S)?", "a name of a model")
_ORIGIN = Form(r"\*|null|localhost|[a-z][a-z0-9+.-]*://[^/\s]+", "* or an origin such as https://page.example")
_HOST = Form(r"[^\s/:]+|\[[0-9A-Fa-f:.]+\]", "a host name such as models.example, without scheme and port")
_PREFIX = Form(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*", "a path such as /llm, without a slash at its end")
_ADDRESS = Form(r"auto|local|(?:ray://)?[^\s/]+:\d+", "auto, local, or the HOST:PORT of a cluster's head")
_APP = Form(r"[^\s/]+", "a name without spaces")

_GROUPS = {
    "Models": (
        option(
            "-hf", "--hf-repo", "hf_repos", metavar=REFERENCE, multiple=True, allow_from_autoenv=False,
            help="Model of the Hugging Face hub; downloaded unless cached. May be given several times.",
        ),
        option(
            "--alias", "aliases", metavar="NAMES", type=_ALIAS, multiple=True,
            help="Further names of the first model, with commas between; may be given several times.",
        ),
        option("--tags", metavar="WORDS", help="Words about the first model for /v1/models, with commas between."),
        option("--any-model", is_flag=True, help="Answer requests for unknown models with the first one."),
        lora_option,
        mmproj_option,
        option(
            "--lora-init-without-apply", is_flag=True,
            help="Load LoRA adapters with the scale 0; requests, or POST /lora-adapters, give others.",
        ),
        option(
            "--chat-template", metavar="NAME",
            help="Use this chat template instead of the models' own: a name, or Jinja source.",
        ),
        option("--chat-template-file", type=PATH, help="Read the chat template from a file."),
        option(
            "--pooling", type=click.Choice(["none", "mean", "cls", "last", "rank"]),
            help="Pooling of embeddings in the place of the models' own; none: a vector for each token.",
        ),
        option("--rerank", "--reranking", "rerank", is_flag=True, help="The same as --pooling rank."),
        option(
            "--reasoning/--no-reasoning", default=True, show_default=True,
            help="Variable enable_thinking of chat templates, for requests that do not set it.",
        ),
        option(
            "--catalogue", metavar="DIR", type=PATH,
            help="Folder of models that clients pull, create, copy and delete by ollama's API; they are served too. "
            "Default: such requests are refused.",
        ),
        option(
            "--models-dir", metavar="DIR", type=PATH,
            help="Folder of models that are served: GGUF files, and subfolders with one model each.",
        ),
        option(
            "--models-preset", metavar="FILE", type=PATH,
            help="File of models with options of each, in llama-server's INI form; docs/operating.md has the keys.",
        ),
        option(
            "--models-memory", metavar="SIZE", type=ByteSize(),
            help="Memory of the weights and caches of loaded models; the least recently used one gives way. Default "
            "with several models and without --models-max: 80 % of what is free at the start.",
        ),
        option("--models-max", metavar="N", type=_COUNT, help="Models in memory at once. Default: any number."),
        option(
            "--pin", "pins", metavar="NAME", type=_ALIAS, multiple=True,
            help="Load this model at the start, and never unload it; may be given several times.",
        ),
        option(
            "--models-autoload/--no-models-autoload", "autoload", default=True, show_default=True,
            help="Load models when requests ask for them; without it by POST /models/load only.",
        ),
        option(
            "--idle-unload", "--sleep-idle-seconds", "idle_unload", metavar="S", type=_SECONDS,
            help="Seconds without requests after which a model is unloaded. Default: never.",
        ),
        option(
            "--load-timeout", metavar="S", type=_SECONDS, default=120.0, show_default=True,
            help="Seconds that a request waits for its model to be loaded.",
        ),
    ),
    "Context and requests": (
        option(
            "-c", "--ctx-size", metavar="N", type=Integer(0, MAX_CONTEXT), default=0, show_default=True,
            help="Context length in tokens; 0: that of the model, or what the KV cache's memory holds.",
        ),
        option(
            "-n", "--max-tokens", metavar="N", type=Integer(-1),
            help="Limit of the tokens of a reply for requests that have none; -1: the rest of the context. Default: "
            "-1, and 16 for /v1/completions.",
        ),
        option(
            "--max-running", metavar="N", type=_COUNT,
            help="Texts generated at once. Default: 8, and up to 32 while a step of them takes half of --step-ms at "
            "most; with many cores 32.",
        ),
        option(
            "--kv-memory", metavar="SIZE", type=ByteSize(),
            help="Memory of a model's KV cache, and of those of its drafts, such as 4G. Default: that of whole "
            "contexts for all texts at once, 40 % of what is free after loading at most.",
        ),
        option(
            "--prompt-cache", metavar="DIR", type=PATH,
            help="Keep the beginnings of prompts in this folder, so that they survive a restart.",
        ),
        option(
            "--prompt-cache-size", metavar="SIZE", type=ByteSize(), default="4G", show_default=True,
            help="Limit of that folder; what was not used for longest is deleted.",
        ),
        option(
            "--slot-save-path", metavar="DIR", type=PATH,
            help="Folder for POST /slots/N?action=save and restore. Default: they are refused.",
        ),
        option(
            "--step-ms", metavar="X", type=_SECONDS, default=150.0, show_default=True,
            help="Longest step in milliseconds while texts are generated: prompts are evaluated in pieces that fit. "
            "0: the greatest throughput.",
        ),
        option(
            "--max-queue", metavar="N", type=_COUNT_OR_0, default=64, show_default=True,
            help="Requests that may wait; others are refused with 429.",
        ),
        option(
            "--max-queue-tokens", metavar="N", type=_COUNT_OR_0, default=65_536, show_default=True,
            help="Prompt tokens of the requests that may wait.",
        ),
        option("--max-per-key", metavar="N", type=_COUNT, help="Requests of one key that may wait or run."),
        option(
            "--queue-timeout", metavar="S", type=_SECONDS, default=300.0, show_default=True,
            help="Seconds after which a waiting request fails with 503.",
        ),
        option(
            "--request-timeout", metavar="S", type=_SECONDS,
            help="Seconds after which a reply ends, with the finish reason length. Default: no limit.",
        ),
        option(
            "--shutdown-timeout", metavar="S", type=_SECONDS, default=30.0, show_default=True,
            help="Seconds that running requests have after SIGTERM.",
        ),
    ),
    "Stored work": (
        option(
            "--data", metavar="DIR", type=PATH,
            help="Folder for responses, conversations, files and batches, which one server has at a time. Default: "
            "they are kept in memory.",
        ),
        option(
            "--store-size", metavar="SIZE", type=ByteSize(), default="256M", show_default=True,
            help="Limit of what is stored; responses and conversations that were not used for longest are deleted.",
        ),
        option(
            "--store-age", metavar="DAYS", type=Number(0, 36_500), default=30.0, show_default=True,
            help="Days without use after which stored objects are deleted; 0: never.",
        ),
    ),
    "Speculative decoding": (
        *SPECULATION,
    ),
    "Sampling by default": (
        *number_options(),
        option("-s", "--seed", metavar="N", type=Integer(-1), help="Seed of the draws; -1: a random one for each."),
    ),
    "Network": (
        option(
            "--host", metavar="ADDRESS", multiple=True, default=("127.0.0.1",), show_default=True,
            help="Address to listen on, or several with commas between; may be given several times.",
        ),
        option(
            "--port", metavar="N", type=Integer(0, 65535), default=8080, show_default=True,
            help="Port to listen on; 0: a free one.",
        ),
        option("--ssl-cert-file", type=PATH, help="Certificate in PEM, for TLS; needs --ssl-key-file."),
        option("--ssl-key-file", type=PATH, help="Private key of the certificate, in PEM, without a password."),
        option(
            "--api-key", "api_keys", metavar="KEY", multiple=True,
            help="Key that clients must send; may be given several times. Default: none is asked for.",
        ),
        option(
            "--api-key-file", type=PATH,
            help="Read keys from a file, one a line; name=, requests=, tokens= (a minute) and streams= (at once) may "
            "follow. It is read again when it changes; # begins a comment.",
        ),
        option(
            "--cors-origin", "cors_origins", metavar="ORIGIN", type=_ORIGIN, multiple=True,
            help="Origin whose web pages may use the API, as https://page.example; may be given several times. "
            "localhost: any on this machine. *: any.",
        ),
        option(
            "--allowed-host", "allowed_hosts", metavar="NAME", type=_HOST, multiple=True,
            help="Further name that the header Host may have when listening on loopback; may be given several times.",
        ),
        option("--page/--no-page", default=True, show_default=True, help="Serve a web page to chat on, at /."),
        option("--path", metavar="DIR", type=PATH, help="Folder of static files to serve at / instead of the page."),
        option(
            "--api-prefix", metavar="PATH", default="", type=_PREFIX,
            help="Path before those of all endpoints and of the page, such as /llm, for proxies.",
        ),
        option(
            "--max-body", metavar="SIZE", type=ByteSize(), default="10M", show_default=True,
            help="Largest body of a request.",
        ),
        option(
            "--read-timeout", metavar="S", type=_SECONDS, default=60.0, show_default=True,
            help="Seconds that the head of a request has to arrive, and again its body.",
        ),
        option(
            "--write-timeout", metavar="S", type=_SECONDS, default=60.0, show_default=True,
            help="Seconds after which a client that reads nothing is cut off.",
        ),
    ),
    "Monitoring": (
        option(
            "--strict", is_flag=True,
            help="Refuse requests with unknown fields, instead of a warning in a header and in the log.",
        ),
        option(
            "--media-url/--no-media-url", default=False, show_default=True,
            help="Fetch pictures of requests from http and https addresses, of public hosts only.",
        ),
        option(
            "--media-path", metavar="DIR", type=PATH,
            help="Folder of pictures that requests name as file://NAME. Default: these are refused.",
        ),
        option(
            "--mcp", "--mcp-servers-config", "mcp", metavar="FILE", type=PATH,
            help="List and run tools of the MCP servers in this JSON file at /tools, and on the page. Whoever may use "
            "this server can run them.",
        ),
        option("--props", is_flag=True, help="Let POST /props change sampling parameters, seed and limit of requests."),
        option("--slots", is_flag=True, help="Show running requests at /slots, without texts."),
        option("--metrics/--no-metrics", default=True, show_default=True, help="Serve /metrics for Prometheus."),
        option("--llamacpp-metrics", is_flag=True, help="Repeat metrics under llama-server's names."),
        option(
            "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
            help="Form of the log's lines on stderr: text, or a JSON object each.",
        ),
        option(
            "--log-texts", is_flag=True,
            help="Log the bodies of requests, and add __verbose to replies: the prompt as the model reads it.",
        ),
    ),
    "Ray cluster": (
        option(
            "--ray", "ray_address", metavar="[ADDRESS]", type=_ADDRESS, is_flag=False, flag_value="auto",
            help="Run replicas of the engine on a Ray cluster: HOST:PORT of its head, auto (that of this machine), or "
            "local (a new one). Needs the extra ray.",
        ),
        option(
            "--ray-replicas", metavar="N[:MOST]", type=ReplicaRange(), default="1", show_default=True,
            help="Replicas in the cluster; with MOST, as many as the requests need.",
        ),
        option(
            "--ray-cpus", metavar="X", type=Number(0.01, 4096),
            help="CPUs of a replica. Default: all of the smallest node. Give those of a NUMA node where there are "
            "several.",
        ),
        option(
            "--ray-app", metavar="NAME", type=_APP, default="llamacli", show_default=True,
            help="Name of the replicas in the cluster. A server with the same name and settings joins them.",
        ),
        option(
            "--split-layers", is_flag=True,
            help="Divide the layers of the model among this process and the other nodes of --ray, by memory and speed.",
        ),
        option("--ray-keep", is_flag=True, help="Leave the replicas running when this server ends."),
    ),
}  # fmt: skip
"""Options by the heading in the help."""


def _serve_options(command: Any) -> Any:
    for name, options in reversed(_GROUPS.items()):
        command = in_group(name, *options)(command)
    return command


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@_serve_options
@override_options
@in_group(
    "Computing", mode_option, load_option, prompts_option, kv_type_options("f32 in mode fp32, else f16"), threads_option
)
@worker_options
@global_options
def serve(models: tuple[str, ...], **given: Any) -> None:
    """Serve each MODEL on the API of OpenAI and of ollama.

    A MODEL is a file, or a short name of `llamacli list --names`; as in small=model.gguf it gets another name for
    clients. Without one, and without a folder or presets, a small demo model is served. The first MODEL is loaded at
    the start, others when they are asked for; --lora, --draft and --mmproj are for the first. SIGTERM lets running
    requests end.
    """
    expect_packages("serve")
    with working("starting the server"):
        from llamacli.serve.engine import LocalEngine
        from llamacli.serve.http.server import HttpServer, listening

    scaled = 0.0 if given["lora_init_without_apply"] else 1.0
    lora = [(Path(file), scaled * scale) for file, scale in given["lora"]]
    expect_one_drafter(given["lookup"], given["draft"])
    draft = given["draft"] if given["draft"] in (None, MTP) else Path(resolve_model(given["draft"]))
    mmproj = given["mmproj"] and Path(given["mmproj"])
    named = [*models, *map(model_from_hub, given["hf_repos"])]
    aliases = [name for names in given["aliases"] for name in divided(names)]
    folder, presets, catalogue = (
        given[name] and Path(given[name]) for name in ("models_dir", "models_preset", "catalogue")
    )
    offer = Offer(
        model_sources(named, aliases, lora, draft, mmproj, divided(given["tags"]))
        if named or not (folder or presets) else (),
        folder, presets, catalogue, frozenset(given["pins"]),
    )  # fmt: skip
    sources = offer.read()
    unsupported = "prompt_cache", "slot_save_path", "lora", "catalogue"
    workers: WorkerSource | None = pop_workers(given, "ray_address", "split_layers", *unsupported)
    if given["split_layers"]:
        expect_alone(given, "split-layers", "ray_keep", *unsupported)
        workers = ray_workers(sources, given)
    if workers is not None and len(sources) > 1:
        raise click.UsageError("--workers serves one model.")
    http, limits = http_settings(given), attrs.evolve(engine_settings(given), workers=workers)
    if folder or presets or catalogue or len(sources) > 1:
        http, limits = attrs.evolve(http, sources=offer.read), _limited(limits)
    with listening(http.hosts, http.port) as sockets:
        port = sockets[0].getsockname()[1]
        _log_requests(as_json=given["log_format"] == "json")
        _warn_of_open_server(http)
        engine: LocalEngine | RayEngine
        is_local = given["ray_address"] is None or workers is not None
        engine = LocalEngine(sources, limits) if is_local else ray_engine(sources, limits, given)
        failures: list[BaseException] = []
        loading = contextlib.ExitStack()
        first = [source for source in sources if source.pinned] or [*offer.named[:1]]
        if first and http.autoload:
            loading.enter_context(shown(Task(f"loading {first[0].name}")))

        def begin() -> None:
            if not (first and http.autoload):
                loaded_by = "requests load" if http.autoload else "POST /models/load loads"
                note(f"llamacli: serving {len(sources)} models on {_address(http, port)}; {loaded_by} them")
                return
            for source in first:
                engine.load(source.name).add_done_callback(announce)

        def announce(future: Any) -> None:
            loading.close()
            error = future.exception() or _template_error(future.result(), http.template)
            if error is None:
                note(_greeting(future.result(), _address(http, port), limits))
                if http.page is not None:
                    note(f"llamacli: page to chat on: {_address(http, port)}/")
            else:
                failures.append(error)
                server.stop()

        server = HttpServer(engine, http, sockets, begin)
        gc.freeze()  # modules are never garbage, and a full collection of them would hold up streams for 50 ms
        with loading:
            server.run()
        if failures:
            raise failures[0]


def http_settings(given: dict[str, Any]) -> HttpSettings:
    """Settings of the HTTP layer; UsageError for options that exclude each other."""
    from llamacli.serve.http.keys import as_keys, read_keys
    from llamacli.serve.http.page import PAGE
    from llamacli.serve.http.server import expect_certificate
    from llamacli.serve.http.settings import HttpSettings
    from llamacli.serve.settings import MOST_RUNNING
    from llamacli.tools.mcp import read_servers

    template, file, key_file = given["chat_template"], given["chat_template_file"], given["api_key_file"]
    if template is not None and file is not None:
        raise click.UsageError("--chat-template and --chat-template-file exclude each other.")
    keys = [argument(key) for key in given["api_keys"]]
    if len(set(keys)) < len(keys):
        raise click.UsageError("Invalid value for '--api-key': a key is there twice.")
    if key_file is not None:
        read_keys(Path(key_file), as_keys(keys))
    for name in ("slot_save_path", "data"):
        if given[name] is not None:
            make_own_folder(Path(given[name]))
    for name in ("media_path", "path"):
        if given[name]:
            os.scandir(given[name]).close()  # an error now, and not with the first request
    if "" in keys:
        raise click.UsageError("Invalid value for '--api-key': it is empty.")
    certificate, key = given["ssl_cert_file"], given["ssl_key_file"]
    if (certificate is None) != (key is None):
        raise click.UsageError("--ssl-cert-file and --ssl-key-file need each other.")
    files = None if certificate is None else (Path(certificate), Path(key))
    if files is not None:
        expect_certificate(files)
    if given["max_tokens"] == 0:
        raise click.UsageError("--max-tokens 0 leaves no reply: -1 is no limit.")
    names = ("port", "cors_origins", "allowed_hosts", "max_body", "read_timeout", "write_timeout",
             "load_timeout", "shutdown_timeout",
             "autoload", "models_max", "any_model", "strict", "slots", "props", "metrics", "llamacpp_metrics",
             "log_texts", "reasoning", "media_url")  # fmt: skip
    return HttpSettings(
        **{name: given[name] for name in names},
        sampling={name: given[name] for name in PARAMETERS if given[name] is not None},
        seed=given["seed"] if given["seed"] is not None and given["seed"] >= 0 else None,
        max_tokens=given["max_tokens"],
        mcp=read_servers(Path(given["mcp"])) if given["mcp"] else (),
        catalogue=given["catalogue"] and Path(given["catalogue"]),
        data=given["data"] and Path(given["data"]),
        store_size=given["store_size"],
        store_age=given["store_age"] * 86400 or None,
        media_path=given["media_path"] and Path(given["media_path"]),
        slot_folder=given["slot_save_path"] and Path(given["slot_save_path"]),
        hosts=tuple(host for text in given["host"] for host in text.split(",")),
        ssl=files,
        api_keys=keys,
        api_key_file=key_file and Path(key_file),
        template=template if file is None else read_file(Path(file)),
        total_slots=given["max_running"] or MOST_RUNNING,
        page=Path(given["path"]) if given["path"] else PAGE if given["page"] else None,
        api_prefix=given["api_prefix"],
    )


def engine_settings(given: dict[str, Any]) -> EngineSettings:
    """Limits of the engine; raises InvalidRequestError for a value out of range."""
    from llamacli.serve.settings import MOST_RUNNING, EngineSettings, default_max_running
    from llamacli.tools.embedding import Pooling

    names = ("kv_type", "kv_memory", "max_queue", "max_queue_tokens", "max_per_key", "step_ms",
             "queue_timeout", "request_timeout", "models_max", "models_memory", "idle_unload",
             "load_timeout", "mode", "load_mode", "prompts", "threads", "lookup", "draft_max")  # fmt: skip
    running = given["max_running"] or default_max_running()
    if given["rerank"] and given["pooling"] not in (None, "rank"):
        raise click.UsageError("--rerank and --pooling exclude each other.")
    pooling = "rank" if given["rerank"] else given["pooling"]
    return EngineSettings(
        n_ctx=given["ctx_size"] or None,
        max_running=running,
        extra_running=0 if given["max_running"] else MOST_RUNNING - running,
        overrides=pop_overrides({**given}),
        pooling=Pooling(pooling) if pooling else None,
        prompt_cache=given["prompt_cache"] and (given["prompt_cache"], given["prompt_cache_size"]),
        **{name: given[name] for name in names},
    )


def ray_engine(sources: Sequence[ModelSource], limits: EngineSettings, given: dict[str, Any]) -> RayEngine:
    """Engine on a Ray cluster.

    Raises UsageError for several models or a draft model, ClusterError if there is no cluster.
    """
    if given["draft"] not in (None, MTP):
        raise click.UsageError("--ray has no draft models; --lookup and --draft mtp draft without one.")
    cluster = _ray_settings(sources, given)
    from llamacli.serve.ray.engine import RayEngine

    return RayEngine(sources[0], limits, cluster, shutdown_timeout=given["shutdown_timeout"])


def ray_workers(sources: Sequence[ModelSource], given: dict[str, Any]) -> RayWorkers:
    """Workers of a divided model, on the nodes of a Ray cluster.

    Raises UsageError for options that do not go together, ClusterError if there is no cluster.
    """
    if given["ray_address"] is None:
        raise click.UsageError("--split-layers needs --ray.")
    if given["ray_replicas"] != (1, 1):
        raise click.UsageError("--ray-replicas and --split-layers exclude each other.")
    cluster = _ray_settings(sources, given)
    from llamacli.serve.ray.stages import RayWorkers

    return RayWorkers(sources[0].path, cluster)


def _ray_settings(sources: Sequence[ModelSource], given: dict[str, Any]) -> RaySettings:
    _expect_packages(("ray",), "serve --ray", "'llamacli[ray]'")
    from llamacli.serve.ray.settings import RaySettings

    if len(sources) > 1:
        raise click.UsageError("--ray serves one model: start a server with another --ray-app for each.")
    return RaySettings(
        address=given["ray_address"],
        app=given["ray_app"],
        replicas=given["ray_replicas"],
        cpus=given["ray_cpus"],
        keep=given["ray_keep"],
    )


def _limited(limits: EngineSettings) -> EngineSettings:
    """Limit the memory of several models, unless there is a limit."""
    free = available_memory()
    if limits.models_max is not None or limits.models_memory is not None or free is None:
        return limits
    return attrs.evolve(limits, models_memory=int(_MODELS_SHARE * free))


def _template_error(loaded: LoadedModel | ModelInfo, template: str | None) -> Exception | None:
    """Error of `--chat-template`, None if there is none.

    The first chat would find it too late. A template for replicas is checked by the first chat.
    """
    from llamacli.serve.models import LoadedModel

    try:
        if template is not None and isinstance(loaded, LoadedModel):
            loaded.model.create_chat_codec(template)
    except ChatTemplateError as error:
        return error
    return None


def expect_packages(command: str) -> None:
    """Check for the packages of the server.

    Raises InvalidRequestError that names the missing ones.
    """
    _expect_packages(_NEEDED, command, "llamacli")


def _expect_packages(names: Sequence[str], command: str, distribution: str) -> None:
    import importlib.util

    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequestError(f"{command} needs {', '.join(missing)}: pip install {distribution}")


def _log_requests(*, as_json: bool) -> None:
    logger = logging.getLogger("llamacli.serve")
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    for handler in logging.getLogger("llamacli").handlers:
        if isinstance(handler, StderrHandler):
            handler.timed, handler.as_json = logger.name, as_json


def _warn_of_open_server(http: HttpSettings) -> None:
    from llamacli.serve.http.middleware import is_loopback

    if http.mcp and "*" in http.cors_origins:
        logging.getLogger("llamacli.serve").warning("web pages of any origin can run the tools of --mcp")
    for host in http.hosts:
        if not (http.api_keys or http.api_key_file or is_loopback(host)):
            logging.getLogger("llamacli.serve").warning(
                "%s can be reached from other machines, and no key is asked for: see --api-key", host
            )


def _greeting(loaded: LoadedModel | ModelInfo, address: str, limits: EngineSettings) -> str:
    from llamacli.serve.models import LoadedModel

    if isinstance(loaded, LoadedModel):
        info, rest = loaded.info, f"KV cache of {human_bytes(loaded.scheduler.memory.max_bytes)}"
    else:
        info, rest = loaded, "on each replica"
    fewest, most = limits.max_running, limits.max_running + limits.extra_running
    texts = f"{fewest} to {most}" if most > fewest else f"{fewest}"
    return f"llamacli: serving {info.name} on {address} (context of {info.n_ctx} tokens, {texts} texts at once, {rest})"


def _address(http: HttpSettings, port: int) -> str:
    """Address of the server, the first of several."""
    host = http.hosts[0]
    name = f"[{host}]" if ":" in host else host
    return f"http{'s' if http.ssl else ''}://{name}:{port}{http.api_prefix}"
