"""Options of other programs without an effect, or with another name here.

Names are those of the help of llama.cpp's command line, benchmark and perplexity, of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


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


_WITHOUT_EFFECT = {
    "models run on the CPU":
        "-nkvo --no-kv-offload -kvo --kv-offload -cmoe --cpu-moe --no-op-offload --op-offload -nopo --no-host "
        "-ngl= --gpu-layers= --n-gpu-layers= -sm= --split-mode= -mg= --main-gpu= -dev= --device= "
        "-ot= --override-tensor= -ncmoe= --n-cpu-moe= -fit= --fit= -fitt= --fit-target= -fitc= --fit-ctx=",
    "batches are sized automatically, with the same results":
        "-cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified -b= --batch-size= -ub= --ubatch-size= -np= "
        "--parallel=",
    "a model with a chat template chats":
        "-cnv --conversation -i --interactive -if --interactive-first -ins --instruct --jinja -st --single-turn "
        "-mli --multiline-input --simple-io",
    "weights are packed in memory":
        "--mlock --mmap --no-mmap --repack --no-repack -nr --direct-io -dio --no-direct-io -ndio --swa-full "
        "-dt= --defrag-thold= -mmp=",
    "no context is shifted without --context-shift": "--no-context-shift",
    "kernels are compiled at the first use": "--warmup --no-warmup",
    "--stats prints times": "--perf --no-perf",
    "all tensors are checked": "--check-tensors",
    "-v logs more":
        "--log-disable --log-prefix --log-timestamps --verbose-prompt --show-timings -lv= --verbosity= "
        "--log-verbosity= --log-file= --log-colors=",
    "HF_HUB_OFFLINE=1 does that": "--offline",
    "-t sets all threads":
        "-tb= --threads-batch= -C= --cpu-mask= -Cr= --cpu-range= -Cb= --cpu-mask-batch= -Crb= --cpu-range-batch= "
        "--cpu-strict= --cpu-strict-batch= --numa= --prio= --prio-batch= --poll= --poll-batch=",
    "attention is always computed block by block": "-fa? --flash-attn?",
    "reasoning is dimmed unless NO_COLOR is set": "-co? --color?",
}  # fmt: skip
"""Options by reason; `=` follows an option with a value, `?` an option that may have one."""

_REFUSED = {
    "use --mmproj": "-mmu --mmproj-url",
    "use --override-kv {arch}.rope.scaling.attn_factor=float:N": "--yarn-attn-factor",
    "it is 1 for YaRN and 0 for other methods": "--yarn-ext-factor",
    "use --save-session and --load-session": "--prompt-cache-all --prompt-cache-ro",
    "use -hf USER/REPO:QUANT": "-hff --hf-file -mu --model-url",
    "set HF_TOKEN": "-hft --hf-token",
    "use --samplers": "--sampling-seq --sampler-seq",
    "use --context-shift": "--keep",
    "write the text into the prompt": "--in-prefix --in-suffix --in-prefix-bos",
    "it is not supported":
        "--draft-min -gan --grp-attn-n -gaw --grp-attn-w --control-vector -sp --special",
}  # fmt: skip

_OF_OTHERS = {
    "use --ctx-size": "--n-ctx --num-ctx --context-size --context-length --max-model-len --max-seq-len",
    "use --max-tokens": "--num-predict --max-new-tokens --max-new --max-completion-tokens",
    "use --repeat-penalty": "--repetition-penalty --penalty",
    "use --stop": "--stop-sequences --stop-strings",
    "use --threads": "--n-threads --num-threads --num-thread",
    "use --kv-type": "--kv-dtype --kv-cache-dtype --kv-cache-type",
}


def _each(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, reason) for reason, names in table.items() for name in names.split())


_SWITCH = ("on", "off", "auto", "0", "1")
FOREIGN = {
    **{
        name.rstrip("=?"): Foreign(reason, int(name[-1] == "="), _SWITCH if name[-1] == "?" else ())
        for name, reason in _each(_WITHOUT_EFFECT)
    },
    **{name: Foreign("", instead=("--raw",)) for name in ("-no-cnv", "--no-conversation")},
    **{name: Foreign(reason, works=False) for name, reason in _each(_REFUSED)},
    **{name: Foreign(reason, works=False, of="other programs") for name, reason in _each(_OF_OTHERS)},
}
"""Options by name."""
