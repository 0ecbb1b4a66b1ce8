"""The `gnnscale` command: every subcommand is a Hydra application."""

from .main import main, program

__all__ = ["main", "program"]
