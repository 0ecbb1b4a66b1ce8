"""A graph with its features, labels and masks, in the order of its stream."""
