"""Lets vLLM on a CPU serve models with state-space layers, for tests.

vLLM's kernels of Mamba layers need Triton. With this folder on PYTHONPATH they write zeros: scheduler, KV
cache manager, events and HTTP stay real, only the answers are noise.

Python imports a module of this name at its start, in every process of the engine.
"""

import importlib.abc
import importlib.machinery
import sys

LAYERS = "vllm.model_executor.layers.mamba."
KERNELS = {
    LAYERS + "mamba_mixer": ("MambaMixer", "forward_impl"),
    LAYERS + "mamba_mixer2": ("MambaMixer2", "conv_ssm_forward"),
}


def write_zeros(self, *args, **kwargs):
    """In place of a kernel: its second argument, by place or by name, is `output`."""
    output = kwargs["output"] if "output" in kwargs else args[1]
    output.zero_()


def replace(module, layer, kernel):
    setattr(getattr(module, layer), kernel, write_zeros)


class PatchedLoader(importlib.abc.Loader):
    def __init__(self, loader, kernel):
        self._loader = loader
        self._kernel = kernel

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        replace(module, *self._kernel)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in KERNELS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PatchedLoader(spec.loader, KERNELS[fullname])
        return spec


sys.meta_path.insert(0, Finder())
for name in KERNELS.keys() & sys.modules.keys():  # in a fork of a process that has imported them
    replace(sys.modules[name], *KERNELS[name])
