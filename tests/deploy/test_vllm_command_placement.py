from __future__ import annotations

import pytest

from kvroute.deploy.vllm_command import assign_cores, assign_gpus
from kvroute.errors import ConfigError


def test_each_worker_gets_its_own_adjacent_gpus() -> None:
    gpus = tuple("01234")

    assert assign_gpus(gpus, workers=2, tensor_parallel_size=2) == (("0", "1"), ("2", "3"))
    assert assign_gpus(gpus, workers=None, tensor_parallel_size=1) == tuple((gpu,) for gpu in gpus)
    assert assign_gpus(gpus, workers=None, tensor_parallel_size=2) == (("0", "1"), ("2", "3"))


@pytest.mark.parametrize(("workers", "size", "path"), [(3, 2, "workers"), (None, 8, "tensor-parallel-size")])
def test_the_error_for_too_few_gpus_shows_the_arithmetic(workers: int | None, size: int, path: str) -> None:
    with pytest.raises(ConfigError, match="4 are visible") as error:
        assign_gpus(tuple("0123"), workers=workers, tensor_parallel_size=size)

    assert error.value.path == path


def test_cores_are_shared_out_equally_and_never_twice() -> None:
    assert assign_cores((0, 1), workers=2) == ((0,), (1,))
    assert assign_cores((0, 1, 2, 3, 4), workers=2) == ((0, 1), (2, 3))


def test_with_too_few_cores_workers_share_them() -> None:
    assert assign_cores((4, 6), workers=3) == ((4,), (6,), (4,))
