"""For every rule: code that must be flagged, and near-identical code that must not be.

Each case is one snippet; ``import torch`` stands above every one. A flagged line ends in ``  # !``.
"""

FLAGGED: dict[str, list[str]] = {
    "cuda-method": [
        "x = torch.ones(3).cuda()  # !",
        "def f(model, rank):\n    return model.cuda(rank)  # !",
        "class M(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda(non_blocking=True)  # !",
    ],
    "cuda-device": [
        "import metrics\nm = metrics.calculate('a', cuda=True)  # !",
        "import pytorch_lightning as pl\nt = pl.Trainer(devices=2, accelerator='gpu')  # !",
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n    device: str = field(default='cuda')  # !",
        "import click\n@click.option('--device', default='cuda')  # !\ndef main(device):\n    pass",
        "from absl import flags\nflags.DEFINE_string('device', 'cuda', 'where')  # !",
        "x = torch.ones(3, device='cuda')  # !",
        "d = torch.device('cuda:0')  # !",
        "dev = 'cuda:%d' % 3  # !\nx = torch.ones(2).to(dev)",
        "def f(r):\n    dev = f'cuda:{r}'  # !\n    return torch.ones(2, device=dev)",
        "def f(r):\n    where = 'cuda:' + str(r)  # !\n    return torch.ones(2).to(where)",
        "def f(r):\n    where = 'cuda:{}'.format(r)  # !\n    return torch.ones(2).to(where)",
        "kw = {'device': 'cuda'}  # !\nx = torch.ones(2, **kw)",
        "kw = dict(device='cuda')  # !",
        "def f(x, device='cuda'):  # !\n    return x.to(device)",
        "class C:\n    device: str = 'cuda'  # !",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--device', default='cuda')  # !",
        "s = torch.load('f', map_location='cuda')  # !",
        "torch.set_default_device('cuda')  # !",
        "import os\nd = os.environ.get('DEVICE', 'cuda')  # !",
        "def pick(x, place):\n    return x.to(place)\ndef g(x):\n    here = 'cuda'  # !\n    return x.to(here)",
    ],
    "cuda-assert": [
        "assert torch.cuda.is_available(), 'need a GPU'  # !",
        "if not torch.cuda.is_available():  # !\n    raise RuntimeError('no GPU')",
        "import sys\nif not torch.cuda.is_available():  # !\n    sys.exit(1)",
        "def f(x):\n    assert x.is_cuda  # !",
    ],
    "cuda-or-cpu": [
        "d = torch.device('cuda' if torch.cuda.is_available() else 'cpu')  # !",
        "use = torch.cuda.is_available()  # !",
        "from torch import cuda as c\nif c.is_available():  # !\n    pass",
        "d = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'  # !",
        "def f():\n    if torch.cuda.is_available():  # !\n        return 1\n    if torch.xpu.is_available():\n        return 2",
    ],
    "cuda-branch": [
        "def f(x):\n    return x.is_cuda and (  # !\n        torch.cuda.current_device()\n    )",
        "def f(x):\n    if x.type() == 'torch.cuda.HalfTensor':  # !\n        pass",
        "def f(device):\n    if device.type == 'cuda':  # !\n        pass",
        "def f(device):\n    if 'cuda' in str(device):  # !\n        pass",
        "def f(device):\n    if str(device).startswith('cuda'):  # !\n        pass",
        "def f(x):\n    return 1 if x.is_cuda else 2  # !",
        "def f(backend):\n    if backend == 'nccl':  # !\n        pass",
        "def f(x):\n    if x.device.type in ('cuda', 'xpu'):  # !\n        pass",
        "def f(device):\n    if device.type == 'cuda':  # !\n        return 1\n    elif device.type == 'xpu':\n        return 2",
    ],
    "not-cpu-is-cuda": [
        "def f(self, device):\n    return self.rng_cpu if device.type == 'cpu' else self.rng_cuda  # !",
        "def f(device, x):\n    if device == 'cpu':  # !\n        return x\n    else:\n        return x.cuda()",
    ],
    "device-count": [
        "n = torch.cuda.device_count()  # !",
        "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=torch.cuda.device_count())  # !",
        "def f(rank):\n    return rank % torch.cuda.device_count()  # !",
    ],
    "bare-int-device": [
        "import torch.distributed as dist\nrank = dist.get_rank()\nx = torch.ones(2).to(rank)  # !",
        "def f(x, local_rank):\n    return x.to(local_rank)  # !",
        "import os\nr = int(os.environ['LOCAL_RANK'])\nx = torch.ones(2, device=r)  # !",
        "import torch.distributed as dist\nd = dist.get_rank() % 8\nm = torch.nn.Linear(2, 2).to(d)  # !",
    ],
    "cuda-tensor-type": [
        "x = torch.cuda.FloatTensor(3)  # !",
        "x = torch.ones(3).type('torch.cuda.HalfTensor')  # !",
        "torch.set_default_tensor_type('torch.cuda.FloatTensor')  # !",
        "def f(x):\n    return x.type(torch.cuda.LongTensor)  # !",
    ],
    "cuda-call": [
        "def f(x):\n    return not x.is_cuda and torch.cuda.current_device()  # !",
        "def f(x):\n    return x.is_cuda or (\n        torch.cuda.current_device()  # !\n    )",
        "torch.cuda.synchronize()  # !",
        "torch.cuda.set_device(0)  # !",
        "from torch import cuda as c\nc.get_device_name(0)  # !",
        "getattr(torch, 'cuda').synchronize()  # !",
        "sync = torch.cuda.synchronize  # !",
    ],
    "cuda-silent": [
        "torch.cuda.manual_seed_all(0)  # !",
        "torch.cuda.empty_cache()  # !",
        "import torch.cuda as tc\npeak = tc.max_memory_allocated()  # !",
    ],
    "cuda-graph": [
        "g = torch.cuda.CUDAGraph()  # !",
        "def f(g):\n    with torch.cuda.graph(g):  # !\n        pass",
    ],
    "cuda-stream": [
        "s = torch.cuda.Stream()  # !",
        "e = torch.cuda.Event(enable_timing=True)  # !",
        "torch.cuda.current_stream().synchronize()  # !",
    ],
    "cuda-generator": [
        "g = torch.Generator(device='cuda')  # !",
        "g = torch.Generator('cuda').manual_seed(0)  # !",
    ],
    "nvtx": [
        "torch.cuda.nvtx.range_push('step')  # !",
        "import torch.cuda.nvtx as nvtx\nnvtx.range_pop()  # !",
    ],
    "cuda-profiler": [
        "from torch.profiler import ProfilerActivity\na = [ProfilerActivity.CPU, ProfilerActivity.CUDA]  # !",
        "def f(prof):\n    print(prof.key_averages().table(sort_by='cuda_time_total'))  # !",
    ],
    "cuda-autocast": [
        "with torch.cuda.amp.autocast():  # !\n    pass",
        "with torch.autocast('cuda', dtype=torch.bfloat16):  # !\n    pass",
        "import torch.cuda.amp as amp\nwith amp.autocast(enabled=True):  # !\n    pass",
        "from torch.cuda.amp import autocast\n@autocast()  # !\ndef f(x):\n    return x",
        "with torch.amp.autocast(device_type='cuda'):  # !\n    pass",
    ],
    "cuda-grad-scaler": [
        "s = torch.cuda.amp.GradScaler()  # !",
        "s = torch.amp.GradScaler('cuda')  # !",
        "from torch.cuda.amp import GradScaler\ns = GradScaler()  # !",
    ],
    "float64": [
        "def f(n, device):\n    return torch.ones(n).to(device=device, dtype=torch.float64)  # !",
        "def table():\n    return torch.linspace(0, 1, 5, dtype=torch.float64).numpy()\ndef f(device):\n    return torch.tensor(table(), device=device).float()  # !",
        "_wide = torch.float64\ndef f(x):\n    x = torch.as_tensor(x).flatten()\n    return x.to(_wide)  # !",
        "def f(d=None):\n    d = d if d is not None else torch.device('cpu')\n    return torch.zeros(3, dtype=torch.float64, device=d)  # !",
        "def f(x):\n    return torch.arange(4, dtype=torch.float64, device=x.device)  # !",
        "class M(torch.nn.Module):\n    def forward(self, x):\n        return x.double()  # !",
        "def f(x):\n    return x.to(torch.float64)  # !",
        "torch.set_default_dtype(torch.float64)  # !",
    ],
    "float64-move": [
        "x = torch.linspace(0, 1, 5, dtype=torch.float64)\ny = x.cuda()  # !",
        "import numpy as np\ndef f(d):\n    return torch.from_numpy(np.linspace(0, 1, 5)).to(d)  # !",
        "def f(table, t):\n    return torch.from_numpy(table).to(device=t.device)[t].float()  # !",
        "def f(x):\n    t = torch.arange(5, dtype=torch.float64)\n    return t.to(x.device)  # !",
        "class M(torch.nn.Module):\n    def __init__(self):\n        t = torch.ones(2, dtype=torch.double)\n"
        "        self.register_buffer('t', t)  # !",
    ],
    "complex": [
        "def f(x):\n    return torch.stft(x, 512, return_complex=True)  # !",
        "def f(x):\n    return torch.istft(x, 512)  # !",
        "def f(x, a):\n    return torch.polar(x, a)  # !",
        "def f(x):\n    return torch.view_as_complex(x.reshape(2, 3, 2))  # !",
        "def f(x):\n    return torch.fft.fftn(x)  # !",
    ],
    "float8": ["def f(x):\n    return x.to(torch.float8_e4m3fn)  # !"],
    "bf16-conv3d": [
        "c = torch.nn.Conv3d(3, 4, 3)  # !\nc = c.to(torch.bfloat16)",
    ],
    "tf32": [
        "torch.backends.cuda.matmul.allow_tf32 = True  # !",
        "torch.backends.cudnn.benchmark = True  # !",
    ],
    "nccl": [
        "import torchft\ngroup = torchft.ProcessGroupNCCL()  # !",
        "import torch.distributed as dist\ndist.init_process_group('nccl')  # !",
        "import torch.distributed as dist\ndist.init_process_group(backend='nccl', world_size=2)  # !",
        "import torch.distributed as dist\nname = 'nccl'  # !\ndist.init_process_group(name)",
        "from torch.distributed import init_process_group as start\nstart('cpu:gloo,cuda:nccl')  # !",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--dist-backend', default='nccl')  # !",
    ],
    "nccl-available": ["import torch.distributed as dist\nok = dist.is_nccl_available()  # !"],
    "int-device-id": [
        "import torch.distributed as dist\ndef f(local_rank):\n"
        "    dist.init_process_group('hccl', device_id=local_rank)  # !",
    ],
    "reduce-op": [
        "import torch.distributed as dist\ndef f(x):\n    dist.all_reduce(x, op=dist.ReduceOp.BOR)  # !",
    ],
    "fork": [
        "import torch.multiprocessing as mp\nmp.set_start_method('fork')  # !",
        "import multiprocessing\nc = multiprocessing.get_context('fork')  # !",
    ],
    "cuda-library": [
        "import bitsandbytes as bnb  # !\ndef f(small, params):\n    cls = bnb.optim.AdamW8bit if small else torch.optim.AdamW\n    return cls(params)",
        "import bitsandbytes as bnb  # !\ndef f(params):\n    return bnb.optim.AdamW8bit(params)  # !",
        "def f(pipe):\n    pipe.enable_xformers_memory_efficient_attention()  # !",
        "from flash_attn import flash_attn_func  # !",
        "import xformers.ops as xops  # !",
        "from apex.optimizers import FusedAdam  # !",
        "import importlib\nf = importlib.import_module('flash_attn')  # !",
    ],
    "optional-cuda-library": [
        "def f(pipe, is_xformers_available):\n    if is_xformers_available():\n        pipe.enable_xformers_memory_efficient_attention()  # !",
        "try:\n    import flash_attn  # !\nexcept ImportError:\n    flash_attn = None",
    ],
    "custom-op": [
        "def f(x):\n    return torch.ops.mylib.fused_norm(x)  # !",
        "torch.ops.load_library('kernels.so')  # !",
    ],
    "cuda-extension": [
        "from torch.utils.cpp_extension import CUDAExtension\ne = CUDAExtension('k', ['k.cu'])  # !",
        "import torch.utils.cpp_extension\ndef f(files):\n    torch.utils.cpp_extension.load('k', files)  # !",
        "from torch.utils.cpp_extension import load\nk = load('k', ['k.cpp', 'k.cu'])  # !",
    ],
    "triton": ["import triton  # !", "import triton.language as tl  # !"],
    "compile": [
        "def f(model):\n    model.compile(fullgraph=True)  # !",
        "def f(m):\n    return torch.compile(m)  # !",
        "@torch.compile  # !\ndef f(x):\n    return x",
        "def f(m):\n    return torch.compile(m, backend='inductor')  # !",
    ],
    "sdpa-backend": [
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # !\n    pass",
        "with torch.backends.cuda.sdp_kernel(enable_flash=True):  # !\n    pass",
    ],
    "cuda-env": [
        "class Env:\n    NCCL_DEBUG: str = 'INFO'  # !",
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'  # !",
        "import os\nos.environ.setdefault('NCCL_DEBUG', 'INFO')  # !",
        "import os\nos.system('CUDA_VISIBLE_DEVICES=0 python train.py')  # !",
        "import os\nd = os.getenv('CUDA_VISIBLE_DEVICES')  # !",
    ],
    "nvidia-tool": [
        "import subprocess\nsubprocess.run(['nvidia-smi'])  # !",
        "import os\nos.system('nvidia-smi -L')  # !",
    ],
}

