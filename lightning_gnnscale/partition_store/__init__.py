"""A partitioned graph on disk: written once, memory-mapped by every process."""
