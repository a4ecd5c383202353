"""The endpoint spec: its fields, its rules, and a reader that gives a verdict for each field."""
