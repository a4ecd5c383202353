"""Models with chat templates in the manner of public ones (`tests/data/templates`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from kvroute.deploy.tiny_model import write_tiny_model

FOLDER: Final = Path(__file__).parents[1] / "data" / "templates"
MANNERS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
_SPECIAL: Final = re.compile(r"<\|[a-zA-Z_]+\|>|\[/?[A-Z_]{3,}\]|</?(?:s|think|tool_call|tool_response)>")


def write_model(manner: str, folder: Path) -> Path:
    """The tiny model with this template; the tokens that the template prints are special."""
    return with_template((FOLDER / f"{manner}.jinja").read_text(), folder)


def with_template(template: str, folder: Path) -> Path:
    write_tiny_model("tiny", folder)
    (folder / "chat_template.jinja").write_text(template)
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    known = settings["added_tokens"]
    free = 1 + max(max(token["id"] for token in known), *settings["model"]["vocab"].values())
    new = sorted(set(_SPECIAL.findall(template)) - {token["content"] for token in known})
    settings["added_tokens"] += [
        {**known[0], "id": free + number, "content": text} for number, text in enumerate(new)
    ]
    path.write_text(json.dumps(settings))
    return folder
