# %% [markdown]
# # 02 · Running on Ascend
#
# After this page you can install what an Ascend NPU needs beside this book, read what `doctor` says
# when something is missing, and run what you wrote in a lab on one card, on eight, and on two hosts.
# Reading takes ten minutes. Nothing here needs an NPU to be read or run: every cell uses the device that is there.

# %%
import shardbook as sb
import torch
import torch.distributed as dist
from shardbook.doctor import Facts, examine

# %% [markdown]
# ## Install
#
# Four layers, each needed by the next:
#
# 1. **The driver and firmware** (Ascend HDK), on the host. `npu-smi info` lists the chips when it is
#    right.
# 2. **CANN**: the toolkit and the operator packages of your chip (called "ops" since CANN 8.5, before
#    that "kernels"), from hiascend.com. Then, in every shell and before Jupyter starts, source its
#    environment. Where it is depends on the release:
#
#    ```
#    source /usr/local/Ascend/cann/set_env.sh            # CANN 8.5 and newer
#    source /usr/local/Ascend/ascend-toolkit/set_env.sh  # older ones
#    ```
#
#    ([where CANN 8.5](https://www.hiascend.com/document/detail/en/canncommercial/850/softwareinst/instg/instg_0044.html)
#    and [CANN 8.0](https://www.hiascend.com/document/detail/en/canncommercial/800/softwareinst/instg/instg_0044.html)
#    put their files; for a user that is not root, both start with `~/Ascend`.)
# 3. **torch**, the same release as torch_npu, in its CPU build, with `pyyaml` and `setuptools`.
# 4. **torch_npu**: `pip install -e ".[npu]"` in this folder, or `pip install torch_npu==2.13.0`.
#    `make lab` and `make test` do it by themselves where they see an NPU (`/dev/davinci0`, or
#    `npu-smi` on the path) and say so.
#
# Not every torch_npu runs on every CANN, and not every CANN on every driver. Part of the table, which
# the torch_npu repository keeps
# ([COMPATIBILITY.md](https://gitcode.com/Ascend/pytorch/blob/master/COMPATIBILITY.md)):
#
# | torch | torch_npu | CANN |
# |---|---|---|
# | 2.12.0 | 2.12.0 | 9.1.0 |
# | 2.10.0 | 2.10.0 | 9.0.0 |
# | 2.8.0 | 2.8.0.post4, 2.8.0.post2, 2.8.0 | 9.0.0, 8.5.0, 8.3.RC1 |
# | 2.7.1 | 2.7.1.post4, 2.7.1.post2, 2.7.1 | 9.0.0, 8.5.0, 8.3.RC1 |
# | 2.6.0 | 2.6.0.post5, 2.6.0.post3, 2.6.0 | 8.5.0, 8.3.RC1, 8.2.RC1 |
#
# The driver goes with CANN: each CANN release names the HDK it was tested with, for one 25.5 with CANN
# 8.5.0, as [vllm-ascend 0.13](https://docs.vllm.ai/projects/ascend/en/v0.13.0/installation.html)
# asks for. The book's own torch_npu 2.13.0 is newer than the table we could read: look up its CANN
# there. `doctor`, below, prints the pair of versions that it finds.
#
# **A container** brings CANN and torch_npu along, the driver stays on the host. What it needs from
# there, as the
# [vllm-ascend quick start](https://docs.vllm.ai/projects/ascend/en/v0.13.0/quick_start.html) lists it:
#
# ```
# docker run --rm -it --shm-size=1g \
#   --device /dev/davinci0 \
#   --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#   -v /usr/local/dcmi:/usr/local/dcmi \
#   -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi \
#   -v /usr/local/Ascend/driver/lib64/:/usr/local/Ascend/driver/lib64/ \
#   -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info \
#   -v /etc/ascend_install.info:/etc/ascend_install.info \
#   IMAGE bash
# ```
#
# with one `--device /dev/davinciN` for each chip. Without the mounts of `npu-smi` and `dcmi` the
# first thing that people type, `npu-smi info`, fails in a container whose NPU works. The image
# belongs to a chip: the same release has one image for Atlas A2 and another, `…-a3`, for Atlas A3.
#
# **A2 and A3.** An Atlas A2 card is one NPU. An A3 card holds two dies, and each die is a device of
# its own: CloudMatrix384 counts 384 of the two-die Ascend 910C
# ([arXiv 2506.12708](https://arxiv.org/abs/2506.12708)). So count devices with
# `torch.npu.device_count()`, and use one rank for each, never cards.
#
# ## The first step of a port: transfer_to_npu
#
# Ascend's own guide begins with two lines at the top of the training script, and so should you
# ([automatic migration, CANN 9.0](https://www.hiascend.com/document/detail/zh/canncommercial/900/devaids/migrationtools/atlasfmkt_16_0019.html)):
#
# ```
# import torch_npu
# from torch_npu.contrib import transfer_to_npu  # torch.cuda.… now means torch.npu.…
# ```
#
# or, with no line at all, the variable `TORCH_TRANSFER_TO_NPU=1`, set before torch is imported
# ([its page](https://gitcode.com/Ascend/pytorch/blob/v2.7.1-26.0.0/docs/zh/environment_variable_reference/TORCH_TRANSFER_TO_NPU.md)).
# It replaces names of torch at run time: `torch.cuda`, `"cuda"` as a device, `nccl` as a backend.
#
# | use it | don't |
# |---|---|
# | to see within the hour whether a project trains at all | in code that must still run on CUDA: it changes what `torch.cuda` means for every library in the process ([accelerate#3020](https://github.com/huggingface/accelerate/issues/3020)) |
# | in a script that stays on NPUs | with `torch.jit.script`, which it switches off |
# | while you port by hand, file by file | with `channels_last`, which it does not support |
# | | with tests like `backend == "nccl"`: they see `hccl` after it |
#
# What it can't replace (custom CUDA operators, float64 and complex numbers, libraries that exist for
# CUDA alone) is what chapter 44 is about.
#
# The order matters. torch imports an installed torch_npu by itself, and without CANN that breaks
# `import torch` (`libhccl.so: cannot open shared object file`). shardbook turns that off and imports
# torch_npu itself, so with a half-finished installation the book still works, on the CPU. In your
# own programs, `TORCH_DEVICE_BACKEND_AUTOLOAD=0` does the same.
#
# ## Ask the doctor
#
# `python -m shardbook doctor` in a terminal says what was found and the next step. Here is what it
# says of your machine:

