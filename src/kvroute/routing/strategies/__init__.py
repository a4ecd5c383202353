"""One module per strategy; `routing/registry.py` lists them."""
