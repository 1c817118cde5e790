"""How many blocks a request holds."""

from paged_jax.engine.request import Request


def num_held_blocks(request: Request) -> int:
    """Blocks in all its tables, shared ones included, less those that fell out of a window (id 0)."""
    return sum(len(table.block_ids) - table.block_ids.count(0) for table in request.block_tables)
