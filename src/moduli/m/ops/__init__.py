"""Arithmetic on updates."""
