"""Which workspace cuDNN takes for a convolution: its own answer where the library is at hand, else an estimate."""

from memsize.semantics.cudnn.convolution import Convolution
from memsize.semantics.cudnn.library import Library, installed
from memsize.semantics.cudnn.plans import Plans

__all__ = ["Convolution", "Library", "Plans", "installed"]