# %% tags=["nbval-ignore-output"]
from shardbook import doctor

exit_code = doctor.main([])

# %% [markdown]
# Its findings are a function of facts, so we can ask about machines that we do not have. A wheel
# without CANN, a variable that silently hides devices, and a run with more ranks than cards:

# %%
no_cann = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
machines = {
    "the wheel without CANN": Facts(torch_npu="2.13.0", npu_reason=no_cann),
    "devices out of order": Facts(torch_npu="2.13.0", npu_reason="", visible="1,0", chips=2),
    "four ranks, two cards": Facts(torch_npu="2.13.0", npu_reason="", npus=2, chips=2),
}
for name, facts in machines.items():
    print(f"{name}:")
    for finding in examine(facts):
        print(f"  {finding.text}")
        if finding.next:
            print(f"    next: {finding.next}")

# %% [markdown]
# The second deserves its place: CANN takes `ASCEND_RT_VISIBLE_DEVICES` only in strictly ascending
# order, and with `1,0` `torch.npu.is_available()` is False without a word
# ([Trinity-RFT#618](https://github.com/agentscope-ai/Trinity-RFT/pull/618)). With `4,5,6,7` the
# first card is `npu:0`, not `npu:4`
# ([verl#7507](https://github.com/verl-project/verl/pull/7507)).
#
# ## One card
#
# `sb.device()` is `npu:0` on an NPU, `cuda:0` on a GPU, `cpu` else. Code that asks it runs
# everywhere; code that names a device runs in one place. `SHARDBOOK_DEVICE=cpu` (or `npu`, `cuda`)
# overrides the choice for one session.

# %%
x = torch.arange(6.0).view(2, 3).to(sb.device())
product = x @ x.T
print(product.tolist())
print("computed where sb.device() says:", product.device == sb.device())

# %% [markdown]
# ## Four cards, or eight
#
# `sb.run` gives rank *r* the device *r* and opens a process group with the backend of the device:
# `hccl` on NPUs, `nccl` on GPUs, `gloo` on the CPU. On an Atlas 800 with eight NPUs,
# `world_size=8` uses all of them. With fewer devices than ranks, all ranks use the CPU, and a
# warning says so; two ranks never share a card.


# %%
def whoami(rows):
    rank = dist.get_rank()
    x = torch.full((rows,), float(rank), device=sb.device())
    dist.all_reduce(x)
    at_home = x.device == sb.device() and dist.get_backend() == sb.backend()
    return {"rank": rank, "sum": x.tolist(), "at home": at_home}


