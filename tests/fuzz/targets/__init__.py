"""Fuzzing targets by name."""

from fuzz.target import Target
from fuzz.targets.commands import COMMANDS
from fuzz.targets.copies import COPIES, MAPPED
from fuzz.targets.files import ADAPTERS, CHECKPOINTS, DRAFTS, HEADERS, MODELS
from fuzz.targets.grammars import GRAMMARS, SCHEMAS
from fuzz.targets.pictures import ENCODERS, FOLDERS, PICTURES
from fuzz.targets.served import (
    BATCHES,
    CATALOGUES,
    EMBEDDINGS,
    FRAMES,
    MESSAGES,
    PROMPTS,
    REQUESTS,
    SERVERS,
    STORES,
)
from fuzz.targets.states import STATES
from fuzz.targets.templates import TEMPLATES
from fuzz.targets.vocabularies import TEXTS, VOCABULARIES

TARGETS: dict[str, Target] = {
    "header": HEADERS,
    "model": MODELS,
    "adapter": ADAPTERS,
    "head": DRAFTS,
    "llama2c": CHECKPOINTS,
    "state": STATES,
    "copy": COPIES,
    "mapped": MAPPED,
    "text": TEXTS,
    "vocabulary": VOCABULARIES,
    "template": TEMPLATES,
    "grammar": GRAMMARS,
    "schema": SCHEMAS,
    "command": COMMANDS,
    "picture": PICTURES,
    "encoder": ENCODERS,
    "folder": FOLDERS,
    "request": REQUESTS,
    "batch": BATCHES,
    "catalogue": CATALOGUES,
    "frame": FRAMES,
    "prompt": PROMPTS,
    "embedding": EMBEDDINGS,
    "mcp": SERVERS,
    "message": MESSAGES,
    "store": STORES,
}
