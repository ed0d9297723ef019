"""A stand-in for the Ascend NPU: ``torch.device("npu")`` whose tensors are host memory.

Importing it gives this process the npu devices; README.md says how to switch it on everywhere.
It proves placement, dtypes and backends, not speed and not NPU numerics.
"""

import os

import torch
import torch.distributed as dist

from . import build, npu_module, refusals

_C = build.extension()

op_counts = _C.op_counts
"""{"aten::add.Tensor": calls} of this process so far."""
reset_op_counts = _C.reset_op_counts


def strict(on: bool = True) -> None:
    """Refuse float64 and complex tensors on the device."""
    _C.refuse_dtypes([torch.float64, torch.complex64, torch.complex128] if on else [])


def _hccl(store, rank, size, timeout):
    return _C.make_hccl(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


_C.set_device_count(int(os.environ.get("SHARDBOOK_STANDIN", "1")))
_C.set_ops_file(os.environ.get("SHARDBOOK_STANDIN_OPS", ""))
_C.set_where(refusals.where)
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu_module.module(_C))
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("hccl", _hccl, devices=["npu"])
refusals.install()
strict(os.environ.get("SHARDBOOK_STANDIN_STRICT", "1") != "0")