for value in sb.run(whoami, 2, world_size=4).values:
    print(value)

# %% [markdown]
# In a notebook `sb.run` starts the ranks, on this machine. torchrun can't start a notebook: it
# starts a Python file. So copy the cell with your function, and the imports it needs, into one that
# ends in `sb.run`:
#
# ```
# # whoami.py
# import shardbook as sb
# import torch
# import torch.distributed as dist
#
#
# def whoami(rows):
#     ...  # the body of the cell above
#     print(rank, x.tolist())
#
#
# sb.run(whoami, 2, world_size=8)
# dist.destroy_process_group()
# ```
#
# `torchrun --nproc-per-node 8 whoami.py` starts eight processes and tells each its `RANK` and the
# `WORLD_SIZE`; `sb.run` sees them and runs the function in place. The functions of a lab move in the
# same way: your answers, then the function that the lab hands to `sb.run`.
#
# ## Two hosts
#
# On both hosts, with the address of the first and their own number:
#
# ```
# source /usr/local/Ascend/cann/set_env.sh  # or ascend-toolkit, see above
# export HCCL_SOCKET_IFNAME=eth0            # the network interface that both hosts share
# torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 \
#          --master-addr 10.0.0.1 --master-port 29500 whoami.py
# ```
#
# What each rank prints would come out of each agent, four times, mixed. `sb.run` collects it and lets
# the first rank print it once, with equal lines folded over all hosts. A variable that is set for one
# run with `env=` on the first rank is seen by the ranks of every host. Here are two agents of two
# ranks each on this machine, as two hosts would start them:

# %%
from shardbook.studies.two_hosts import run_on_two_hosts

job = """
import os
import shardbook as sb
import torch.distributed as dist

def report():
    for epoch in range(3):
        print("epoch", epoch)
    print("rank", dist.get_rank(), "on host", os.environ["GROUP_RANK"], "sees", os.environ["RECIPE"])

recipe = "from the first rank" if os.environ["RANK"] == "0" else "from another host"
sb.run(report, world_size=4, env={"RECIPE": recipe})
dist.destroy_process_group()
"""
for text in sorted(run_on_two_hosts(job), key=len):  # the agent of the other host prints nothing
    print(f"an agent printed {len(text.splitlines())} lines")
    print(text, end="")

