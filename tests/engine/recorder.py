"""Records what real engines cache: `ENGINE_PYTHON tests/engine/recorder.py RUNS.json`.

Runs in the engine's environment and knows nothing of kvroute; `record_models.py` starts it. `RUNS.json` is a
list of {"name", "model": folder, "arguments": of `vllm.LLM`, "zeroed_kernels", "unit": tokens or 0, "out": a
path, "log": a path}. vLLM is imported once and each run forks from there: a start takes 5 s instead of 25.

One run writes one file of JSON lines, compressed with xz:

- first `{"engine": {...}}`: release, arguments, pool, and every KV cache group as the engine has it
- `{"requests": [...]}`: sent at once; with the ids of prompt and answer, and the engine's own `cached_tokens`
- `{"frames": [hex, hex, hex]}`: each ZMQ message that those requests caused: topic, sequence number, payload
"""

from __future__ import annotations

import json
import lzma
import os
import random
import sys
import traceback
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
IDS = range(16, 32)
"""Token ids of prompts: half a byte of information each, so that a recording stays small."""
TOPIC = "kv"


class Workload:
    """Chats, shared documents, forks of system prompts, repeats and fillers; lengths in `unit`s of tokens.

    `request(parts, answer)` sends one request, `together` several at once. Mutable: the random generator.
    """

    def __init__(self, engine: Recorded, seed: str, unit: int) -> None:
        self._engine = engine
        self._chooser = random.Random(seed)
        self._unit = unit

    def text(self, units: float, extra: int = 0) -> list[int]:
        """New tokens."""
        return self._chooser.choices(IDS, k=max(1, round(units * self._unit) + extra))

    def run(self) -> None:
        system, documents = self.text(3.3), [self.text(length) for length in (4.5, 3.0, 2.1)]
        self._chats(system, 3, 4)
        for document in documents:
            for _ in range(3):
                self._ask([*document, *self.text(0.4)])
        self._forks(self.text(6.0))
        for units, extra in ((4, 0), (4, 1), (4, -1), (2.5, 0), (1, 0), (1, 1), (0.4, 0)):
            prompt = self.text(units, extra)
            for _ in range(3):
                self._ask(prompt)
            self._ask([*prompt, *self.text(1.2)])
        shared = self.text(3.0)
        self._together([shared] * 3)
        self._together([[*shared, *self.text(1.3)] for _ in range(3)])
        self._together([[*self.text(1.5)] for _ in range(3)])
        for _ in range(8):
            self._ask(self.text(5.2))
        self._ask([*documents[0], *self.text(0.4)])
        self._chats(system, 2, 3)
        self._mixture(system, documents, 30)

    def _ask(self, prompt: list[int], answer: int = 1) -> list[int]:
        return self._engine.ask([(prompt, answer)])[0]

    def _together(self, prompts: list[list[int]]) -> None:
        self._engine.ask([(prompt, 1) for prompt in prompts])

    def _chats(self, system: list[int], chats: int, turns: int) -> None:
        histories = [list(system) for _ in range(chats)]
        for _ in range(turns):
            for history in histories:
                history += self.text(0.6)
                history += self._ask(history, self._chooser.choice((5, 24, 40)))

    def _forks(self, base: list[int]) -> None:
        self._ask(base)
        for units, extra in ((4, 0), (4, 5), (2, 0), (5.5, 0), (4, 0), (4, 5)):
            cut = round(units * self._unit) + extra
            self._ask([*base[:cut], *self.text(1.7)])

    def _mixture(self, system: list[int], documents: list[list[int]], count: int) -> None:
        choose = self._chooser.choice
        asked = [system]
        for _ in range(count):
            kind = choose(("document", "fork", "repeat", "new"))
            if kind == "document":
                prompt = [*choose(documents), *self.text(0.5)]
            elif kind == "fork":
                base = choose(asked)
                cut = self._chooser.randrange(1, min(len(base), 6 * self._unit) + 1)
                prompt = [*base[:cut], *self.text(0.8)]
            elif kind == "repeat":
                prompt = choose(asked)
            else:
                prompt = self.text(self._chooser.uniform(0.5, 4.0))
            asked.append(prompt)
            self._ask(prompt, choose((1, 8)))


