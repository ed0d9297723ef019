"""For every test and notebook: a machine with fewer devices than ranks gives the same outputs."""

import os

# sb.run warns in the cell that its ranks run on the cpu; nbval would compare that.
_IGNORED = "ignore:More ranks than devices"
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _IGNORED]))
