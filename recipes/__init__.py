"""Whole experiments, one YAML each."""
