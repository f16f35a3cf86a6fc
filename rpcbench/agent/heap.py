"""Memory that a training step frees stays with the process for its next step, which need not ask the system for it.

glibc's malloc maps large blocks and unmaps them when they are freed, and gives back what is free at the heap's end. How
large is learned: a mapped block that is freed makes its size the bound for the next ones, and twice that for the heap's
end (mallopt(3), M_MMAP_THRESHOLD). Gradients of a megabyte leave it in between, where each step pays anew for the first
touch of every page: up to a third of its time. So malloc is shown one block of 16 MB, which nobody touches. It then
keeps up to 32 MB of what was freed, for each of its arenas: threads that allocate at the same time have one each.

Who has set `MALLOC_TRIM_THRESHOLD_` or its like has decided: malloc learns nothing then, and other allocators never do.
"""

from __future__ import annotations

_BLOCK = 16 << 20
"""Bytes. malloc learns up to 32 MB, but eight threads would then keep 300 MB of what they have freed."""


def keep_what_is_freed() -> None:
    """For this process, from now on. Takes some microseconds, and no memory."""
    bytes(_BLOCK)
