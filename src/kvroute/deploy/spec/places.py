"""Where a field belongs that stands in the wrong place."""

from __future__ import annotations

import difflib
from collections import defaultdict

from kvroute.deploy.spec.aliases import ALIASES
from kvroute.deploy.spec.fields import Path, Shape, dotted, walk


class Places:
    """Every place of one kind of document, by the field's name."""

    def __init__(self, root: Shape) -> None:
        self.by_name: dict[str, list[Path]] = defaultdict(list)
        for path, _ in walk(root):
            self.by_name[str(path[-1])].append(path)

    def belonging(self, wrong: Path) -> list[Path]:
        """The places for the last key of `wrong`: those that share most of its path, then the shallowest."""
        places = self.by_name.get(str(wrong[-1]), [])
        ranked = sorted(places, key=lambda place: (-_shared(place, wrong), len(place)))
        best = [place for place in ranked if _shared(place, wrong) == _shared(ranked[0], wrong)]
        return [place for place in best if len(place) == len(best[0])][:3]

    def advice(self, wrong: Path) -> str:
        """One sentence about a field that is not known where it stands."""
        name = str(wrong[-1])
        if name in ALIASES:
            return f"belongs at {dotted(ALIASES[name])}"
        places = self.belonging(wrong)
        if places:
            return "belongs under " + " or ".join(dotted(place[:-1]) or "the root" for place in places)
        close = difflib.get_close_matches(name, self.by_name, n=1, cutoff=0.75)
        if close:
            nearest = self.belonging((*wrong[:-1], close[0]))[0]
            return f"unknown field; did you mean {dotted(nearest)}?"
        return f"unknown field under {dotted(wrong[:-1]) or 'the root'}"


def _shared(one: Path, other: Path) -> int:
    """How many keys two paths begin with together, whichever item of a list they are in."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right and not (isinstance(left, int) and isinstance(right, int)):
            break
        count += 1
    return count
