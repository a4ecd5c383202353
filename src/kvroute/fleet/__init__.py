"""The gateway's workers: identity, health, load, discovery."""
