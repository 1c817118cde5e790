"""Seeds of requests that bring none: derived on the host, the same on every platform and in every run."""

import hashlib


def derive_seed(engine_seed: int, request_number: int) -> int:
    """The 64-bit seed of an engine's request_number-th request, unrelated to its neighbours' (a hash).

    Both arguments are whole numbers from 0 to 2^64 - 1.
    """
    message = engine_seed.to_bytes(8, "little") + request_number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as the (high, low) 32-bit words that the sampler's `key_data` holds."""
    return seed >> 32, seed & 0xFFFFFFFF
