"""gather_rows."""
