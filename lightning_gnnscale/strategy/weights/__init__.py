"""Weight policies: one file each."""
