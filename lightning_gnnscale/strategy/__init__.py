"""The Lightning strategy and its policies."""
