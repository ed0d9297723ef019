"""The one table of what the porting checker knows: what, why, what to write instead, the source.

Severity says what the reader meets on an NPU: "breaks" stops with an error, "wrong" runs and gives
another result than on CUDA (another device, no seed, a dropped branch), "slow" runs where a faster
way exists, "style" has no effect there.
"""

import dataclasses

SEVERITIES = ("breaks", "wrong", "slow", "style")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One habit of NVIDIA-only code."""

    id: str
    severity: str
    what: str
    why: str
    instead: str
    reference: str


_TABLE = [
    # ---- device and placement
    ("cuda-method", "breaks", "`.cuda()` moves to a CUDA device",
     "there is no CUDA device to move to", "`.to(device)` with one `device` chosen in one place",
     "vllm-project/vllm-ascend#516, pytorch/torchtune#1826"),
    ("cuda-device", "breaks", "a CUDA device is named",
     "torch raises for a device type that is not there",
     "`torch.accelerator.current_accelerator() or torch.device('cpu')`, asked once",
     "vllm-project/vllm-ascend#516"),
    ("cuda-assert", "breaks", "the program insists on CUDA",
     "`torch.cuda.is_available()` is False on an NPU, so it stops here",
     "ask `torch.accelerator.is_available()`", "facebookresearch/DiT, chuanyangjin/fast-DiT"),
    ("cuda-or-cpu", "wrong", "the choice is between CUDA and the rest",
     "`torch.cuda.is_available()` is False on an NPU: it silently takes the other branch",
     "`torch.accelerator.is_available()` and `torch.accelerator.current_accelerator()`",
     "huggingface/accelerate#3020"),
    ("cuda-branch", "wrong", "a branch asks whether the device is CUDA",
     "an NPU tensor's `is_cuda` is False and its `device.type` is 'npu', so the branch is lost",
     "ask for what matters (`device.type != 'cpu'`), or add the npu case",
     "huggingface/transformers#36383"),
    ("not-cpu-is-cuda", "wrong", "what is not the CPU is taken for CUDA",
     "on an NPU the else branch runs CUDA-only code", "use the device at hand, not its absence",
     "vllm-project/vllm-omni#755"),
    ("device-count", "breaks", "`torch.cuda.device_count()` decides a size",
     "it is 0 on an NPU: modulo by zero, or zero processes that end well",
     "`torch.accelerator.device_count()`, and the launcher's WORLD_SIZE for the world",
     "facebookresearch/DiT"),
    ("bare-int-device", "breaks", "an integer stands for a device",
     "it means the current accelerator in recent torch only, CUDA before and in other libraries",
     "`torch.device(type, index)`", "Ascend/pytorch#16, vllm-project/speculators#775"),
    ("cuda-tensor-type", "breaks", "a CUDA tensor type or legacy constructor",
     "these types exist for CUDA only", "`torch.empty(…, dtype=…, device=device)`",
     "Ascend/pytorch#16"),
    # ---- torch.cuda
    ("cuda-call", "breaks", "a torch.cuda function that needs a CUDA device",
     "it raises without one",
     "torch.accelerator's or torch.npu's twin, of that name but for two: "
     "`torch.accelerator.set_device_index` and `.current_device_index`",
     "pytorch/torchtune#1826"),
    ("cuda-silent", "wrong", "a torch.cuda function that does nothing without CUDA",
     "it neither fails nor acts: seeds, statistics and caches of the NPU are not touched",
     "the torch.npu function of that name (`torch.manual_seed` seeds every device)",
     "stepfun-ai/Step-Video-T2V, pytorch/torchtune#1826"),
    ("cuda-no-effect", "style", "a call or a variable of CUDA's that changes no result",
     "without CUDA it does nothing: no cache is emptied, no log is written",
     "`torch.accelerator.empty_cache()` where torch has it, or torch.npu's; "
     "HCCL_DEBUG_CONFIG for the log",
     "https://docs.pytorch.org/docs/stable/accelerator.html (read 2026-11)"),
    ("cuda-graph", "breaks", "CUDA graphs", "capture and replay need CUDA streams",
     "run eagerly, or torch.npu.NPUGraph where the version has it",
     "vllm-project/vllm-ascend#9119, #8585, #9691"),
    ("cuda-stream", "breaks", "a CUDA stream or event", "there is no CUDA runtime behind it",
     "`torch.Stream(device)` and `torch.Event(device)`", "pytorch/torchtune#1826"),
    ("cuda-generator", "breaks", "a random generator on CUDA",
     "there is no such device, and each device draws other numbers from one seed",
     "draw on a CPU generator and move the result", "pytorch/pytorch#79496"),
    ("nvtx", "breaks", "NVTX ranges", "they raise where NVTX is not installed",
     "`torch.profiler.record_function`, or `torch_npu.npu.mstx`", "torch.cuda.nvtx"),
    ("cuda-profiler", "wrong", "the profiler records CUDA activity",
     "it records no NPU kernel", "torch_npu.profiler with ProfilerActivity.NPU",
     "torch_npu.profiler"),
    # ---- precision
    ("cuda-autocast", "wrong", "autocast for CUDA",
     "it switches itself off with a warning, so everything runs in fp32",
     "`torch.autocast(device.type, dtype=…)`", "stepfun-ai/Step-Video-T2V"),
    ("autocast-off", "wrong", "autocast for CUDA is switched off",
     "an autocast for the NPU around it stays on: what was to run in fp32 runs in 16 bits",
     "`torch.autocast(device.type, enabled=False)`", "https://docs.pytorch.org/docs/stable/amp.html"),
    ("cuda-grad-scaler", "wrong", "a gradient scaler for CUDA",
     "it switches itself off with a warning, so fp16 gradients underflow",
     "`torch.amp.GradScaler(device.type)`, or bf16 and no scaler", "torch.amp"),
    ("float64", "breaks", "float64 on the device",
     "most NPU kernels have no float64", "compute it on the host and cast before moving",
     "huggingface/diffusers#10428, #10123"),
    ("float64-move", "breaks", "a float64 table moves to the device before it is cast",
     "the copy itself or the first op on it fails", "cast first: `.float().to(device)`",
     "facebookresearch/DiT"),
    ("complex", "breaks", "complex numbers on the device",
     "complex kernels are few: a complex rotary embedding fails or falls back to the CPU",
     "rotate pairs with real cos and sin tables", "vllm-project/vllm-omni#4911, #6571"),
    ("float8", "breaks", "a float8 dtype",
     "Ascend A2 and A3 have no fp8; Ascend 950 has, but not the `fnuz` formats",
     "bf16, or int8 through the NPU's own quantisation; on a 950 try the dtype first",
     "https://gitcode.com/Ascend/pytorch/pull/45030 (2026-08-21)"),
    ("bf16-conv3d", "slow", "a 3-D convolution in bf16",
     "CANN lists bf16 for it on A2 and A3 since 8.0.RC3; older CANN stops in it",
     "try it on your CANN; else fp16 or fp32, a linear layer over patches, or 2-D convolutions",
     "https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/80RC3alpha003/apiref/aolapi/"
     "context/aclnnConvolution.md (CANN 8.0.RC3, read 2026-11); Comfy-Org/ComfyUI#7784 (2025-04)"),
    ("tf32", "style", "a CUDA or cuDNN switch", "it has no effect on an NPU",
     "leave it for CUDA; torch.npu has its own (`torch.npu.matmul.allow_hf32`)",
     "facebookresearch/DiT"),
    # ---- distributed
    ("nccl", "breaks", "the NCCL backend", "an NPU speaks HCCL",
     "`dist.get_default_backend_for_device(device)` or no backend at all",
     "modelscope/ms-swift#1165"),
    ("nccl-available", "wrong", "asks whether NCCL is there",
     "it is not, so the branch without parallelism is taken", "`dist.is_available()`",
     "modelscope/ms-swift#1165"),
    ("int-device-id", "breaks", "`device_id` is no torch.device", "init_process_group refuses it",
     "`device_id=torch.device(type, index)`", "vllm-project/speculators#775"),
    ("reduce-op", "breaks", "a reduction that HCCL refuses",
     "HCCL has sum, product, min and max, and torch_npu makes AVG of a sum; nothing bitwise "
     "(NCCL has that neither, gloo does) and no PREMUL_SUM (NCCL's own)",
     "scale before or after a sum; for flags MAX, or a sum of counts",
     "torch.distributed.ReduceOp, torch_npu's ProcessGroupHCCL"),
    ("fork", "breaks", "processes are forked", "a forked child can't use an initialised NPU",
     "start method 'spawn' or 'forkserver'", "vllm-project/vllm-ascend#7256"),
    # ---- libraries and kernels
    ("cuda-library", "breaks", "a library of CUDA kernels",
     "the usual wheel holds CUDA kernels; of some (apex, transformer_engine) Ascend keeps a port",
     "torch's own op (SDPA, torch.optim), torch_npu's, or Ascend's port of it",
     "huggingface/transformers#36383, #26194; "
     "https://gitcode.com/Ascend/TransformerEngineNPU (read 2026-11)"),
    ("optional-cuda-library", "slow", "a CUDA library with a fallback",
     "the fallback runs on an NPU: it must be right, and may be slow",
     "test the fallback against the fused op; use torch_npu's fused op where there is one",
     "huggingface/transformers#26194"),
    ("custom-op", "breaks", "a compiled op of its own", "the binary holds CUDA kernels",
     "write it in torch ops, or as an Ascend C op", "stepfun-ai/Step-Video-T2V"),
    ("cuda-extension", "breaks", "builds a CUDA extension", "nvcc's output does not run on an NPU",
     "torch ops, or an Ascend C op", "zai-org/CogVideo#97"),
    ("triton", "breaks", "a Triton kernel", "stock Triton compiles for GPUs",
     "torch ops, or triton-ascend after its own test", "sgl-project/sglang#26403"),
    ("compile", "slow", "torch.compile with the default backend",
     "before torch_npu 2.7.1 nothing generates code for an NPU; since then torch_npu has an "
     "Inductor backend of its own, through Triton-Ascend, MLIR or DVM",
     "with torch_npu >= 2.7.1 try it as it is; else eager, or torchair as the backend",
     "https://gitcode.com/Ascend/pytorch/blob/v2.7.1-26.0.0/docs/zh/environment_variable_reference/"
     "TORCHINDUCTOR_NPU_BACKEND.md (torch_npu 2.7.1, read 2026-11); sgl-project/sglang#26403"),
    ("sdpa-backend", "slow", "forces one of CUDA's attention kernels",
     "those kernels are CUDA's: it is ignored or refused", "let SDPA choose",
     "sgl-project/sglang#31948"),
    ("host-linalg", "slow", "a linear-algebra function without an NPU kernel",
     "torch_npu warns and runs it on the CPU: a copy there and back, and a wait",
     "compute it once on the host, or use one that has a kernel (QR, SVD, Cholesky, inverse)",
     "torch_npu 2.13.0's registered kernels"),
    # ---- environment
    ("ray-gpus", "breaks", "asks Ray for GPUs",
     "an NPU is another resource of Ray's: the task waits for a GPU that never comes",
     "`resources={'NPU': n}`", "Ray, accelerator support"),
    ("cuda-env", "wrong", "an environment variable of CUDA or NCCL",
     "the NPU's runtime does not read it",
     "its Ascend twin, where there is one: ASCEND_RT_VISIBLE_DEVICES, ASCEND_LAUNCH_BLOCKING, "
     "PYTORCH_NPU_ALLOC_CONF, HCCL_SOCKET_IFNAME",
     "verl-project/verl#7507, agentscope-ai/Trinity-RFT#618"),
    ("nvidia-tool", "breaks", "an NVIDIA command-line tool", "it is not installed beside an NPU",
     "`npu-smi info`, msprof", "npu-smi"),
    ("load-device", "breaks", "a checkpoint is loaded without `map_location`",
     "what was saved from CUDA goes back to CUDA: torch.load raises where there is none",
     "`map_location='cpu'`, then move what is needed",
     "https://docs.pytorch.org/docs/stable/generated/torch.load.html (read 2026-11)"),
    ("data-parallel", "breaks", "nn.DataParallel", "torch_npu does not support it",
     "DistributedDataParallel, a process a device",
     "https://www.hiascend.com/doc_center/source/zh/canncommercial/700/devtools/auxiliarydevtool/"
     "atlasfmkt_16_0019.html (CANN 7.0.0, read 2026-11)"),
    ("fused-optimizer", "slow", "an optimizer with `fused`",
     "torch_npu 2.13 registers kernels for fused Adam, AdamW and SGD; an older one may refuse",
     "try it on your version; else leave it out, or torch_npu.optim's NpuFused classes",
     "torch_npu 2.13.0's registered kernels (2026-11)"),
    ("flex-attention", "breaks", "flex_attention",
     "it checks the device: CUDA, CPU, XPU, HPU and MPS are all it takes",
     "scaled_dot_product_attention with a mask, or torch_npu.npu_fusion_attention",
     "torch/nn/attention/flex_attention.py, torch 2.13 (read 2026-11)"),
    ("inductor-config", "style", "an option of Inductor",
     "torch_npu has an Inductor backend of its own, which need not know it",
     "leave it for CUDA; TORCHINDUCTOR_NPU_BACKEND chooses the NPU's",
     "https://gitcode.com/Ascend/pytorch/blob/v2.7.1-26.0.0/docs/zh/environment_variable_reference/"
     "TORCHINDUCTOR_NPU_BACKEND.md (torch_npu 2.7.1, read 2026-11)"),
    ("jit-script", "slow", "torch.jit.script",
     "its fusers are for CUDA and the CPU, and transfer_to_npu switches it off with a warning",
     "the plain function",
     "https://www.hiascend.com/document/detail/en/mindstudio/830/TITools/migrationtoolpt/"
     "atlasfmkt_16_0019.html (MindStudio 8.3.0, read 2026-11)"),
    ("channels-last", "breaks", "the channels_last memory format",
     "an NPU has formats of its own, and the migration guide says it is not supported",
     "`contiguous()`, or leave the format out",
     "https://www.hiascend.com/document/detail/en/mindstudio/830/TITools/migrationtoolpt/"
     "atlasfmkt_16_0019.html (MindStudio 8.3.0, read 2026-11)"),
    ("cuda-source", "breaks", "CUDA source", "nvcc's output does not run on an NPU",
     "torch ops, or an Ascend C op", "zai-org/CogVideo#97"),
    ("dependency", "breaks", "a package, a wheel or an image for CUDA, or for x86 alone",
     "it does not install beside an NPU, or has no kernels for one",
     "leave it out, or what stands for it there",
     "https://www.hiascend.com/document/detail/en/Pytorch/2620/index/index.html (TorchNPU 26.2, "
     "read 2026-11)"),
    ("torch-pin", "style", "a version of torch is pinned",
     "torch_npu is built for one torch: the version here needs a torch-npu of the same",
     "torch and torch-npu of one version; CPU wheels of torch",
     "the page of torch-npu 2.13.0 on PyPI (read 2026-11)"),
    # ---- the file
    ("unchecked", "breaks", "the checker failed in this statement",
     "nothing in it was checked; the rest of the file was",
     "read it by hand, and report what stands there", "shardbook/port/reader.py"),
    ("unreadable", "style", "this file could not be read as Python 3",
     "nothing in it was checked", "check it by hand, or fix its syntax", "python"),
]  # fmt: skip

RULES: dict[str, Rule] = {row[0]: Rule(*row) for row in _TABLE}

# torch.cuda functions by what they do without a CUDA device, as torch 2.13's CPU build behaves.
NO_EFFECT = {"empty_cache", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}
SILENT = {
    "manual_seed", "manual_seed_all", "seed", "seed_all", "max_memory_allocated",
    "memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
    "is_initialized", "max_memory_cached", "memory_cached", "is_bf16_supported",
    "get_rng_state_all",
}  # fmt: skip
GRAPHS = {"CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle",
          "is_current_stream_capturing", "graphs"}  # fmt: skip
STREAMS = {"Stream", "Event", "stream", "current_stream", "default_stream", "set_stream",
           "ExternalStream", "StreamContext"}  # fmt: skip
TENSOR_TYPES = {f"{kind}Tensor" for kind in
                ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long",
                 "Bool")}  # fmt: skip

# Not here: deepspeed.ops (op_builder/npu) and liger_kernel (its _ascend backend) run on an NPU.
CUDA_LIBRARIES = {
    "flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "xformers", "apex", "amp_C",
    "bitsandbytes", "transformer_engine", "pynvml", "pycuda", "cupy", "tensorrt", "torch_tensorrt",
    "cuda", "numba.cuda", "sageattention", "spas_sage_attn", "causal_conv1d", "causal_conv1d_cuda",
    "mamba_ssm", "flashinfer", "vllm_flash_attn", "deep_gemm", "deep_ep", "nvidia", "cutlass",
    "fused_layer_norm_cuda", "selective_scan_cuda", "grouped_gemm", "gptqmodel", "auto_gptq",
    "exllamav2", "natten", "torch2trt", "nvdiffrast", "tinycudann", "pytorch3d", "spconv",
    "MinkowskiEngine", "py3nvml", "GPUtil", "gpustat", "nvitop", "dali", "nvidia_smi",
    "colossalai.kernel", "flash_attention", "quack",
}  # fmt: skip

# Functions of torch.linalg and of torch whose operators torch_npu 2.13.0 has no kernel for.
HOST_LINALG = {
    "linalg.eig", "linalg.eigvals", "linalg.eigh", "linalg.eigvalsh", "linalg.solve",
    "linalg.solve_ex", "linalg.inv", "linalg.inv_ex", "linalg.lstsq", "linalg.det",
    "linalg.slogdet", "linalg.lu", "linalg.lu_factor", "linalg.matrix_exp", "linalg.ldl_factor",
    "det", "logdet", "matrix_exp",
}  # fmt: skip

ENVIRONMENT = {  # variable -> its twin on Ascend
    "CUDA_VISIBLE_DEVICES": "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING": "ASCEND_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER": "(none needed)",
    "CUDA_DEVICE_MAX_CONNECTIONS": "(none needed)",
    "CUDA_HOME": "ASCEND_HOME_PATH",
    "CUDA_PATH": "ASCEND_HOME_PATH",
    "NVIDIA_VISIBLE_DEVICES": "ASCEND_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_NPU_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE": "(none needed)",
    "CUBLAS_WORKSPACE_CONFIG": "(none needed)",
    "TORCH_CUDNN_V8_API_ENABLED": "(none needed)",
    "TORCH_CUDA_ARCH_LIST": "(none needed)",
    "NCCL_SOCKET_IFNAME": "HCCL_SOCKET_IFNAME",
    "NCCL_BUFFSIZE": "HCCL_BUFFSIZE",
    "NCCL_ALGO": "HCCL_ALGO",
    "NCCL_DEBUG": "HCCL_DEBUG_CONFIG, or ASCEND_GLOBAL_LOG_LEVEL",
}
NVIDIA_TOOLS = ("nvidia-smi", "nsys ", "ncu ", "nvprof", "nvcc")
