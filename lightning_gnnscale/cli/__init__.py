"""The `gnnscale` command: every subcommand is a Hydra application."""

from .main import main

__all__ = ["main"]
