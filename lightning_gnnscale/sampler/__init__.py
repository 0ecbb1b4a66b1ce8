"""What to draw: samplers and the mini-batch they make."""
