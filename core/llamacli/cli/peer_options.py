"""Options of other programs without an effect, or with another name here.

Names are those of the help of llama.cpp's command line, benchmark and perplexity, of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_GPU = "models run on the CPU"
_BATCH = "batches are sized automatically, with the same results"
_CHAT = "a model with a chat template chats"
_THREADS = "-t sets all threads"
_MEMORY = "weights are packed in memory"
_ATTENTION = "attention is always computed block by block"
_LOG = "-v logs more"
_SPLIT = "there is one session"
_ROPE = "RoPE is that of the model's file, and longer contexts use its own scaling"
_TEXT = "models read text only, no images and no audio"
_LATER = "it is not supported"


class Foreign(NamedTuple):
    """Option of llama.cpp.

    - `reason`: why it has no effect, or what to use instead of it.
    - `n_values`: values that follow it. `values`: what may follow it, of an option whose value may be left out.
    - `works`: the command goes on, with `instead` in its place. `of`: programs that have it.
    """

    reason: str
    n_values: int = 0
    values: tuple[str, ...] = ()
    works: bool = True
    instead: tuple[str, ...] = ()
    of: str = "llama.cpp"


_SWITCH = ("on", "off", "auto", "0", "1")


def _table() -> Iterator[tuple[str, Foreign]]:
    """Options by name."""
    flags = {
        _GPU: "-nkvo --no-kv-offload -kvo --kv-offload -cmoe --cpu-moe --no-op-offload --op-offload -nopo --no-host",
        _BATCH: "-cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified",
        _CHAT: "-cnv --conversation -i --interactive -if --interactive-first -ins --instruct --jinja -st --single-turn "
        "-mli --multiline-input --simple-io",
        _MEMORY: "--mlock --mmap --no-mmap --repack --no-repack -nr --direct-io -dio --no-direct-io -ndio --swa-full",
        "no context is shifted without --context-shift": "--no-context-shift",
        "kernels are compiled at the first use": "--warmup --no-warmup",
        "--stats prints times": "--perf --no-perf",
        "all tensors are checked": "--check-tensors",
        _LOG: "--log-disable --log-prefix --log-timestamps --verbose-prompt --show-timings",
        "HF_HUB_OFFLINE=1 does that": "--offline",
    }
    for reason, names in flags.items():
        yield from ((name, Foreign(reason)) for name in names.split())
    with_value = {
        _GPU: "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -dev --device "
        "-ot --override-tensor -ncmoe --n-cpu-moe -fit --fit -fitt --fit-target -fitc --fit-ctx",
        _BATCH: "-b --batch-size -ub --ubatch-size -np --parallel",
        _THREADS: "-tb --threads-batch -C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch -Crb --cpu-range-batch "
        "--cpu-strict --cpu-strict-batch --numa --prio --prio-batch --poll --poll-batch",
        _MEMORY: "-dt --defrag-thold -mmp",
        _LOG: "-lv --verbosity --log-verbosity --log-file --log-colors",
    }
    for reason, names in with_value.items():
        yield from ((name, Foreign(reason, 1)) for name in names.split())
    for name in ("-fa", "--flash-attn"):
        yield name, Foreign(_ATTENTION, values=_SWITCH)
    for name in ("-co", "--color"):
        yield name, Foreign("reasoning is dimmed unless NO_COLOR is set", values=_SWITCH)
    for name in ("-no-cnv", "--no-conversation"):
        yield name, Foreign("", instead=("--raw",))
    refused = {
        _TEXT: "--image --audio -mm --mmproj -mmu --mmproj-url",
        _ROPE: "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        "use --save-session and --load-session": "--prompt-cache --prompt-cache-all --prompt-cache-ro",
        "use -hf USER/REPO:QUANT": "-hff --hf-file -mu --model-url",
        "set HF_TOKEN": "-hft --hf-token",
        "use --no-think": "--reasoning-budget",
        "use --samplers": "--sampling-seq --sampler-seq",
        "use --context-shift": "--keep",
        "write the text into the prompt": "--in-prefix --in-suffix --in-prefix-bos",
        _LATER: "--draft-min -gan --grp-attn-n -gaw --grp-attn-w --override-kv --control-vector -sp --special",
    }
    for reason, names in refused.items():
        yield from ((name, Foreign(reason, works=False)) for name in names.split())
    others = {
        "use --ctx-size": "--n-ctx --num-ctx --context-size --context-length --max-model-len --max-seq-len",
        "use --max-tokens": "--num-predict --max-new-tokens --max-new --max-completion-tokens",
        "use --repeat-penalty": "--repetition-penalty --penalty",
        "use --stop": "--stop-sequences --stop-strings",
        "use --threads": "--n-threads --num-threads --num-thread",
        "use --kv-type": "--kv-dtype --kv-cache-dtype --kv-cache-type",
    }
    for reason, names in others.items():
        yield from ((name, Foreign(reason, works=False, of="other programs")) for name in names.split())


FOREIGN = dict(_table())
