"""Plugin API: the hooks that a plugin may implement.

A plugin is a module that declares `LLAMACLI_API = 1` and implements any of these hooks with `@hookimpl`. Its
distribution names it in one of four entry-point groups; commands have a fifth, `llamacli.commands`, and APIs of the
server a sixth, `llamacli.apis`:

- `llamacli.architectures`: the entry's *name* is the exact `general.architecture` string of the files that it runs, so
  that loading a model imports only the family it needs. Several names may point at one module.
- `llamacli.media`: the entry's name is the exact `clip.projector_type` of the mmproj files whose pictures it encodes.
- `llamacli.checkpoints`: the name is a value of `architectures` in config.json, of a Hugging Face folder, or the
  name of a tensor if there is no such file.
- `llamacli`: everything else (loaders, tensor types, chat formats, tokenizers, samplers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from llamacli.architecture import Architecture, Config
    from llamacli.chat.formats import ChatFormat
    from llamacli.checkpoints import Checkpoint
    from llamacli.gguf import Metadata
    from llamacli.loaders import Loader
    from llamacli.media.encoder import MediaEncoder
    from llamacli.quantization import QuantFormat
    from llamacli.sampling import SamplerType
    from llamacli.tokenizer import Tokenizer
    from llamacli.tokenizer.loading import NamedPreTokenizer, TokenizerModel

API_VERSION = 1

hookspec = pluggy.HookspecMarker("llamacli")
hookimpl = pluggy.HookimplMarker("llamacli")
"""Decorator of the hooks that a plugin implements."""


class LoadedModel(Protocol):
    """Attributes of a `llamacli.Model` that a `model_loaded` hook can rely on."""

    arch: str
    config: Config
    tokenizer: Tokenizer
    metadata: Metadata


@hookspec
def register_architectures(register: Callable[[Architecture], None]) -> None:
    """Call `register` once for every architecture that this plugin runs."""


@hookspec
def register_media(register: Callable[[MediaEncoder], None]) -> None:
    """Call `register` once for every media encoder that this plugin runs."""


@hookspec
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Call `register` once for every layout of Hugging Face folders."""


@hookspec
def register_loaders(register: Callable[[Loader], None]) -> None:
    """Call `register` for every file format, beside GGUF, that this plugin reads."""


@hookspec
def register_quant_formats(register: Callable[[QuantFormat], None]) -> None:
    """Call `register` once for every tensor type that this plugin adds.

    One with a `packing` is computed by kernels of its own in mode `auto`, one without as Q8_0.
    """


@hookspec
def register_chat_formats(register: Callable[[ChatFormat], None]) -> None:
    """Call `register` once for every chat format that this plugin adds.

    The first that fits a file is taken.
    """


@hookspec
def register_samplers(register: Callable[[SamplerType], None]) -> None:
    """Call `register` once for every sampler that this plugin adds."""


@hookspec
def register_pre_tokenizers(register: Callable[[NamedPreTokenizer], None]) -> None:
    """Call `register` once for every value of `tokenizer.ggml.pre` that this plugin adds."""


@hookspec
def register_tokenizers(register: Callable[[TokenizerModel], None]) -> None:
    """Call `register` once for every value of `tokenizer.ggml.model` that this plugin adds."""


@hookspec(firstresult=True)
def match_architecture(metadata: Metadata) -> Architecture | None:
    """Claim a file whose `general.architecture` no plugin claims by name.

    The first answer that is not None runs it.
    """


@hookspec
def model_loaded(model: LoadedModel) -> None:
    """Inspect a model that has just been loaded.

    It is a `llamacli.Model`. An error is a PluginWarning and changes nothing.
    """
