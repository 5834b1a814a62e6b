"""The workspace that cuDNN takes for a convolution: its own answer where the library is installed, else an estimate."""
