"""What happened to each request: metrics, log lines, decisions and spans."""
