"""What a kernel takes when it computes and reads memory at once."""


def overlapped(compute_s: float, memory_s: float, overlap: float) -> float:
    """(compute^p + memory^p)^(1/p) with p = `overlap`: their sum for 1, towards the longer one for large p."""
    longer = compute_s if compute_s > memory_s else memory_s
    if longer <= 0.0:
        return 0.0
    shorter = compute_s + memory_s - longer
    # of ratios: powers of microseconds would vanish
    return longer * (1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap)
