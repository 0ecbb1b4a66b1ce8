"""The `gnnscale` command."""
