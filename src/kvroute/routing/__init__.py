"""Choosing a worker. Pure and synchronous: no I/O, no clock, no event loop.

To be driven: `Router.decide` (`Strategy.rank`), `Router.dispatch` when a request is sent,
`Dispatch.first_token`, `Dispatch.finish`. docs/scoring.md has an example.
"""
