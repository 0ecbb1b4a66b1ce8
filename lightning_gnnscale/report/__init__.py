"""What a run says of itself: progress bars and the closing table."""
