"""Models of the Hugging Face hub: download, cache, short names."""
