#!/usr/bin/env python3
"""Simulate a model on up to 64 cores from its measured steps.

    python benchmarks/scaling.py FILE.gguf [-p 512] [-d 0] [-t 1,2,4,8,16,32,64] [--nodes 2] [--steps] [--plot OUT.png]

Measured here: each step of the table on one thread, one after another the shares that each of N threads would have,
with weights as they come from memory; the steps and whole tokens with one and two threads; a barrier; the memory.

Simulated from that: N threads, divided over the NUMA nodes of a machine (`Machine`, whose figures can be given). A
phase, the steps between two barriers, lasts as long as its slowest thread, and no shorter than the memory of a node, or
the link between nodes, takes for its bytes; then comes a barrier. Weights lie on the nodes of the threads that read
them, or all on one node, or are spread (`numactl --interleave`). One and two threads are compared with what was
measured.

Cores are this machine's at all N: the clock is not lowered where many cores compute.
"""

import argparse
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from field import memory_speed

import llamacli
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import ACTIVATION, ACTIVATION_BLOCK, FLOAT_FORMS, INTEGER_FORMS
from llamacli.kernels.team import STEP, Team
from llamacli.kv import KVType
from llamacli.ops.lowering import Slot
from llamacli.util.memory import view
from llamacli.util.system import load_average

PLACEMENTS = ("own node", "one node", "spread")
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
GROUP = 8
"""Shares that are counted in one word at a barrier (`llamacli.kernels.team`)."""


