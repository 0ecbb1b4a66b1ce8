"""How many parts, what fits where, and why."""
