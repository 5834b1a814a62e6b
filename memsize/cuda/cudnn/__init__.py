"""The workspace that cuDNN takes for a convolution: its own answer where the library is installed, else an estimate."""

from memsize.cuda.cudnn.convolution import Convolution
from memsize.cuda.cudnn.library import Library, installed
from memsize.cuda.cudnn.plans import Plans

__all__ = ["Convolution", "Library", "Plans", "installed"]
