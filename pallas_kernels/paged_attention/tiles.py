"""Default compute tiles: (query tokens, key tokens) that an implementation works on at a time.

None as the query tokens: as many as fill the matrix unit's rows, by the number of query heads for each KV head. Correct
this table by what `python -m pallas_kernels.bench` prints as the best tiles it saw.
"""

DEFAULT_TILES: dict[str, tuple[int | None, int]] = {
    # Of 32, 64, 128 and 256 keys, 64 was the fastest or near it on two x86 CPUs at contexts 128 and 512 and page sizes
    # 1, 16 and 128 (9 query heads on 3 KV heads of 64, batch 16).
    "xla": (64, 64),
    # Not measured on a device yet: 128 lanes of keys, 128 rows of queries.
    "mosaic_tpu": (None, 128),
    # Not measured on a device yet: wgmma has 64 rows, and takes keys 64 at a time.
    "mosaic_gpu": (None, 64),
    # Without wgmma: two tiles of 32 float32 keys of 256 elements fit into shared memory.
    "mosaic_gpu, float32": (None, 32),
    "triton": (None, 64),
}