CLEAN: dict[str, list[str]] = {
    "cuda-method": [
        "x = torch.ones(3).cpu()",
        "class T:\n    def cuda(self):\n        return self\nt = T()\nt.cuda()",
        "# x.cuda()\ns = 'call x.cuda() first'",
    ],
    "cuda-device": [
        "import metrics\nm = metrics.calculate('a', cuda=False)",
        "import metrics\ndef f(use):\n    return metrics.calculate('a', cuda=use)",
        "import pytorch_lightning as pl\nt = pl.Trainer(devices=2, accelerator='auto')",
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n    kernel: str = field(default='cuda')",
        "import click\n@click.option('--kernel', default='cuda')\ndef main(kernel):\n    pass",
        "from absl import flags\nflags.DEFINE_string('kernel', 'cuda', 'which')",
        "def run(impl):\n    pass\nrun(impl='cuda')",
        "impl = 'cuda'",
        "print('cuda')",
        "def f(device):\n    return torch.ones(3, device=device)",
        "d = torch.device('cpu')",
        "def f(is_npu, x):\n    if is_npu:\n        return x.to('npu')\n    else:\n        return x.to('cuda')",
        "cuda_idx = 3",
        "NAMES = {'cuda': 'NVIDIA', 'npu': 'Ascend'}",
    ],
    "cuda-assert": [
        "assert torch.accelerator.is_available()",
        "if not (torch.cuda.is_available() or torch.npu.is_available()):\n    raise RuntimeError('no device')",
    ],
    "cuda-or-cpu": [
        "d = 'npu' if hasattr(torch, 'npu') else 'cuda' if torch.cuda.is_available() else 'cpu'",
        "d = 'cuda' if torch.cuda.is_available() else 'npu' if hasattr(torch, 'npu') else 'cpu'",
        "def f():\n    if torch.cuda.is_available():\n        return torch.device('cuda')\n"
        "    if torch.npu.is_available():\n        return torch.device('npu')",
        "use = torch.accelerator.is_available()",
    ],
    "cuda-branch": [
        "def f(x):\n    if x.type() == 'torch.HalfTensor':\n        pass",
        "def f(device):\n    if device.type == 'npu':\n        return 1\n    if device.type == 'cuda':\n        return 2",
        "def f(device):\n    if device.type in ('cuda', 'npu'):\n        return 1",
        "def f(device):\n    if device.type == 'cuda':\n        return 1\n    elif device.type == 'npu':\n        return 2",
        "def f(device):\n    if device == 'cuda':\n        return torch.cuda.current_device()\n"
        "    elif device == torch._C._get_privateuse1_backend_name():\n        return 1",
        "def f(kind):\n    match kind:\n        case 'cuda':\n            return torch.ones(2).cuda()\n"
        "        case 'npu':\n            return torch.ones(2)",
        "def f(impl):\n    if impl == 'cuda':\n        return 1",
        "def f(device):\n    if device.type != 'cpu':\n        return 1",
    ],
    "not-cpu-is-cuda": [
        "def f(self, device):\n    return self.rng_cpu if device.type == 'cpu' else self.rng_device",
        "def f(device, x):\n    if device == 'cpu':\n        return x\n    else:\n        return x.to(device)",
    ],
    "device-count": ["n = torch.accelerator.device_count()"],
    "bare-int-device": [
        "def f(x, device):\n    return x.to(device)",
        "def f(x, other):\n    return x.to(other.dtype)",
        "class Q(list):\n    def to(self, n):\n        return n",
    ],
    "cuda-tensor-type": ["x = torch.FloatTensor([1.0])", "x = torch.ones(3).type(torch.float16)"],
    "cuda-call": [
        "torch.accelerator.synchronize()",
        "torch.npu.synchronize()",
        "def f(npu_available):\n    if npu_available:\n        return 1\n    return torch.cuda.get_device_name()",
        "class C:\n    def cuda(self):\n        pass",
    ],
    "cuda-silent": ["torch.manual_seed(0)", "torch.npu.manual_seed_all(0)"],
    "cuda-graph": ["g = torch.fx.Graph()"],
    "cuda-stream": ["s = torch.Stream()", "e = torch.Event()"],
    "cuda-generator": ["g = torch.Generator(device='cpu')", "g = torch.Generator().manual_seed(0)"],
    "nvtx": ["with torch.profiler.record_function('step'):\n    pass"],
    "cuda-profiler": ["a = [torch.profiler.ProfilerActivity.CPU]"],
    "cuda-autocast": [
        "def f(device):\n    with torch.autocast(device.type, dtype=torch.bfloat16):\n        pass",
        "with torch.autocast('cpu'):\n    pass",
    ],
    "cuda-grad-scaler": ["def f(device):\n    return torch.amp.GradScaler(device.type)"],
    "float64": [
        "def f(n):\n    return torch.ones(n).to(dtype=torch.float64)",
        "def table():\n    return torch.linspace(0, 1, 5).numpy()\ndef f(device):\n    return torch.tensor(table(), device=device).float()",
        "x = torch.as_tensor([1.0, 2.0]).to(torch.float64)",
        "def f(wide):\n    d = torch.device('cpu') if wide else torch.device('cpu')\n    return torch.zeros(3, dtype=torch.float64, device=d)",
        "t = torch.arange(5, dtype=torch.float64)",
        "def f(x):\n    return x.cpu().double()",
        "SIZES = {torch.float64: 8, torch.float32: 4}",
        "def f(x):\n    return x.dtype == torch.float64",
        "def f(x, is_npu):\n    kind = torch.float32 if is_npu else torch.float64\n    return x.to(kind)",
        "import numpy as np\na = np.zeros(3, dtype=np.float64)",
    ],
    "float64-move": [
        "import numpy as np\ndef f(d):\n    return torch.from_numpy(np.linspace(0, 1, 5)).float().to(d)",
        "import numpy as np\ndef f(d):\n    a = np.linspace(0, 1, 5).astype(np.float32)\n    return torch.from_numpy(a).to(d)",
        "def f(x):\n    t = torch.arange(5, dtype=torch.float64)\n    return t.to(x.device, torch.float32)",
        "t = torch.arange(5, dtype=torch.float64).sum().item()",
    ],
    "complex": [
        "def f(x):\n    return torch.stft(x, 512, return_complex=False)",
        "def f(x):\n    return torch.complex64 == x.dtype",
        "z = complex(1, 2)",
    ],
    "float8": ["NAMES = {'e4m3': 1}", "def f(x):\n    return x.to(torch.float16)"],
    "bf16-conv3d": [
        "c = torch.nn.Conv3d(3, 4, 3)",
        "c = torch.nn.Conv2d(3, 4, 3).to(torch.bfloat16)",
    ],
    "tf32": ["torch.backends.mkldnn.enabled = True"],
    "nccl": [
        "import torchft\ngroup = torchft.ProcessGroupGloo()",
        "import torch.distributed as dist\nname = 'nccl'\nname = 'gloo'\ndist.init_process_group(name)",
        "import torch.distributed as dist\ndist.init_process_group()",
        "print('uses nccl')",
    ],
    "nccl-available": ["import torch.distributed as dist\nok = dist.is_available()"],
    "int-device-id": [
        "import torch.distributed as dist\ndef f(device):\n    dist.init_process_group(device_id=device)",
    ],
    "reduce-op": [
        "import torch.distributed as dist\ndef f(x):\n    dist.all_reduce(x, op=dist.ReduceOp.MAX)"
    ],
    "fork": ["import torch.multiprocessing as mp\nmp.set_start_method('spawn')", "fork = 'fork'"],
    "cuda-library": [
        "def f(pipe):\n    pipe.enable_attention_slicing()",
        "import numpy",
        "flash_attn = None",
        "from mylib import flash_attn_func",
    ],
    "optional-cuda-library": ["try:\n    import json5\nexcept ImportError:\n    json5 = None"],
    "custom-op": [
        "keep = {torch.ops.c10d_functional.all_reduce.default}",
        "def f(x):\n    return torch.ops.aten.add(x, x)",
        "def f(x):\n    return torch.ops.npu.npu_rms_norm(x)",
    ],
    "cuda-extension": [
        "from torch.utils.cpp_extension import CppExtension\ne = CppExtension('k', ['k.cpp'])",
        "from torch.utils.cpp_extension import load\nk = load('k', ['k.cpp'])",
    ],
    "triton": ["triton = None"],
    "compile": [
        "def f(model):\n    model.compile(optimizer='adam')",
        "def f(model):\n    model.compile(backend='eager')",
        "import re\np = re.compile('a')",
        "def f(m):\n    return torch.compile(m, backend='eager')",
    ],
    "sdpa-backend": [
        "from torch.nn.attention import SDPBackend, sdpa_kernel\nwith sdpa_kernel(SDPBackend.MATH):\n    pass",
    ],
    "cuda-env": [
        "class Env:\n    HCCL_CONNECT_TIMEOUT: str = '600'",
        "CUDA_HOME = None",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'",
        "s = 'set CUDA_VISIBLE_DEVICES first'",
    ],
    "nvidia-tool": [
        "import subprocess\nsubprocess.run(['npu-smi', 'info'])",
        "s = 'see nvidia-smi'",
    ],
}
