"""Plugin skeletons: distributions from a model file or a kind of model.

What the skeleton does not compute is marked as left to do.
"""

from llamacli.testing.scaffold.description import KINDS, Description, like
from llamacli.testing.scaffold.files import write_encoder_plugin, write_plugin

__all__ = ["KINDS", "Description", "like", "write_encoder_plugin", "write_plugin"]
