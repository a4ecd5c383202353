"""The best setting of each rule by workload and load, as `prefill_decode.py --choose` prints them."""

from prefill_decode_runs import Setting

CHOSEN: dict[tuple[str, float], tuple[float, list[Setting]]] = {}
