"""The inference API as bytes: endpoints, request bodies, prompts, errors, event streams. Pure."""
