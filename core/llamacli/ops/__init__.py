"""The operations that a forward pass is made of, one file each."""
