"""Assign nodes to parts from a stream of edges."""
