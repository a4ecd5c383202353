"""Second cache tiers behind LMCache, one file each."""