class Recorded:
    """An engine in this process whose requests and events go to a file. Mutable: the file grows."""

    def __init__(self, run: dict[str, Any]) -> None:
        import vllm
        import zmq
        from vllm.config import KVEventsConfig

        endpoint = "inproc://events"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic=TOPIC)
        arguments = dict(run["arguments"])
        self._llm = vllm.LLM(
            run["model"],
            load_format="dummy",
            enforce_eager=True,
            skip_tokenizer_init=False,
            kv_events_config=events,
            disable_log_stats=True,
            seed=0,
            **arguments,
        )
        self._socket.connect(endpoint)
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._next = 0
        self.lines: list[dict[str, Any]] = [{"engine": self._facts(run, vllm.__version__)}]

    @property
    def unit(self) -> int:
        return int(self._scheduler.block_size)

    def _facts(self, run: dict[str, Any], version: str) -> dict[str, Any]:
        scheduler = self._scheduler
        config = scheduler.kv_cache_config
        manager = scheduler.kv_cache_manager
        groups = []
        for number, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            kind, window = manager.kv_cache_event_metadata[number]
            facts = {
                "kind": kind,
                "block_size": spec.block_size,
                "layers": len(group.layer_names),
                "window": window,
                "chunk": getattr(spec, "attention_chunk_size", None),
                "mamba_cache_mode": getattr(spec, "mamba_cache_mode", None),
                "speculative_blocks": getattr(spec, "num_speculative_blocks", None),
                "checkpoint_blocks": getattr(spec, "num_prefill_checkpoint_blocks", None),
                "eagle": number in manager.coordinator.eagle_group_ids,
                "cacheable": spec.prefix_cacheable,
            }
            groups.append({name: value for name, value in facts.items() if value is not None})
        return {
            "release": version,
            "architecture": run["name"],
            "arguments": {
                name: value for name, value in run["arguments"].items() if name != "speculative_config"
            },
            "speculative": run["arguments"].get("speculative_config", {}).get("method"),
            "groups": groups,
            "pool_blocks": config.num_blocks,
            "block_size": scheduler.block_size,
            "hash_block_size": scheduler.hash_block_size,
            "retention_interval": getattr(config, "prefix_cache_retention_interval", None),
            "partial_hits": manager.coordinator.enable_partial_hash_hits,
            "enable_prefix_caching": manager.enable_caching,
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
            "max_num_seqs": scheduler.max_num_running_reqs,
            "lookahead_tokens": scheduler.num_lookahead_tokens,
            "topic": TOPIC,
        }

    def ask(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        """Send prompts with the lengths of their answers at once. Returns the answers."""
        from vllm import SamplingParams

        answers = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt, _ in requests],
            [SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True) for _, answer in requests],
            use_tqdm=False,
        )
        outputs = [list(answer.outputs[0].token_ids) for answer in answers]
        self.lines.append(
            {
                "requests": [
                    {
                        "prompt_token_ids": list(prompt),  # the caller goes on with its list
                        "output_token_ids": output,
                        "max_tokens": length,
                        "cached_tokens": answer.num_cached_tokens,
                    }
                    for (prompt, length), output, answer in zip(requests, outputs, answers, strict=True)
                ]
            }
        )
        self._take_events()
        return outputs

    def _take_events(self) -> None:
        publisher = self._scheduler.kv_event_publisher
        publisher._event_queue.join()
        last = publisher._buffer[-1][0] if publisher._buffer else -1
        while self._next <= last:
            if not self._socket.poll(10_000):
                raise RuntimeError("the engine's events do not arrive")
            frames = self._socket.recv_multipart()
            self._next = int.from_bytes(frames[1], "big") + 1
            self.lines.append({"frames": [frame.hex() for frame in frames]})


def zero_kernels(layers: str) -> None:
    """Layers of that kind answer zeros. Scheduler and caches stay as they are.

    The kernels of "mamba" need a GPU. Those of "mla" cannot continue a cached prefix on a CPU, so that vLLM
    turns the prefix cache off there; with zeros it can stay on.
    """
    if layers == "mla":
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.platforms.cpu import CpuPlatform

        MLAAttention.forward_impl = _zeros
        check = CpuPlatform.check_and_update_config

        def checked(cls: type, config: Any) -> None:
            size = config.scheduler_config.max_num_batched_tokens
            check(config)
            config.cache_config.enable_prefix_caching = True
            config.scheduler_config.enable_chunked_prefill = True
            config.scheduler_config.max_num_batched_tokens = size

        CpuPlatform.check_and_update_config = classmethod(checked)
        return
    from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer.forward_impl = _zeros
    MambaMixer2.conv_ssm_forward = _zeros


def _zeros(self: object, *_: object, output: Any, **__: object) -> Any:
    return output.zero_()


def record(run: dict[str, Any]) -> None:
    """Start the engine of `run`, send its workload, and write its file."""
    if run["zeroed_kernels"]:
        zero_kernels(run["zeroed_kernels"])
    engine = Recorded(run)
    Workload(engine, run["name"], run["unit"] or engine.unit).run()
    with lzma.open(run["out"], "wt", preset=9 | lzma.PRESET_EXTREME) as file:
        for line in engine.lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    facts = engine.lines[0]["engine"]
    asked = [each for line in engine.lines for each in line.get("requests", ())]
    found = sum(each["cached_tokens"] or 0 for each in asked)
    total = sum(len(each["prompt_token_ids"]) for each in asked)
    print(
        f"{run['name']}: {len(asked)} requests, {found} of {total} tokens cached, "
        f"pool {facts['pool_blocks']}, groups {facts['groups']}, {os.path.getsize(run['out'])} bytes",
        file=sys.__stderr__,
        flush=True,
    )


def main() -> int:
    os.environ.update(ENVIRONMENT)
    import vllm.engine.arg_utils
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401  # imported here once for all runs

    failed = []
    with open(sys.argv[1]) as file:
        runs = json.load(file)
    for run in runs:
        child = os.fork()
        if child == 0:
            output = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            error = os.dup(2)
            sys.__stderr__ = os.fdopen(error, "w")
            os.dup2(output, 2)
            code = 1
            try:
                record(run)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        if os.waitpid(child, 0)[1]:
            with open(run["log"]) as log:
                print(f"{run['name']}: failed:\n{log.read()[-4000:]}", file=sys.stderr, flush=True)
            failed.append(run["name"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
