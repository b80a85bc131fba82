"""Media encoders: pictures to rows of embeddings, by plugins."""
