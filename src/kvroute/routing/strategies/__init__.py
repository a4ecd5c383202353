"""The strategies, one module each; `routing/registry.py` lists them."""
