"""Plugin skeletons: distributions from a model, or a kind of model.

What the skeleton does not compute is marked as left to do.
"""

from llamacli.testing.scaffold.checkpoint import describe_folder
from llamacli.testing.scaffold.description import KINDS, Description, like
from llamacli.testing.scaffold.files import write_encoder_plugin, write_plugin

__all__ = ["KINDS", "Description", "describe_folder", "like", "write_encoder_plugin", "write_plugin"]
