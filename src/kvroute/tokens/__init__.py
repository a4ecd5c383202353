"""Prompts in tokens: estimated from bytes here, exactly as the engine in `kvaware`."""
