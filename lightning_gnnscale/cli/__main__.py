"""`python -m lightning_gnnscale.cli` is `gnnscale`."""

from .main import program

program()
