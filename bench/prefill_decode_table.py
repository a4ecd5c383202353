"""Print where handing prompts over pays: by prompt length, answer length, load and link, in virtual time.

    python bench/prefill_decode_table.py [--prompts 1024,4096] [--answers 64,256] [--jobs 2]

Eight simulated engines as in prefill_decode.py, prompts that share nothing, and kvroute's rule (by cost).
A cell has the two figures of the best split of roles as shares of those of eight workers for both roles:
mean time to first token, and p90 time per output token; then the number of prefill workers. The best split
has the least product of both figures. It pays if that product is at least 5% below that of workers for both
roles; otherwise the cell is empty.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from itertools import product

from kvroute.sim.timing import TimingModel
from prefill_decode_runs import CAPACITY_TOKENS, WORKERS, Case, Cold, Setting, run
from routing_runs import Figures

PROMPTS = (1024, 4096, 16_384, 65_536)
ANSWERS = (64, 256, 1024)
LOADS = (0.4, 0.8)
LINKS_GBIT_S = (25, 100, 400)
SETTINGS = tuple(Setting("cost", prefill) for prefill in (1, 2, 3, 4))
PAYS = 0.95
MOST_STREAMS = 256
MEMORY_SHARE = 0.8


def capacity(prompt: int, answer: int, timing: TimingModel | None = None) -> float:
    """Requests per second that eight workers for both roles complete with full batches."""
    timing = timing or TimingModel()
    context = prompt + answer / 2
    streams = min(MOST_STREAMS, MEMORY_SHARE * CAPACITY_TOKENS / context)
    step_s = timing.iteration_s(1, 0.0, round(streams * context))
    chunks = -(-prompt // timing.max_batched_tokens)
    prefill_s = prompt * timing.token_s + timing.attention_s * prompt**2 / 2 + timing.fixed_s * chunks
    return WORKERS / (prefill_s + answer * step_s / streams)


def cases(prompt: int, answer: int) -> dict[tuple[float, int, Setting], Case]:
    """The runs of a row, by load, link and setting. The link does not matter without roles."""
    work, most = Cold(prompt, answer), capacity(prompt, answer)
    found = {}
    for load, gbit_s in product(LOADS, LINKS_GBIT_S):
        found[load, gbit_s, Setting("both")] = Case(work, load * most, Setting("both"))
        for setting in SETTINGS:
            found[load, gbit_s, setting] = Case(work, load * most, setting, link_bytes_s=gbit_s * 1e9 / 8)
    return found


def cell(both: Figures, by_setting: Sequence[tuple[Setting, Figures]]) -> str:
    """The text of a cell."""
    setting, best = min(by_setting, key=lambda each: each[1].mean * each[1].itl90)
    if best.mean * best.itl90 > PAYS * both.mean * both.itl90:
        return ""
    return f"{best.mean / both.mean:.2f} x {best.itl90 / both.itl90:.2f} ({setting.prefill})"


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def shown(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=lengths, default=PROMPTS)
    parser.add_argument("--answers", type=lengths, default=ANSWERS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    heads = [f"{load:.0%}, {gbit_s} Gbit/s" for load, gbit_s in product(LOADS, LINKS_GBIT_S)]
    print("| prompt, answer | requests/s | " + " | ".join(heads) + " |")
    print("|---" * (2 + len(heads)) + "|")
    with multiprocessing.Pool(options.jobs) as pool:
        for prompt, answer in product(options.prompts, options.answers):
            wanted = cases(prompt, answer)
            runs = list(dict.fromkeys(wanted.values()))
            figures = dict(zip(runs, pool.map(run, runs, chunksize=1), strict=True))
            cells = []
            for load, gbit_s in product(LOADS, LINKS_GBIT_S):
                both = figures[wanted[load, gbit_s, Setting("both")]]
                cells.append(cell(both, [(each, figures[wanted[load, gbit_s, each]]) for each in SETTINGS]))
            rates = " / ".join(f"{load * capacity(prompt, answer):.3g}" for load in LOADS)
            print(f"| {shown(prompt)}, {shown(answer)} | {rates} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
