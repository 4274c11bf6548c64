"""tensorboardX, without PyTorch.

Where PyTorch is installed tensorboardX imports it, to know its tensors when it sees one,
which took 1.2 to 2.5 s of every start. No tensor comes from here.
"""

import sys

_absent = "torch" not in sys.modules
if _absent:
    sys.modules["torch"] = None  # To import it now fails as if it were not installed.
try:
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2, summary_pb2
finally:
    if _absent:
        del sys.modules["torch"]

__all__ = ["event_file_writer", "event_pb2", "summary", "summary_pb2"]
