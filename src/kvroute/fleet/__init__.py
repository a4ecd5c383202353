"""The workers we know: identity, health, load, discovery."""
