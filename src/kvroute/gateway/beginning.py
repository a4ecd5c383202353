"""How client connections begin: as the first one of their server did."""

from __future__ import annotations

from operator import is_
from typing import Any

ITS_OWN = frozenset({"parser", "pipeline"})
"""Members that uvicorn makes anew for each connection. All others begin as the same objects, which
`fastlane_check` makes sure of."""


class Beginning:
    """The members of a connection as its making leaves them, but for `ITS_OWN`.

    Clients come together, and to make a connection step by step takes as long as a good part of a request;
    copying takes a tenth of that. Mutable: learnt from the first connection.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._members: dict[str, Any] = {}

    def members(self, *of: object) -> dict[str, Any]:
        """Of connections that are made of these very objects; empty while nothing is known of them."""
        return self._members if all(map(is_, self._of, of)) else {}

    def learn(self, members: dict[str, Any], *of: object) -> None:
        """A connection was made of these objects, and has these members."""
        self._members = {name: value for name, value in members.items() if name not in ITS_OWN}
        self._of = of
