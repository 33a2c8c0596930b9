"""Threads of a program in warps of the device at hand."""
# mypy: disable-error-code="no-untyped-call"

import triton


def warps(threads: int) -> int:
    """Warps of that many threads, of 32 or 64 each; the interpreter knows no warps."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return max(1, threads // 32)
    return max(1, threads // int(target.warp_size))
