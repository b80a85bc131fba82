"""`llamacli doctor`: diagnosis of the machine and the installation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from llamacli.cli.command import Command, output_option
from llamacli.cli.hub import resolve_model
from llamacli.cli.options import PATH, global_options
from llamacli.cli.output import human_bytes, note, print_field, print_json
from llamacli.cli.progress import bar, load
from llamacli.errors import LlamaCliError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamacli.tools.doctor import Plan, Report

_PLACES = {
    True: "both fit into the free memory",
    False: "the weights are read from disk when they are used, as they do not fit",
    None: "the free memory is unknown",
}


@click.command(cls=Command)
@click.argument("model", type=PATH, required=False)
@output_option("text", "json")
@global_options
def doctor(model: str | None, output: str) -> None:
    """Diagnose CPU, memory, kernels and plugins.

    Prints what was found, the reasons why models would run slowly or fail, and remedies. With MODEL, loads it and
    measures a short prompt.
    """
    plan = trial = failure = None
    if model is not None:
        from llamacli.tools.doctor import plan_of, try_model

        try:
            plan = plan_of(resolve_model(model))
            note(f"{model}: {_planned(plan)}")
            with load(model, "auto", None) as loaded:
                trial = try_model(loaded, model)
        except LlamaCliError as error:
            failure = f"{model}: {error}"
    with bar("examining the machine"):
        from llamacli.plugins import installed_plugins
        from llamacli.tools.doctor import examine

        report = examine(tuple(installed_plugins().infos()), plan=plan, trial=trial, failure=failure)
    if output == "json":
        print_json(json.loads(json.dumps(report.as_dict())))
        return
    for label, value in _lines(report):
        print_field(label, value)
    advice = report.advice()
    click.echo("\nno problems found" if not advice else "\nproblems:")
    for item in advice:
        print_field("-", item.what, 2)
        print_field("  ->", item.do, 5)


def _planned(plan: Plan) -> str:
    from llamacli.engine.memory import CONTEXT

    sizes = f"weights {human_bytes(plan.weights)}, cache of {CONTEXT} tokens {human_bytes(plan.cache)}"
    return f"{sizes}: {_PLACES[plan.fits]}"


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    yield "versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report.versions.items())
    cpu, cores, memory, kernels, copies = report.cpu, report.cpu.cores, report.memory, report.kernels, report.copies
    yield "CPU", cpu.name
    yield "instructions", f"{cpu.isa}, of {', '.join(cpu.available)}"
    quota = "no CPU quota" if cores.quota is None else f"quota of {cores.quota:g} CPUs"
    yield "threads", f"{cores.threads}: {cores.physical} cores in {cores.logical} of {cpu.n_cpus} CPUs, {quota}"
    if cpu.load is not None:
        yield "load", f"{cpu.load:.2f} in the last minute"
    if memory.total is not None and memory.free is not None:
        limit = "no limit" if memory.limit is None else f"a limit of {human_bytes(memory.limit)}"
        yield "memory", f"{human_bytes(memory.free)} available of {human_bytes(memory.total)}, {limit}"
    if memory.huge_pages is not None:
        yield "huge pages", memory.huge_pages
    yield "kernel cache", kernels.folder or "none"
    state, size = "writable" if kernels.writable else "not writable", human_bytes(kernels.n_bytes)
    yield "kernels", f"{kernels.n_compiled} of {kernels.n_kernels} compiled, {size}, {state}"
    limit = human_bytes(copies.limit) if copies.limit else "0, so that none are made"
    yield "packed copies", f"{copies.n_copies} of models, {human_bytes(copies.n_bytes)}, limit {limit}"
    for plugin in report.plugins:
        state = f"failed: {plugin.error}" if plugin.error else " ".join(plugin.architectures) or "ok"
        yield "plugin", f"{plugin.module} ({plugin.distribution} {plugin.version}): {state}"
    if report.plan is not None:
        yield "model's memory", _planned(report.plan)
    if (trial := report.trial) is not None:
        yield "model", f"{trial.path}: {trial.architecture}, {trial.n_tokens} tokens at {trial.tps:.1f} tok/s"
        for op, share in trial.numpy_shares.items():
            yield "NumPy op", f"{op}: {share:.1%} of the time"
