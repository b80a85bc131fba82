"""Operations of a forward pass, one file each.

A file has the op's record, checks, NumPy reference and kernel steps. `llamacli.graph.Graph` offers them as methods. A
plugin's own op is a file of the same form in the plugin's package; docs/plugins.md shows one to copy.
"""
