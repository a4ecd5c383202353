"""Prompts as chained block keys and as LMCache's chunks. Pure: no I/O, no clock."""
