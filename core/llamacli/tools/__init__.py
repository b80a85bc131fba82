"""Tools on top of models: bench, doctor, embedding, hub, perplexity."""
