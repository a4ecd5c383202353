"""Where each line of a spec belongs, whatever its indentation says; and the text indented so.

Fields are placed by their names alone: under the innermost open parent that has such a field and has not got
it yet. The indentation is only listened to where it makes sense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvroute.deploy.spec.fields import Kind, Path, Shape, dotted

_KEY = re.compile(
    r"""(?P<key>"[^"]*"|'[^']*'|[^\s#"'\[\]{},&*!|>%@`-][^\s#:]*|-[^\s#:]+)\s*:(?:\s+(?P<value>.*))?$"""
)
_COMMENTED_KEY = re.compile(r"^#\s*([\w.\-/]+):(?:\s|$)")
_ROOT_INDENT = -1


@dataclass(slots=True)
class _Open:
    """A mapping, list or list item that lines may still be added to; `taken` and `items` grow."""

    path: Path
    shape: Shape
    line: int
    written: int
    """The indentation of the line that opened it."""
    column: int
    """Where its children stand when it is written properly."""
    taken: dict[str, int] = field(default_factory=dict)
    items: int = 0

    def accepts(self, key: str) -> bool:
        return key in self.shape.children() or self.shape.kind in (Kind.FREE, Kind.ANYTHING)


@dataclass(frozen=True, slots=True)
class Placed:
    """One line: where it belongs and what was wrong with where it stood."""

    number: int
    path: Path
    text: str
    """The line as it should be."""
    moved: bool
    """Its parent by indentation is not its parent by name."""
    repeats: int | None
    """The line that has the same key on the same level as written."""
    known: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole spec, line by line; comments and empty lines are in `text` only."""

    placed: tuple[Placed, ...]
    text: str
    is_lost: bool
    """No line is indented at all."""

    @property
    def is_sound(self) -> bool:
        """Every line has a place."""
        return all(line.known for line in self.placed)


def lay_out(text: str, root: Shape) -> Layout:
    """Place every line of `text` in a document of shape `root`."""
    return _Layouter(root).run(text)


class _Layouter:
    """`stack` has what is open, outermost first; `written` the keys as the indentation has them."""

    def __init__(self, root: Shape) -> None:
        self.stack = [_Open((), root, 0, _ROOT_INDENT, 0)]
        self.placed: list[Placed] = []
        self.output: list[str] = []
        self.comments: list[tuple[str, int | None]] = []
        self.written: list[tuple[int, int]] = []
        self.levels: dict[tuple[int, str], int] = {}
        self.literal: tuple[int, int] | None = None
        """In a block of text or an open bracket: its key's indentation, and the shift to apply."""
        self.brackets = 0

    def run(self, text: str) -> Layout:
        lines = text.expandtabs(2).splitlines()
        self.is_lost = not any(line[:1] == " " for line in lines if line.strip())
        for number, line in enumerate(lines, start=1):
            self._line(number, line.rstrip())
        self._flush_comments(self.stack[-1].column)
        return Layout(tuple(self.placed), "\n".join(self.output) + "\n", self.is_lost)

    def _line(self, number: int, line: str) -> None:
        content = line.lstrip()
        indent = len(line) - len(content)
        if self.literal is not None and self._continues(content, indent, number):
            self.output.append((" " * max(0, indent + self.literal[1]) + content).rstrip())
            self.brackets += _bracket_balance(content) if self.brackets else 0
            return
        self.literal = None
        if not content or content.startswith("#"):
            self.comments.append((content, self._commented_column(content)))
        elif content in ("---", "..."):
            self._flush_comments(0)
            self.output.append(content)
        elif content == "-" or content.startswith("- "):
            self._item(number, indent, content[1:].lstrip())
        else:
            self._field(number, indent, content, dash="")

    def _continues(self, content: str, indent: int, number: int) -> bool:
        if self.literal is None:
            return False
        return self.brackets > 0 or not content or indent > self.literal[0]

    # --- list items ---

    def _item(self, number: int, indent: int, content: str) -> None:
        match = _KEY.match(content)
        key = _unquoted(match["key"]) if match else None
        lists = [
            (place, node)
            for place, node in reversed(list(enumerate(self.stack)))
            if node.shape.kind in (Kind.LIST, Kind.ANYTHING) and node.written <= indent
        ]
        fitting = [(place, node) for place, node in lists if _item_accepts(node.shape, key)]
        if not (fitting or lists):
            self._unknown(number, indent, f"- {content}".rstrip(), "-")
            return
        place, node = (fitting or lists)[0]
        del self.stack[place + 1 :]
        item = node.shape.item or Shape(Kind.ANYTHING)
        path = (*node.path, node.items)
        node.items += 1
        column = node.column
        if key is not None and item.kind is not Kind.SCALAR:
            self.stack.append(_Open(path, item, number, indent, column + 2))
            self._field(number, indent, content, dash="- ")
            return
        moved = self._parent_as_written(number, indent, is_item=True) != node.line
        self._emit(number, column, f"- {content}".rstrip(), path, moved or self.is_lost, None)
        self._begin_literal(content, indent, column)

    # --- keys ---

    def _field(self, number: int, indent: int, content: str, dash: str) -> None:
        match = _KEY.match(content)
        if match is None:
            self._unknown(number, indent, dash + content, content)
            return
        key, value = _unquoted(match["key"]), _without_comment(match["value"] or "")
        parent_as_written = self._parent_as_written(number, indent, is_item=bool(dash))
        level = (number if dash else parent_as_written, key)
        repeats = self.levels.get(level)
        self.levels.setdefault(level, number)
        if dash:
            # What follows in this item stands two columns right of the dash.
            self.written.append((indent + 1, number))
        place = len(self.stack) - 1 if dash else self._place_of(key, indent)
        if place is None:
            self._unknown(number, indent, dash + content, key)
            return
        del self.stack[place + 1 :]
        node = self.stack[-1]
        node.taken.setdefault(key, number)
        path = (*node.path, key)
        column = node.column - len(dash)
        known = node.accepts(key)
        moved = self.is_lost if dash else parent_as_written != node.line
        self._emit(number, column, dash + content, path, moved, repeats, known=known)
        shape = node.shape.children().get(key) or Shape(
            Kind.ANYTHING if node.shape.kind is Kind.ANYTHING else Kind.SCALAR
        )
        if not value and shape.kind is not Kind.SCALAR:
            self.stack.append(_Open(path, shape, number, indent + len(dash), node.column + 2))
        self._begin_literal(value, indent, column)

    def _place_of(self, key: str, indent: int) -> int | None:
        """The open node for `key`: one that the indentation agrees with, else the innermost that names it."""
        fitting = [
            (number, node)
            for number, node in reversed(list(enumerate(self.stack)))
            if node.accepts(key) and key not in node.taken
        ]
        agreeing = [(number, node) for number, node in fitting if node.written < indent or not node.path]
        by_name = [(number, node) for number, node in fitting if key in node.shape.children()]
        for candidates in (agreeing, by_name, fitting):
            if candidates:
                return candidates[0][0]
        # Nothing is free: it is given twice.
        again = [number for number, node in enumerate(self.stack) if key in node.taken]
        return again[-1] if again else None

    # --- what the indentation says ---

    def _parent_as_written(self, number: int, indent: int, *, is_item: bool) -> int:
        """The line of the parent by indentation, 0 at the root. A dash may stand below its key."""
        while self.written and not (
            self.written[-1][0] < indent or (is_item and self.written[-1][0] == indent)
        ):
            self.written.pop()
        parent = self.written[-1][1] if self.written else 0
        if not is_item:
            self.written.append((indent, number))
        return parent

    # --- output ---

    def _emit(
        self,
        number: int,
        column: int,
        content: str,
        path: Path,
        moved: bool,
        repeats: int | None,
        *,
        known: bool = True,
    ) -> None:
        self._flush_comments(column)
        self.output.append(" " * column + content)
        self.placed.append(Placed(number, path, self.output[-1], moved, repeats, known))

    def _unknown(self, number: int, indent: int, content: str, key: str) -> None:
        self._emit(number, indent, content, (key,), False, None, known=False)

    def _commented_column(self, comment: str) -> int | None:
        """Where a commented-out field stands: with its siblings, which may still be open."""
        match = _COMMENTED_KEY.match(comment)
        open_here = [node for node in self.stack if match and match[1] in node.shape.children()]
        return open_here[-1].column if open_here else None

    def _flush_comments(self, column: int) -> None:
        """Comments stand with the line below them, be it a field or a commented-out one."""
        lines = []
        for comment, own in reversed(self.comments):
            column = own if own is not None else column
            lines.append((" " * column + comment).rstrip())
        self.output += reversed(lines)
        self.comments.clear()

    def _begin_literal(self, value: str, indent: int, column: int) -> None:
        self.brackets = max(0, _bracket_balance(value)) if value[:1] in "[{" else 0
        if value[:1] in ("|", ">") or self.brackets:
            self.literal = indent, column - indent


def _item_accepts(shape: Shape, key: str | None) -> bool:
    item = shape.item or Shape(Kind.ANYTHING)
    if key is None or item.kind is Kind.SCALAR:
        return (key is None) == (item.kind in (Kind.SCALAR, Kind.ANYTHING)) or item.kind is Kind.ANYTHING
    return item.kind in (Kind.FREE, Kind.ANYTHING) or key in item.children()


def _unquoted(key: str) -> str:
    return key[1:-1] if key[:1] in "\"'" else key


def _without_comment(value: str) -> str:
    return "" if value.startswith("#") else value


def _bracket_balance(text: str) -> int:
    plain = re.sub(r"\"[^\"]*\"|'[^']*'", "", text)
    return sum(plain.count(mark) for mark in "[{") - sum(plain.count(mark) for mark in "]}")


def parent_of(path: Path) -> str:
    """Where a placed line stands, for people."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
        return dotted(path)
    return dotted(path[:-1])
