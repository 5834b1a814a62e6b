"""What a GPU shows of a run: the caching allocator's blocks and segments, library workspaces, and the CUDA context.

    requested ≤ allocated (blocks) ≤ reserved (segments) ≤ device (reserved + context)

Everything here is arithmetic on events and needs no torch and no GPU.
"""
