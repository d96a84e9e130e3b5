"""Spellings of the libraries that moduli grew out of, for programs that were written for them: `nytorch`."""
