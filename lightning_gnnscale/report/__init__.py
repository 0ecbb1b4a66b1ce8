"""The output of a run: progress bars, the closing table and the report."""
