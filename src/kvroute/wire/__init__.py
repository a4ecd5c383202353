"""Formats on the wire between engines, LMCache and kvroute. Pure: bytes in, values out, and back."""
