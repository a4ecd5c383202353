"""Lets PyPI's torchvision load beside a torch for CPUs, for tests of models with images.

Its compiled operators need CUDA. vLLM's image processors for llava and qwen2_vl use none of them, but
torchvision describes `nms` and `qnms` at its import, so they must be declared. With this folder on PYTHONPATH
they are.

Python imports a module of this name at its start, in every process of the engine.
"""

import importlib.abc
import importlib.machinery
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclaringLoader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        import torch

        operators = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            operators.define(schema)
        module.declared_operators = operators  # they exist as long as this object
        self._loader.exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = DeclaringLoader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
