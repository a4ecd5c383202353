"""Chooses a worker for each request. Pure and synchronous: no I/O, no clock, no event loop.

A caller uses `Router.decide` (which calls `Strategy.rank`), `Router.dispatch` when it sends the request,
`Dispatch.first_token` and `Dispatch.finish`. docs/scoring.md has an example.
"""
