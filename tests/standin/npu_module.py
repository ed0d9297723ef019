"""The `torch.npu` module of the stand-in, with the functions of torch_npu's that people use."""

import contextlib
import types

import torch

PRIVATE_USE_1 = 20  # the number of the device type in torch.Stream's arguments


def module(C: types.ModuleType) -> types.ModuleType:
    """Build it on the compiled extension `C`."""
    npu = types.ModuleType("torch.npu")
    npu.__file__ = __file__
    accelerator = torch.accelerator

    def index(device=None) -> int:
        if device is None:
            return C.current_device()
        if isinstance(device, int):
            return device
        named = torch.device(device).index
        return C.current_device() if named is None else named

    def generator(device=None) -> torch.Generator:
        return C.default_generator(index(device))

    def manual_seed_all(seed: int) -> None:
        for i in range(C.device_count()):
            C.default_generator(i).manual_seed(seed)

    @contextlib.contextmanager
    def device(wanted):
        old = C.current_device()
        if wanted is not None and index(wanted) >= 0:
            C.set_device(index(wanted))
        try:
            yield
        finally:
            C.set_device(old)

    def default_stream(device=None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=index(device), device_type=PRIVATE_USE_1)

    names = {
        "is_available": lambda: C.device_count() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": C.device_count,
        "current_device": C.current_device,
        "set_device": lambda device: C.set_device(index(device)),
        "device": device,
        "_device": device,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: "stand-in npu, computing on the CPU",
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "manual_seed": lambda seed: generator().manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: generator().initial_seed(),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(index(device)),
        "current_stream": lambda device=None: accelerator.current_stream(index(device)),
        "default_stream": default_stream,
        "set_stream": accelerator.set_stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "Stream": lambda device=None, priority=0, **_: torch.Stream(f"npu:{index(device)}"),
        "Event": lambda enable_timing=False, **_: torch.Event("npu", enable_timing=enable_timing),
    }
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "memory_stats",
        "empty_cache",
    ):
        names[name] = getattr(accelerator, name)
    vars(npu).update(names)
    return npu
