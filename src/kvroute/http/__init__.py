"""The HTTP edge: strict HTTP/1.1, limits on clients, the fast lane and the ASGI path."""
