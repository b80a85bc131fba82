"""Operations that a forward pass is made of, one file each: record, checks, NumPy reference, kernel steps.

`llamacli.graph.Graph` offers them as methods. A plugin's own op is a file of the same form in the plugin's package;
docs/plugins.md shows one to copy.
"""
