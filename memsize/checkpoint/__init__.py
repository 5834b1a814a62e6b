"""Checkpoint files: what each byte of one is for, from its headers alone, and without running anything that is in it.

safetensors, GGUF, PyTorch's zip and legacy formats, and sets of these in several files. Nothing here imports torch.
"""

from memsize.checkpoint.contents import Contents
from memsize.checkpoint.reader import read

__all__ = ["Contents", "read"]
