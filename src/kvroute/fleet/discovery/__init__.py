"""Where the wanted set of workers comes from."""
