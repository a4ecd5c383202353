"""An example of a distribution that extends kvroute: a part and a strategy."""
