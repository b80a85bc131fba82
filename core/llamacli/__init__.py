"""Run large language models on CPUs.

    import llamacli

    with llamacli.load_model("model.gguf") as model, model.create_session() as session:
        for token in session.generate("Once upon a time", max_tokens=64):
            print(token.piece, end="")

Public names are listed in `__init__.pyi` and imported at first use, so that `import llamacli` itself is fast.
"""

import logging

from llamacli.util.exports import exports

_MODULE_OF, __getattr__, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)

logging.getLogger(__name__).addHandler(logging.NullHandler())
