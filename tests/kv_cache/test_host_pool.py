"""Host memory has one owner."""

import pytest

from paged_jax.kv_cache.swap import HostPool


def test_host_pool() -> None:
    pool = HostPool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.num_free == 1
    with pytest.raises(RuntimeError, match="2 host blocks wanted, 1 free: the caller must check first"):
        pool.allocate(2)
    assert pool.allocate(0) == []
    pool.check([0, 1])
    pool.free([0, 1])
    assert pool.allocate(3) == [0, 1, 2]
    for wrong in ([0, 1], [0, 1, 2, 2]):
        with pytest.raises(AssertionError, match="a host block is lost or has two owners"):
            pool.check(wrong)
