"""Memory that a process keeps between steps, so that steps do not pay for getting it again."""

from __future__ import annotations

import ctypes
import functools

TRIM_THRESHOLD, MMAP_THRESHOLD, TOP_PAD = -1, -3, -2  # glibc's malloc.h
KEPT_BYTES = (1 << 31) - 1
LARGEST_BYTES = 1 << 25  # the most that glibc takes; larger tensors are mapped anew each time
PAD_BYTES = 1 << 28


@functools.cache
def keep_freed_memory() -> bool:
    """Make the C library keep what is freed, for the whole process; False where it cannot.

    Otherwise it gives large tensors back after each operation and the next one pays for fresh
    pages: up to a third of a prefill of ``tiny`` on a CPU, and most of its noise. For calibration
    and for runs alike, or their times do not compare.
    """
    try:
        option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = ((TRIM_THRESHOLD, KEPT_BYTES), (MMAP_THRESHOLD, LARGEST_BYTES), (TOP_PAD, PAD_BYTES))
    return all(option(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in wanted)
