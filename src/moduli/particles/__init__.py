"""Whole models as values."""
