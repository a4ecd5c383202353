"""The endpoint spec: what people write, read with line numbers, judged field by field."""
