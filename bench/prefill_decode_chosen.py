"""The best setting of each rule by workload and load, as `prefill_decode.py --choose` prints them."""

from prefill_decode_runs import Setting

CHOSEN: dict[tuple[str, float], tuple[float, list[Setting]]] = {
    ("conv", 0.7): (
        8.82,
        [
            Setting("both"),
            Setting("always", 5),
            Setting("length", 5, threshold=8192),
            Setting("uncached", 5, threshold=8192),
            Setting("cost", 5),
        ],
    ),
    ("conv", 0.9): (
        11.35,
        [
            Setting("both"),
            Setting("always", 5),
            Setting("length", 5, threshold=16384),
            Setting("uncached", 5, threshold=16384),
            Setting("cost"),
        ],
    ),
    ("chat8k", 0.7): (
        106.6,
        [
            Setting("both"),
            Setting("always", 3),
            Setting("length", 1, threshold=16384),
            Setting("uncached", 1, threshold=16384),
            Setting("cost"),
        ],
    ),
    ("chat8k", 0.9): (
        137.06,
        [
            Setting("both"),
            Setting("always", 1),
            Setting("length", 5, threshold=8192),
            Setting("uncached", 2, threshold=8192),
            Setting("cost"),
        ],
    ),
    ("chat64k", 0.7): (
        13.48,
        [
            Setting("both"),
            Setting("always", 3),
            Setting("length", 3, threshold=1024),
            Setting("uncached", 4, threshold=32768),
            Setting("cost"),
        ],
    ),
    ("chat64k", 0.9): (
        17.33,
        [
            Setting("both"),
            Setting("always", 1),
            Setting("length", 1, threshold=1024),
            Setting("uncached", 2, threshold=32768),
            Setting("cost"),
        ],
    ),
    ("agents", 0.7): (
        36.12,
        [
            Setting("both"),
            Setting("always", 5),
            Setting("length", 2, threshold=16384),
            Setting("uncached", 5, threshold=2048),
            Setting("cost", 5),
        ],
    ),
    ("agents", 0.9): (
        46.43,
        [
            Setting("both"),
            Setting("always", 5),
            Setting("length", 2, threshold=16384),
            Setting("uncached", 1, threshold=16384),
            Setting("cost", 1, 7),
        ],
    ),
}
