"""Prompts of texts and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from llamacli.errors import TokenizerError
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.schemas.completions import MAX_PROMPTS, CompletionRequest, Prompt, PromptText
from llamacli.serve.requests import ModelInfo

Mixed = str | list[int | str]
"""A text, or token ids with texts between."""


def encoded_prompts(request: CompletionRequest, model: Model, info: ModelInfo) -> list[tuple[str, list[int]]]:
    """Text and token ids of each prompt.

    Prompts of ids have a text only with `echo`. With `prompt_embeds` or pictures there may be none.
    Raises BadRequestError, PromptTooLongError.
    """
    if has_pictures(request.prompt) or (request.prompt_embeds and not request.prompt):
        return []
    prompts = as_prompts(request.prompt, "prompt", MAX_PROMPTS)
    if request.truncate_prompt_tokens is None:
        for prompt in prompts:
            expect_room([*_parts(prompt), request.suffix or ""], model, info)
    if request.suffix is not None:
        return [_infilled(prompt, request.suffix, model) for prompt in prompts]
    return [_encoded(prompt, request, model, info) for prompt in prompts]


def as_prompts(prompt: Prompt | None, name: str, limit: int) -> list[Mixed]:
    """Prompts, or other inputs, one by one. Raises BadRequestError."""
    if prompt is None:
        raise BadRequestError(f"{name}: it is required", name, "missing_required_parameter")
    if isinstance(prompt, str | PromptText):
        return [_plain(prompt, name)]
    items = [_plain(item, name) if isinstance(item, PromptText) else item for item in prompt]
    if any(isinstance(item, int) for item in items):
        flat = [item for item in items if not isinstance(item, list)]
        if len(flat) < len(items):
            raise BadRequestError(f"{name}: token ids and lists cannot be mixed in one list", name)
        return [flat]
    if not 1 <= len(items) <= limit:
        raise BadRequestError(f"{name}: it has {len(items)} elements; 1 to {limit} are allowed", name)
    return [item for item in items if not isinstance(item, int)]


def has_pictures(prompt: Prompt | None) -> TypeGuard[PromptText]:
    """True for the prompt of `pictured_prompt`."""
    if not isinstance(prompt, PromptText):
        return False
    return bool(prompt.multimodal_data) or any(part.type == "image_url" for part in prompt.content or ())


def expect_one_text(text: PromptText, name: str) -> None:
    """Check that a prompt has one of two forms. Raises BadRequestError."""
    if (text.prompt_string is None) == (text.content is None) or (text.content is not None and text.multimodal_data):
        raise BadRequestError(f"{name}: an object has prompt_string or content", name)


def _plain(text: str | PromptText, name: str) -> str:
    if isinstance(text, str):
        return text
    if has_pictures(text):
        reason = "pictures are for one prompt of a completion, and for embeddings"
        raise BadRequestError(f"{name}: {reason}", name, "unsupported_content")
    expect_one_text(text, name)
    for part in text.content or ():
        if part.type != "text" or part.text is None:
            raise BadRequestError(f"{name}: models read text only", name, "unsupported_content")
    return "".join(part.text or "" for part in text.content or ()) if text.prompt_string is None else text.prompt_string


def encoded(
    prompt: Mixed, model: Model, name: str, *, add_special: bool = True, parse_special: bool = False, end: bool = False
) -> list[int]:
    """Token ids of a prompt, at least one.

    With `end` those that the model expects at a text's end too. Raises BadRequestError for a prompt without tokens, or
    with ids that are not in the vocabulary.
    """
    tokenizer, ids = model.tokenizer, list[int]()
    for i, part in enumerate(_parts(prompt)):
        if not isinstance(part, str):
            ids += part
            continue
        try:
            if not i and add_special and not end:
                ids += tokenizer.encode_prompt(part, parse_special)
            else:
                ids += tokenizer.encode(part, add_special=add_special and not i, parse_special=parse_special)
        except TokenizerError as error:
            raise BadRequestError(f"{name}: {error}", name) from None
    n_vocab = tokenizer.n_vocab
    if not ids:
        raise BadRequestError(f"{name}: it is empty", name)
    if max(ids) >= n_vocab:
        raise BadRequestError(f"{name}: token {max(ids)} is not an id from 0 to {n_vocab - 1}", name)
    return ids


def truncated(ids: list[int], limit: int | None, n_ctx: int) -> list[int]:
    """Last tokens of a prompt.

    At most `limit`, for -1 as many as leave room for one; all for None.
    """
    if limit is None:
        return ids
    if not limit:
        raise BadRequestError("truncate_prompt_tokens: 0 leaves no prompt", "truncate_prompt_tokens")
    return ids[-(n_ctx - 1 if limit < 0 else limit) :]


def _parts(prompt: Mixed) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    parts: list[str | list[int]] = []
    for item in prompt:
        last = parts[-1] if parts else None
        if isinstance(item, int) and isinstance(last, list):
            last.append(item)
        else:
            parts.append(item if isinstance(item, str) else [item])
    return parts


def _encoded(prompt: Mixed, request: CompletionRequest, model: Model, info: ModelInfo) -> tuple[str, list[int]]:
    special = request.add_special_tokens is not False
    end = special and model.program.has_encoder  # an encoder's text ends as it was trained
    ids = encoded(prompt, model, "prompt", add_special=special, parse_special=bool(request.parse_special), end=end)
    ids = truncated(ids, request.truncate_prompt_tokens, info.n_ctx or model.config.n_ctx)
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt, ids
    return model.tokenizer.decode(ids) if request.echo else "", ids


def _infilled(prompt: Mixed, suffix: str, model: Model) -> tuple[str, list[int]]:
    """Prompt for infilling (FIM, prefix before suffix)."""
    before: str | Sequence[int] = prompt if isinstance(prompt, str) else encoded(prompt, model, "prompt")
    try:
        ids = model.tokenizer.encode_infill(before, suffix)
    except TokenizerError as error:
        raise BadRequestError(f"suffix: {error}", "suffix", "not_supported") from None
    return before if isinstance(before, str) else model.tokenizer.decode(before), ids
