"""Reads YAML texts: the one loader of files that people and programs write for kvroute.

Safe types only. An alias counts as what it repeats, so that a text of a kilobyte cannot become gigabytes.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

MAX_NODES: Final = 1_000_000
"""Most values of a text, with those that aliases repeat."""
_MAX_DEPTH: Final = 200


class NotReadable(yaml.YAMLError):
    """The text is YAML that cannot be used."""


def load(text: str) -> Any:
    """The value of a text with one document; None if it is empty. Raises yaml.YAMLError for every text that
    cannot be read. Blocks: 0.2 ms for a kilobyte."""
    return compose(text)[1]


def compose(text: str) -> tuple[yaml.Node | None, Any]:
    """As `load`, with the tree that the value is made from, before merges.

    The tree is of another parse than the value, because merges change it.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, None
        check(root)
        value = construct(loader, root)
        return yaml.compose(text, Loader=yaml.SafeLoader), value
    except RecursionError as error:
        raise NotReadable("it is nested too deeply") from error
    finally:
        loader.dispose()


def construct(loader: Any, root: yaml.Node) -> Any:
    """The value of a checked tree. Raises yaml.YAMLError."""
    try:
        return loader.construct_document(root)
    except yaml.YAMLError:
        raise
    except RecursionError as error:
        raise NotReadable("it is nested too deeply") from error
    except ValueError as error:
        raise NotReadable(str(error)) from error
    except (TypeError, AttributeError, LookupError, OverflowError) as error:
        # PyYAML 6 assumes that a tagged scalar has the form of its tag: `!!timestamp x` is an AttributeError,
        # `!!bool x` a KeyError.
        raise NotReadable("a value is not of the type of its tag") from error


def check(root: yaml.Node) -> None:
    """Refuse trees that contain themselves, are too deep, or become more than `MAX_NODES` values by their
    aliases. Raises NotReadable."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size_of(node: yaml.Node, depth: int) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        key = id(node)
        size = sizes.get(key)
        if size is not None:
            return size
        if key in open_nodes:
            raise NotReadable("it is nested too deeply")  # for ever: an anchor contains itself
        if depth > _MAX_DEPTH:
            raise NotReadable("it is nested too deeply")
        open_nodes.add(key)
        total = 1
        for member in node.value:
            for child in member if isinstance(member, tuple) else (member,):
                total += size_of(child, depth + 1)
                if total > MAX_NODES:
                    raise NotReadable(f"aliases make more than {MAX_NODES} values of it")
        open_nodes.discard(key)
        sizes[key] = total
        return total

    size_of(root, 0)
