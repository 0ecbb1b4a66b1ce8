"""How partitioners read the graph: its layout, its undirected simple form, and its rows on scratch disk."""