# --- machine ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Machine:
    """Simulated machine of equal NUMA nodes.

    - `node_speed`: bytes per second that all cores of a node read from its memory. Default: eight channels of
      DDR5-4800, 307 GB/s, of which STREAM reaches about four fifths.
    - `link_speed`: bytes per second into a node from the others. Default: four UPI links of 16 GT/s,
      128 GB/s, likewise.
    - `transfer_ns`, `remote_transfer_ns`: time of a cache line from core to core within a node and between nodes.
      Default: Xeon 8375C (Ice Lake), https://github.com/nviennot/core-to-core-latency.
    - `reread_ns`: time between the answers to cores that wait for the same line. Assumed.
    - `in_flight`: cache lines that a core requests at once: the 48 entries of Golden Cove's second-level cache are
      rarely full, so a third. Assumed.
    - `latency_ratio`: time of a read from another node's memory to that from the own. Assumed; firmware tables (ACPI
      SLIT) name 2.1.
    """

    nodes: int = 2
    node_speed: float = 245e9
    link_speed: float = 100e9
    transfer_ns: float = 51.0
    remote_transfer_ns: float = 108.0
    reread_ns: float = 10.0
    in_flight: int = 16
    latency_ratio: float = 1.7

    def node_of(self, thread: int, n: int) -> int:
        """Node of one of n threads."""
        return (2 * thread + 1) * self.nodes // (2 * n) if n > 1 else 0

    def line_ns(self, n: int) -> float:
        """Mean time of a cache line between two of n threads."""
        used = len({self.node_of(thread, n) for thread in range(n)})
        return self.transfer_ns / used + self.remote_transfer_ns * (used - 1) / used

    def barrier_s(self, n: int, *, tree: bool = True) -> float:
        """Seconds of a barrier of n threads that arrive at once.

        Additions to one word come one after the other; with `tree`, to a word for each group, then to one for all. The
        word of the next phase is then read again by all threads.
        """
        if n == 1:
            return 0.0
        line = self.line_ns(n)
        groups = -(-n // GROUP)
        arrive = GROUP * self.transfer_ns + groups * line if tree and groups > 1 else n * line
        return 1e-9 * (arrive + line + (n - 1) * self.reread_ns)


# --- measurement -----------------------------------------------------------------------------------------------------


@attrs.define
class Part:
    """Step of a run, as one thread measured it for N shares.

    `seconds` and `n_bytes`, the bytes of weights, are those of each share. `reads` are the bytes of activations by
    slot, the input of a matrix product first; `writes` are the slots that it computes; `ends` marks the last step of a
    phase.
    """

    step: int
    seconds: np.ndarray
    n_bytes: np.ndarray
    reads: list[tuple[Slot, int]]
    writes: tuple[Slot, ...]
    ends: bool


class Recorder:
    """Team whose shares are all computed by the calling thread, and timed.

    In processor time, which other programs disturb less.
    """

    def __init__(self, program: Any, n_threads: int):
        self.lock, self.n_threads, self._program = threading.RLock(), n_threads, program
        self.parts: list[Part] = []

    def run(self, table: np.ndarray, start: int, stop: int, run: np.ndarray) -> None:
        """Run steps of a table; see `llamacli.kernels.team.Team`."""
        n, clock, address = self.n_threads, time.thread_time_ns, run.ctypes.data
        rows = int(run["n_rows"][0] - run["first_row"][0])
        for i in range(start, stop):
            kernel, args = KERNEL(int(table["function"][i])), int(table["args"][i])
            seconds = np.zeros(n)
            for share in range(n):
                started = clock()
                kernel(args, address, share, n)
                seconds[share] = 1e-9 * (clock() - started)
            step, ends = self._program._steps[i], bool(table["barrier"][i]) or i == stop - 1
            reads = [(slot, rows * row_bytes(slot)) for slot in step.reads]
            self.parts.append(Part(i, seconds, weight_bytes(step.params, n), reads, step.writes, ends))


class StepTimer:
    """Team that runs and times each step as a job."""

    def __init__(self, team: Team):
        self.lock, self.n_threads, self._team = team.lock, team.n_threads, team
        self.seconds: list[float] = []

    def run(self, table: np.ndarray, start: int, stop: int, run: np.ndarray) -> None:
        """Run steps of a table; see `llamacli.kernels.team.Team`."""
        for i in range(start, stop):
            started = time.perf_counter()
            self._team.run(table, i, i + 1, run)
            self.seconds.append(time.perf_counter() - started)


class JobTimer:
    """Team that sums the time of its jobs."""

    def __init__(self, team: Team):
        self.lock, self.n_threads, self._team, self.seconds = team.lock, team.n_threads, team, 0.0

    def run(self, *job: Any) -> None:
        """Run a job; see `llamacli.kernels.team.Team`."""
        started = time.perf_counter()
        self._team.run(*job)
        self.seconds += time.perf_counter() - started


def weight_bytes(params: np.ndarray, n: int) -> np.ndarray:
    """Bytes of weights for each of n shares; 0 for other steps."""
    if "tile_bytes" not in (params.dtype.names or ()):
        return np.zeros(n)
    tiles, tile_bytes, groups = (int(params[name][0]) for name in ("n_tiles", "tile_bytes", "n_groups"))
    if starts := int(params["starts"][0]):
        edges = view(starts, 8 * (groups + 1)).view(np.int64)
        used, units = np.count_nonzero(np.diff(edges)), tiles
    else:
        used, units = 1, tiles * groups
    return np.diff(np.arange(n + 1) * units // n) * float(used * tile_bytes)


def row_bytes(slot: Slot) -> int:
    """Bytes of activations in a row of a slot."""
    sizes = dict.fromkeys(INTEGER_FORMS, ACTIVATION.itemsize / ACTIVATION_BLOCK) | dict.fromkeys(FLOAT_FORMS, 4)
    return int(max(1, slot.slots) * slot.width * sizes.get(slot.form, 0))


class Runs:
    """Evaluations of a model with a number of threads."""

    def __init__(self, path: str, threads: int, options: argparse.Namespace):
        self.model = llamacli.load_model(path, threads=threads)
        self.program: Any = self.model.program
        self.team, self._options = self.program._team, options
        n_ctx = options.depth + options.n_prompt + 16
        self._tokens = np.random.default_rng(0).integers(0, self.model.config.n_vocab, n_ctx).tolist()
        self._session = self.model.create_session(n_ctx=n_ctx, reuse=False)
        self._session.eval(self._tokens[: options.depth + 1])

    def evaluate(self, n: int, team: Any) -> tuple[float, float]:
        """Seconds to evaluate n tokens on another team, and processor time."""
        depth = self._options.depth + 1  # not an empty cache, whose first page would be allocated each time
        self._session.rewind(depth)
        self.program._team = team
        try:
            started, used = time.perf_counter(), time.process_time()
            self._session.eval(self._tokens[depth : depth + n])
            return time.perf_counter() - started, time.process_time() - used
        finally:
            self.program._team = self.team

    def close(self) -> None:
        """Free the memory."""
        self._session.close()
        self.model.close()


def measure_shares(runs: Runs, n_tokens: int, n_threads: int, repetitions: int) -> list[Part]:
    """Cost of each share of each step; the fastest of some repetitions."""
    best: list[Part] = []
    for _ in range(repetitions):
        recorder = Recorder(runs.program, n_threads)
        runs.evaluate(n_tokens, recorder)
        if best:
            for part, again in zip(best, recorder.parts, strict=True):
                part.seconds = np.minimum(part.seconds, again.seconds)
        best = best or recorder.parts
    return best


def call_seconds(parts: Iterable[Part]) -> float:
    """Time of a call without work: the shortest of all shares."""
    return min(float(part.seconds.min()) for part in parts)


def fetch_seconds(phase: Sequence[Part], machine: Machine, call: float) -> np.ndarray:
    """Time in which each thread fetches activations that others computed.

    All of a matrix product's input, once a phase; of other steps the part of its own share.
    """
    n = len(phase[0].seconds)
    found, known = np.zeros(n), set[Slot]()
    for part in phase:
        cost = np.maximum(part.seconds - call, 0)
        for i, (slot, n_bytes) in enumerate(part.reads):
            whole = i == 0 and part.n_bytes.any()
            if slot in known or n == 1:
                continue
            parts = (part.n_bytes > 0).astype(float) if whole else cost / max(float(cost.sum()), 1e-12)
            found += parts * n_bytes / 64 * machine.line_ns(n) * 1e-9 / machine.in_flight
            known |= {slot} if whole else set()
        known |= {*part.writes}
    return found


def barrier_seconds(n_threads: int) -> float:
    """Time of a barrier, measured on empty steps."""
    team, run, n_steps = Team(n_threads), np.zeros(1, np.int64), 20_000
    table = np.zeros(n_steps, STEP)
    table["function"], table["barrier"] = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value, True
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        team.run(table, 0, n_steps, run)
        seconds.append((time.perf_counter() - started) / n_steps)
    team.close()
    return min(seconds)


# --- simulation ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Result:
    """Simulated evaluation: seconds in all, and of what they consist."""

    seconds: float
    barriers: float
    imbalance: float
    memory: float


def phases(parts: Sequence[Part]) -> list[list[Part]]:
    """Steps between barriers."""
    found: list[list[Part]] = [[]]
    for part in parts:
        found[-1].append(part)
        if part.ends:
            found.append([])
    return [phase for phase in found if phase]


@attrs.frozen
class Here:
    """Figures of this machine.

    `core_speed`: bytes per second that one core reads; `call`: seconds of a call without work; `serial`: those of an
    evaluation that lie outside of steps.
    """

    core_speed: float
    call: float
    serial: float


def simulate(parts: Sequence[Part], machine: Machine, here: Here, placement: str, *, tree: bool = True) -> Result:
    """Time of an evaluation of measured steps on a machine."""
    n = len(parts[0].seconds)
    nodes = np.array([machine.node_of(thread, n) for thread in range(n)])
    used = len(set(nodes.tolist()))
    if used == 1 or placement == "own node":
        remote = np.zeros(n)
    elif placement == "one node":
        remote = (nodes != nodes[0]).astype(float)
    else:
        remote = np.full(n, 1 - 1 / used)
    barrier = machine.barrier_s(n, tree=tree)
    seconds = barriers = imbalance = memory = 0.0
    for phase in phases(parts):
        own, read = fetch_seconds(phase, machine, here.call), np.zeros(n)
        for part in phase:
            cost = np.maximum(part.seconds - here.call, 0)
            waits = np.minimum(cost, part.n_bytes / here.core_speed)
            own += cost + waits * remote * (machine.latency_ratio - 1)
            read += part.n_bytes
        local = np.array([(read * (1 - remote))[nodes == node].sum() for node in range(machine.nodes)])
        far = np.array([(read * remote)[nodes == node].sum() for node in range(machine.nodes)])
        served = local + (far.sum() - far) / max(1, used - 1)
        if placement == "one node" and used > 1:
            served = np.where(np.arange(machine.nodes) == nodes[0], read.sum(), 0)
        # Reads from one node leave it through its own links.
        leaving = far.sum() if placement == "one node" else far.max()
        least = max(served.max() / machine.node_speed, leaving / machine.link_speed)
        lasts = max(float(own.max()), least)
        seconds += lasts + barrier
        barriers += barrier
        imbalance += float(own.max() - own.mean())
        memory += max(0.0, least - float(own.max()))
    return Result(seconds + here.serial, barriers, imbalance, memory)


# --- report ----------------------------------------------------------------------------------------------------------


def step_table(runs: Runs, n_tokens: int, real: dict[int, list[float]], parts: Sequence[Part]) -> None:
    """Print the cost of steps by kernel: bytes, operations, time."""
    steps, rows = runs.program._steps, dict[str, list[float]]()
    for i, part in enumerate(parts):
        step = steps[part.step]
        kernel = step.kernel if isinstance(step.kernel, Kernel) else step.kernel(KVType("f16", "f16"))
        work = 2 * n_tokens * (step.work + step.work_seen * n_tokens / 2)
        row = rows.setdefault(kernel.name, [0.0] * (3 + len(real)))
        row[0], row[1], row[2] = row[0] + 1, row[1] + part.n_bytes.sum(), row[2] + work
        for column, seconds in enumerate(real.values()):
            row[3 + column] += max(0.0, seconds[i] - min(seconds))
    times = [f"us, {n} thread{'s' * (n > 1)}" for n in real]
    print(f"\n| kernel, {n_tokens} tokens | steps | MB of weights | G operations | {' | '.join(times)} |")
    print("|---" * (4 + len(real)) + "|")
    for name, (count, n_bytes, work, *seconds) in sorted(rows.items(), key=lambda item: -item[1][3]):
        cells = " | ".join(f"{1e6 * value:.0f}" for value in seconds)
        print(f"| `{name}` | {count:.0f} | {n_bytes / 1e6:.1f} | {work / 1e9:.2f} | {cells} |")


@attrs.frozen
class Measured:
    """Evaluations on a team of this machine's threads.

    `seconds`: the fastest; `processor`: the least processor time, by thread; `outside`: seconds outside of jobs;
    `steps`: those of each step as a job of its own.
    """

    seconds: float
    processor: float
    outside: float
    steps: list[float]


def measure(runs: Runs, n_tokens: int, team: Team, repetitions: int) -> Measured:
    """Measure evaluations of some tokens on a team."""
    jobs = [JobTimer(team) for _ in range(repetitions * (4 if n_tokens == 1 else 1))]
    whole = [runs.evaluate(n_tokens, job) for job in jobs]
    outside = min(seconds - job.seconds for (seconds, _), job in zip(whole, jobs, strict=True))
    seconds, processor = (min(values) for values in zip(*whole, strict=True))
    timers = [StepTimer(team) for _ in range(repetitions)]
    for timer in timers:
        runs.evaluate(n_tokens, timer)
    steps = np.min([timer.seconds for timer in timers], axis=0).tolist()
    return Measured(seconds, processor / team.n_threads, outside, steps)


def reading_speed(parts: Sequence[Part], steps: Sequence[float]) -> float:
    """Bytes of weights per second of the steps that read any."""
    read = [(part.n_bytes.sum(), seconds) for part, seconds in zip(parts, steps, strict=True) if part.n_bytes.any()]
    return float(sum(n_bytes for n_bytes, _ in read) / sum(seconds for _, seconds in read))


def report(path: str, options: argparse.Namespace, machine: Machine, show: Callable[[str], None]) -> dict[int, Any]:
    """Measure, simulate and print; results by number of tokens."""
    teams, plotted = {n: Team(n) for n in (1, 2)}, dict[int, Any]()
    runs = Runs(path, max(options.threads), options)
    plain = {n: memory_speed(n) for n in teams}
    barrier = barrier_seconds(2) - barrier_seconds(1)
    for n_tokens in [n for n in (1, options.n_prompt) if n]:
        parts = {n: measure_shares(runs, n_tokens, n, options.repetitions) for n in options.threads}
        real = {n: measure(runs, n_tokens, team, options.repetitions) for n, team in teams.items()}
        if n_tokens == 1:  # kernels fetch ahead, so they may be faster than a plain read
            speeds = {n: max(plain[n], reading_speed(parts[1], real[n].steps)) for n in teams}
            this = attrs.evolve(machine, nodes=1, node_speed=speeds[2])
            rates = " and ".join(f"{speeds[n] / 1e9:.1f} (plain {plain[n] / 1e9:.1f})" for n in teams)
            show(f"memory: {rates} GB/s with 1 and 2 threads")
            show(f"barrier of 2 threads: {1e9 * barrier:.0f} ns, model {1e9 * this.barrier_s(2):.0f} ns")
        here = Here(speeds[1], min(map(call_seconds, parts.values())), real[1].outside)
        if options.steps:
            step_table(runs, n_tokens, {n: real[n].steps for n in real}, parts[1])
        for n in teams:
            found, seconds = simulate(parts[n], this, here, PLACEMENTS[0]).seconds, real[n].seconds
            error, of_processor = (100 * (found / measured - 1) for measured in (seconds, real[n].processor))
            show(
                f"{n_tokens} tokens, {n} threads here: {1e3 * seconds:.1f} ms, {1e3 * real[n].processor:.1f} ms of each"
                f" processor; simulated {1e3 * found:.1f} ms, error {error:+.0f} %, {of_processor:+.0f} %"
            )
        n_phases = len(phases(parts[options.threads[0]]))
        megabytes = sum(part.n_bytes.sum() for part in parts[options.threads[0]]) / 1e6
        outside = f"{1e6 * here.serial:.0f} us outside of steps"
        show(f"\n{n_tokens} tokens: {n_phases} phases, {megabytes:.0f} MB of weights, {outside}\n")
        show(
            "| threads | t/s, own node | one node | spread | one counter | barriers | imbalance | memory | outside |\n"
            + "|---" * 9 + "|"
        )  # fmt: skip
        for n, own in parts.items():
            found = {name: simulate(own, machine, here, name) for name in PLACEMENTS}
            flat = simulate(own, machine, here, PLACEMENTS[0], tree=False)
            result = found[PLACEMENTS[0]]
            rates = " | ".join(f"{n_tokens / one.seconds:.0f}" for one in (*found.values(), flat))
            shares = " | ".join(
                f"{100 * value / result.seconds:.0f} %"
                for value in (result.barriers, result.imbalance, result.memory, here.serial)
            )
            show(f"| {n} | {rates} | {shares} |")
            for name, one in found.items():
                plotted.setdefault(n_tokens, {}).setdefault(name, []).append(n_tokens / one.seconds)
    runs.close()
    return plotted


def plot(found: dict[int, Any], options: argparse.Namespace) -> None:
    """Plot tokens per second over threads."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 4), layout="constrained", squeeze=False)
    for axis, (n_tokens, rates) in zip(axes[0], found.items(), strict=True):
        for name, values in rates.items():
            axis.plot(options.threads, values, marker="o", label=f"weights: {name}")
        first = next(iter(rates.values()))[0]
        axis.plot(
            options.threads,
            [first * n / options.threads[0] for n in options.threads],
            "--",
            color="gray",
            label="linear",
        )
        axis.set(xscale="log", yscale="log", xlabel="threads", ylabel="tokens/s", title=f"{n_tokens} tokens at once")
        axis.set_xticks(options.threads, options.threads)
        axis.legend(fontsize=7)
    figure.savefig(options.plot, dpi=150)


def main() -> None:
    """Run the command line."""
    machine = Machine()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-p", "--n-prompt", type=int, default=512, help="tokens of a prompt; 0: none")
    parser.add_argument("-d", "--depth", type=int, default=0)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument(
        "-t", "--threads", type=lambda text: [int(n) for n in text.split(",")], default="1,2,4,8,16,32,64"
    )
    parser.add_argument("--nodes", type=int, default=machine.nodes)
    parser.add_argument("--node-speed", type=float, default=machine.node_speed / 1e9, help="GB/s")
    parser.add_argument("--link-speed", type=float, default=machine.link_speed / 1e9, help="GB/s")
    for name in ("transfer_ns", "remote_transfer_ns", "reread_ns", "latency_ratio"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(machine, name))
    parser.add_argument("--steps", action="store_true", help="also print the cost of each kernel's steps")
    parser.add_argument("--plot", metavar="OUT.png")
    options = parser.parse_args()
    options.threads = sorted({1, 2, *options.threads})
    given = {
        field.name: getattr(options, field.name) for field in attrs.fields(Machine) if hasattr(options, field.name)
    }
    given |= {"node_speed": 1e9 * options.node_speed, "link_speed": 1e9 * options.link_speed}
    print(f"{Path(options.file).stem}, depth {options.depth}; load of this machine: {load_average():.1f}")
    found = report(options.file, options, Machine(**given), lambda line: print(line, flush=True))
    if options.plot:
        plot(found, options)


if __name__ == "__main__":
    main()
