"""Parts: optional capabilities, each built from a section of its own."""