# %% [markdown]
# This is what people start Ray for, and what torchrun alone leaves to you. Ray prefixes each line
# with a process and an address, folds lines that differ only in their numbers (and has swallowed
# prints that way, [ray#45262](https://github.com/ray-project/ray/issues/45262)), and an environment
# variable that you set in the driver reaches no worker unless it goes through `runtime_env`
# ([Ray, common issues](https://docs.ray.io/en/latest/ray-observability/user-guides/debug-apps/general-debugging.html)).
# For ranks that all run the same program, torchrun and `sb.run` do; what Ray adds is placing and
# restarting *different* programs on a cluster.
#
# `--master-addr` becomes `MASTER_ADDR` in every rank. What goes wrong is nearly always one of:
#
# | variable | what it is | default |
# |---|---|---|
# | `MASTER_ADDR`, `MASTER_PORT` | where torch's store listens, on the first host | set by torchrun |
# | `HCCL_SOCKET_IFNAME`, `HCCL_IF_IP` | the host's network interface for setting up HCCL | the first that fits |
# | `HCCL_IF_BASE_PORT` | first of the 32 host ports HCCL listens on; keep them free with `sysctl -w net.ipv4.ip_local_reserved_ports=60000-60031` | 60000 |
# | `HCCL_CONNECT_TIMEOUT` | how long ranks wait for each other when a group is made, 120 to 7200 s; the wait is this plus 20 s | 120 |
# | `HCCL_EXEC_TIMEOUT` | how long a rank waits inside a collective; 0 is for ever on A2 and A3, but not where collectives run in AIV mode: there 1091 s is the default and the most, and 0 means 1091 | 1836 |
# | `init_process_group(timeout=…)` | torch's own limit for a group, which ends a job whatever HCCL's are ([Ascend/pytorch#54](https://github.com/Ascend/pytorch/issues/54)) | torch's default of the backend |
#
# (CANN 9.0's pages of
# [HCCL_CONNECT_TIMEOUT](https://www.hiascend.com/document/detail/zh/canncommercial/900/maintenref/envvar/envref_07_0077.html)
# and
# [HCCL_EXEC_TIMEOUT](https://www.hiascend.com/document/detail/zh/canncommercial/900/maintenref/envvar/envref_07_0078.html);
# other versions differ.) A group that "times out" after two minutes usually waited for a rank that
# was still loading its weights: raise `HCCL_CONNECT_TIMEOUT`
# ([vllm-ascend#405](https://github.com/vllm-project/vllm-ascend/issues/405)). A rank that never
# entered a collective shows itself after half an hour: in this book, `sb.run(..., timeout=60)`
# names it after a minute.
#
# If the hosts reach each other and the group still can't be made, look at the NPUs' own network.
# Each NPU has an address of its own, and collectives between hosts go there, not through the
# host's interface. On each host
# ([HCCL between several servers](https://www.hiascend.com/document/detail/en/mindsdk/730/Rec/recug/mxrecug_0256.html),
# [the TLS check, EI0016](https://www.hiascend.com/document/detail/en/CANNCommunityEdition/900/API/hcclug/hcclug_000045.html)):
#
# ```
# for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -ip -g; done            # the addresses of its NPUs
# hccn_tool -i 0 -ping -g address 192.168.100.101                      # an NPU of the other host
# for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -tls -g | grep switch; done
# ```
#
# The ping must lose nothing, and the TLS switch must be the same on every NPU of the job: on here and
# off there ends in the same timeout as a cable that is not plugged in.
#
# ## What differs from CUDA
#
# | on CUDA | on an NPU |
# |---|---|
# | `.cuda()`, `device="cuda"` | `.to(sb.device())` |
# | `init_process_group("nccl")` | `init_process_group(sb.backend())` |
# | `torch.cuda.Event`, `.synchronize`, `.memory_allocated` | `torch.Event`, `torch.accelerator.…` |
# | float64 anywhere | float64 on the host; cast before it moves ([diffusers#10428](https://github.com/huggingface/diffusers/issues/10428)) |
# | complex rotary embeddings | the same rotation in real numbers, as our models do |
# | flash_attn | `scaled_dot_product_attention`, or `torch_npu.npu_fusion_attention` |
# | NCCL reduces float64 | HCCL reduces int8 to int64, fp16, bf16, fp32; float64 on Ascend950 only |
# | `ReduceOp.PREMUL_SUM(f)`, `AVG` in NCCL | no PREMUL_SUM: scale, then SUM; torch_npu makes AVG of SUM and a division |
# | an operator that is missing raises | it runs on the CPU, with a warning, slowly ([Ascend/pytorch#40](https://github.com/Ascend/pytorch/issues/40)) |
# | a device generator's numbers | other numbers for the same seed: draw on the CPU, then move |
# | `CUDA_VISIBLE_DEVICES`, any order | `ASCEND_RT_VISIBLE_DEVICES`, ascending |
#
# No difference, though often taken for one: bitwise reductions (BAND, BOR, BXOR) and `recv()` from
# any source exist on gloo, neither on NCCL nor on HCCL
# ([torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html)). Code that was tried on
# CPUs only may use them.
#
# `python -m shardbook port your_project/` looks for these in your code.
#
# ## The trace on an NPU
#
# `with sb.trace(model)` records module and collective calls on any device, with the device's time
# where it has events. Kernels come from torch_npu's own profiler; `sb.show` reads what it wrote:
#
# ```
# import torch_npu
# with torch_npu.profiler.profile() as prof:
#     model(x)
# prof.export_chrome_trace("kernels.json")
# sb.show("kernels.json")
# ```
#
# ## What our tests show, and what they can't
#
# No machine that tests this book has an NPU. `make test-npu` runs the library and every solution on
# a **stand-in**: a device that PyTorch believes to be `npu`, whose tensors lie in host memory, with
# a process group called `hccl` that is gloo underneath. It refuses what the table above lists, so
# it proves that no lab names CUDA, mixes devices, needs float64 or complex numbers on the device,
# or talks to the wrong backend. It also counts operators: those without a kernel in torch_npu
# 2.13.0 fail the tests unless they are listed with a reason. It can't show speed, NPU numerics,
# per-operator dtype limits, races between streams, or an HCCL hang. If a lab fails on your NPU,
# that is a fault of the book: please report it with what `doctor` prints.
#
# Next: [11 · tensors](11_tensors.ipynb). Here to port a project: [chapter 13](13_communication.ipynb),
# then [chapter 44](44_dit_port.ipynb).
