"""What a run says of itself: tables, CSV, plots."""
