"""From a request's body to its answer: reading, planning, attempts, exchange."""
