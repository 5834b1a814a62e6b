"""The imports of a first answer, for the process that calls of tools are forked from. What fails here fails in a call
too, which says why.
"""

import contextlib
import gc

gc.disable()  # a collector that scans what importing torch makes takes a tenth of the time
with contextlib.suppress(Exception):
    from memsize import report

    str(report("timm:resnet18"))
