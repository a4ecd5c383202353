"""Lets vLLM on a CPU use LMCache's in-process connector, for tests.

LMCache 0.5.6 copies KV between an engine and its cache with a class for each accelerator, and has none for a
CPU: it logs "No supported cpu connector found" and recomputes everything. With this folder on PYTHONPATH of
the engine, `CreateGPUConnector` returns the class below there. Nothing else of LMCache changes, so keys,
lookups and the remote connector are LMCache's own.

Python imports a module of this name at its start, in every process of the engine; it does nothing until
LMCache's module is imported.
"""

import importlib.abc
import importlib.machinery
import sys

TARGET = "lmcache.v1.gpu_connector"


class PatchedLoader(importlib.abc.Loader):
    """Loads a module as `loader` does, then adds the CPU class to it."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        add_cpu_connector(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds `TARGET` alone."""

    def find_spec(self, fullname, path, target=None):
        if fullname != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PatchedLoader(spec.loader)
        return spec


def add_cpu_connector(module):
    import torch

    class CpuConnector(module.GPUConnectorInterface):
        """Copies whole blocks.

        A layer's cache in vLLM 0.32 on a CPU is one tensor [blocks, heads, tokens of a block, 2 * head size].
        A block is copied as it lies there, keys and values together, into the layer's part of the memory
        object, which has room for exactly as many numbers. Only the same engine reads it again.
        """

        def __init__(self, metadata):
            self._metadata = metadata
            self.kvcaches = None

        def get_shape(self, num_tokens):
            layers, _, _, heads, head_size = self._metadata.kv_shape
            return torch.Size([2, layers, num_tokens, heads * head_size])

        def from_gpu(self, memory_obj, start, end, **kwargs):
            for blocks, part in self._parts(memory_obj, start, end, kwargs):
                cache, numbers = blocks
                part.copy_(cache[numbers].reshape(-1))

        def to_gpu(self, memory_obj, start, end, **kwargs):
            for blocks, part in self._parts(memory_obj, start, end, kwargs):
                cache, numbers = blocks
                cache[numbers] = part.reshape(len(numbers), *cache.shape[1:])

        def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

        def _parts(self, memory_obj, start, end, kwargs):
            """For each layer: (its cache, the numbers of the blocks), the part of the memory object."""
            if "kvcaches" in kwargs:
                self.kvcaches = kwargs["kvcaches"]
            slots = kwargs["slot_mapping"][start:end].to(torch.long)
            layers = memory_obj.tensor.reshape(len(self.kvcaches), -1)
            for cache, part in zip(self.kvcaches, layers, strict=True):
                block_tokens = cache.shape[2]
                numbers = slots[::block_tokens] // block_tokens
                is_whole = (end - start) % block_tokens == 0 and int(slots[0]) % block_tokens == 0
                if not is_whole or part.numel() != cache[0].numel() * len(numbers):
                    raise ValueError(f"tokens {start} to {end} are not whole blocks of {tuple(cache.shape)}")
                yield (cache, numbers), part

    create = module.CreateGPUConnector

    def create_with_cpu(config, metadata, engine, layout_hints=None):
        if module.torch_device_type == "cpu" and engine == module.EngineType.VLLM:
            return CpuConnector(metadata)
        return create(config, metadata, engine, layout_hints)

    module.CreateGPUConnector = create_with_cpu


sys.meta_path.insert(0, Finder())
