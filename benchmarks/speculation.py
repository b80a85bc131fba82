#!/usr/bin/env python3
"""Measure generation with and without speculative decoding, in turns.

    python benchmarks/speculation.py FILE.gguf -f prompt.txt -n 128
    python benchmarks/speculation.py FILE.gguf -f prompt.txt --draft SMALLER.gguf --temp 0.8
    python benchmarks/speculation.py FILE.gguf --draft mtp --draft-max 3

Prints median tokens per second of both, the median ratio of neighbouring runs, by the clock and by the processor time
of all threads (with -t 1 that hardly depends on what else runs), and how many tokens were drafted and accepted. The
texts are compared too. With `--copy` the text is the prompt again, as if the model had drawn its tokens.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import llamacli
from llamacli.generation.drafting import Drafter
from llamacli.sampling import Candidates


def measure(
    model: llamacli.Model, prompt: Sequence[int], options: argparse.Namespace, drafter: Drafter | None
) -> tuple[list[int], llamacli.Stats, float]:
    """Tokens, statistics, and seconds of processor time after the first token."""
    params = llamacli.SamplingParams(temperature=options.temp)
    with model.create_session(n_ctx=len(prompt) + options.n + 1, seed=1) as session:
        if options.copy:
            session.steer = copying(prompt)
        stream = session.generate(prompt, params, max_tokens=options.n, ignore_eos=True, speculate=drafter)
        tokens = [next(stream).id]
        started = time.process_time()
        tokens += [token.id for token in stream]
        return tokens, session.stats, time.process_time() - started


def copying(prompt: Sequence[int]) -> Callable[[Candidates], None]:
    """Steering that makes the prompt come again and again."""
    following = itertools.cycle(prompt)

    def steer(candidates: Candidates) -> None:
        candidates.logits[candidates.ids == next(following)] = 1e9

    return steer


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("-f", "--prompt-file", type=Path, help="the prompt; default: 64 tokens of the vocabulary")
    parser.add_argument(
        "--draft", help="draft model, or mtp for the multi-token-prediction head of the file; default: prompt lookup"
    )
    parser.add_argument("--draft-max", type=int, default=16, help="tokens of a draft; default: 16")
    parser.add_argument("-n", type=int, default=128, help="tokens to generate; default: 128")
    parser.add_argument("-r", type=int, default=5, help="runs of each; default: 5")
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--copy", action="store_true", help="generate a copy of the prompt")
    parser.add_argument("--temp", type=float, default=0.0, help="temperature; default: 0, greedy")
    options = parser.parse_args()
    with llamacli.load_model(options.file, threads=options.threads) as model:
        if options.prompt_file:
            prompt = model.encode(options.prompt_file.read_text())
        else:
            prompt = [(7 * i + 3) % model.config.n_vocab for i in range(64)]
        is_model = options.draft not in (None, "mtp")
        smaller = llamacli.load_model(options.draft, threads=options.threads) if is_model else None
        rates: list[tuple[float, float]] = []
        times: list[float] = []
        for _ in range(options.r + 1):
            n = options.draft_max
            expected, plain, plain_s = measure(model, prompt, options, None)
            with contextlib.ExitStack() as opened:
                drafter: Drafter = llamacli.PromptLookup(n)
                if options.draft:
                    drafter = opened.enter_context(
                        llamacli.DraftModel(smaller, n) if smaller else llamacli.MtpHead(model, n)
                    )
                found, fast, fast_s = measure(model, prompt, options, drafter)
            if found != expected:
                raise SystemExit("the texts differ")
            rates.append((plain.gen_tps, fast.gen_tps))
            times.append(plain_s / fast_s)
        before, after = zip(*rates[1:], strict=True)  # the first run compiles kernels
        ratio = statistics.median(b / a for a, b in rates[1:])
        print(
            f"{statistics.median(before):.1f} tok/s without, {statistics.median(after):.1f} with: {ratio:.3f} times, "
            f"{statistics.median(times[1:]):.3f} by processor time; "
            f"{fast.n_accepted} of {fast.n_drafted} drafted tokens accepted, {fast.n_gen} generated"
        )


if __name__ == "__main__":
    main()
