"""Populations around a starting point."""
