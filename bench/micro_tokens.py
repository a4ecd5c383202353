"""Measure exact token ids: chats of 8K and 32K tokens with and without the prefix cache, per library.

    python bench/micro_tokens.py [--json] [--model FOLDER]

The chat has ten turns and the stated length at its end. The system prompt has half of the length, the turns
share the rest. The text is source code of the standard library. `cold` tokenizes turn 10 with nothing known.
`turn 10` tokenizes it after turns 1 to 9 with their texts remembered (from the request's JSON to an array of
ids: decode, render, cut, encode the new part). `goes on` does the same with conversations remembered as well
(no work for the known part, if the template allows it). `again` repeats `turn 10`. `3 specials` is the tiny
model's tokenizer, `259 specials` the same with 256 more reserved tokens. Times are wall-clock milliseconds on
one thread, median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.conversations import Conversations
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model

TURNS = 10
CHARS_PER_TOKEN = 2.2
"""First estimate for source code in the tiny model's vocabulary; corrected by measuring."""


def text_source() -> Iterator[str]:
    """Endless source code, line by line."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    while True:
        for file in sorted(folder.glob("*.py")):
            yield from file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def take(lines: Iterator[str], chars: int) -> str:
    taken: list[str] = []
    while chars > 0:
        taken.append(next(lines))
        chars -= len(taken[-1])
    return "".join(taken)


def conversation(lines: Iterator[str], tokens: int) -> list[InferenceRequest]:
    """The requests of turns 1 to 10."""
    chars = round(tokens * CHARS_PER_TOKEN)
    messages = [{"role": "system", "content": take(lines, chars // 2)}]
    requests = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": take(lines, chars // 4 // TURNS)})
        body = json.dumps({"model": "tiny", "messages": messages}).encode()
        requests.append(parse_request(ENDPOINTS["/v1/chat/completions"], body))
        messages.append({"role": "assistant", "content": take(lines, chars // 4 // TURNS)})
    return requests


def timed(tokenizer: LocalTokenizer, request: InferenceRequest) -> tuple[float, int]:
    start = time.perf_counter_ns()
    (ids,) = tokenizer.prompts(request)
    return (time.perf_counter_ns() - start) / 1e6, len(ids)


def with_reserved(folder: Path, count: int) -> Path:
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    taken = max(token["id"] for token in settings["added_tokens"])
    first = max(taken, *settings["model"]["vocab"].values()) + 1
    plain = {**settings["added_tokens"][0]}
    settings["added_tokens"] += [
        {**plain, "id": first + number, "content": f"<|reserved_{number}|>"} for number in range(count)
    ]
    path.write_text(json.dumps(settings))
    return folder


def measure(folder: Path, tokens: int, repeats: int, *, allow_fastokens: bool) -> dict[str, object]:
    files = load_model(folder, allow_fastokens=allow_fastokens)
    lines = text_source()
    cold, turn, again, goes_on = [], [], [], []
    length = 0
    for _ in range(repeats):
        requests = conversation(lines, tokens)
        cold.append(timed(LocalTokenizer(files, SegmentCache(0)), requests[-1])[0])
        warm = LocalTokenizer(files, SegmentCache(64 * 1024 * 1024))
        for request in requests[:-1]:
            warm.prompts(request)
        spent, length = timed(warm, requests[-1])
        turn.append(spent)
        again.append(timed(warm, requests[-1])[0])
        cache, conversations = SegmentCache(64 * 1024 * 1024), Conversations(64 * 1024 * 1024)
        remembering = LocalTokenizer(files, cache, None, conversations)
        for request in requests[:-1]:
            remembering.prompts(request)
        goes_on.append(timed(remembering, requests[-1])[0])
    return {
        "library": files.encoder.name,
        "tokens": length,
        "cold": statistics.median(cold),
        "turn 10": statistics.median(turn),
        "goes on": statistics.median(goes_on),
        "again": statistics.median(again),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", type=Path, help="a model's folder instead of the tiny model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = (
            {"given model": options.model}
            if options.model
            else {
                "3 specials": write_tiny_model("tiny", Path(scratch, "a")),
                "259 specials": with_reserved(write_tiny_model("tiny", Path(scratch, "b")), 256),
            }
        )
        results = [
            {"model": name, **measure(folder, tokens, options.repeats, allow_fastokens=fast)}
            for name, folder in folders.items()
            for tokens in (8_000, 32_000)
            for fast in (True, False)
        ]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'model':14}{'library':12}{'tokens':>8}{'cold ms':>10}{'turn 10':>9}{'goes on':>9}{'again':>9}")
    for row in results:
        print(f"{row['model']:14}{row['library']:12}{row['tokens']:>8}", end="")
        print(f"{row['cold']:10.2f}{row['turn 10']:9.2f}{row['goes on']:9.2f}{row['again']:9.2f}")


if __name__ == "__main__":
    main()
