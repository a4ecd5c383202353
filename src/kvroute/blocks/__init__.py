"""Prompts as chained block keys. Pure: no I/O, no clock."""
