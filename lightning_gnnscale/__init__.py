"""Train graph neural networks on graphs that fit neither the GPU nor the host, through the Lightning Trainer."""
