"""Exchange policies: one file each."""
