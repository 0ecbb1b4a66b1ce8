"""Edges from disk or memory, in bounded chunks."""
