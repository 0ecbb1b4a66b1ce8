"""sample_neighbors."""
