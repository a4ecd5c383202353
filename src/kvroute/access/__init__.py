"""Who may enter: keys of clients and of the admin API, JSON Web Tokens, and their limits."""
