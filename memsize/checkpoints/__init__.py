"""Checkpoint files: the use of each byte, read from headers alone, without running anything that a file contains.

safetensors, GGUF, PyTorch's zip and legacy formats, and sets of these in several files. Nothing here imports torch.
"""

from memsize.checkpoints.contents import Contents
from memsize.checkpoints.reader import read

__all__ = ["Contents", "read"]
