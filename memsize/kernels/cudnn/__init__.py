"""The workspace that cuDNN takes for a convolution: its own answer where the library is installed, else an estimate."""

from memsize.kernels.cudnn.conv_problem import Convolution
from memsize.kernels.cudnn.library import Library, installed
from memsize.kernels.cudnn.workspaces import Plans

__all__ = ["Convolution", "Library", "Plans", "installed"]
