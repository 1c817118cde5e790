"""Time of a matrix product: a roofline over whole tiles, dealt out to the cores in waves."""

from paged_jax.simulation.hardware import GemmTile, Hardware
from paged_jax.simulation.roofline import overlapped


def gemm_seconds(
    hardware: Hardware, dtype: str, element_bytes: int, rows: int, inner: int, columns: int, count: int = 1
) -> float:
    """Seconds of `count` products [rows, inner] x [inner, columns] with weights of their own, in one launch.

    Reads weights and activations once and writes the result; computes whole tiles, as many waves of them as the cores
    need, with the tile that is quickest for the shape.
    """
    if rows < 1 or count < 1:
        return 0.0
    compute = min(_padded(tile, rows, columns, count, hardware.num_cores) for tile in hardware.gemm_tiles)
    compute *= 2.0 * inner / hardware.flops(dtype)
    moved = element_bytes * count * (inner * columns + rows * inner + rows * columns)
    memory = moved / (hardware.memory_bandwidth * hardware.gemm_bandwidth_efficiency)
    return overlapped(compute, memory, hardware.overlap) + hardware.kernel_s


def _padded(tile: GemmTile, rows: int, columns: int, count: int, num_cores: int) -> float:
    """Elements of the result that the cores could compute at their peak while they compute these."""
    tiles = count * -(-rows // tile.rows) * -(-columns // tile.columns)
    waves = -(-tiles // num_cores)
    return waves * num_cores * tile.rows * tile.columns / tile.efficiency
