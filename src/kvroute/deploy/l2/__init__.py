"""The second cache tiers that LMCache can use, and their registry."""
