"""The configuration: all options together, loaded, checked and printed."""
