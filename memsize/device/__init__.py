"""The memory that a GPU reports for a run: the caching allocator's blocks and segments, library workspaces, and the
CUDA context.

    requested ≤ allocated (blocks) ≤ reserved (segments) ≤ device (reserved + context)

All of it is arithmetic on events: neither torch nor a GPU is needed, except to ask about this machine's own GPU.
"""
