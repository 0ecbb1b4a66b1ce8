"""How to iterate: seed order, walk over parts, batches prepared ahead."""
