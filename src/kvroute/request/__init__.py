"""One request: what is known of it, its plan, its client, and its errors."""
