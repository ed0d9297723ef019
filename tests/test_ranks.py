"""sb.run: what a rank finds, what comes back, how output is folded, a file under torchrun."""

import os
import re
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import shardbook as sb
from shardbook.ranks.output import fold, ranks_text
from tests.processes import slowness

pytestmark = pytest.mark.usefixtures("on_cpu")  # what is tested is how ranks start, fail and end


def surroundings(x, *, y):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert all(n in os.environ for n in names)
    assert int(os.environ["RANK"]) == dist.get_rank()
    assert dist.is_torchelastic_launched()
    return x, y, dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.environ["MINE"]


def test_a_rank_finds_its_arguments_and_what_torchrun_would_set(monkeypatch):
    sb.run(int)  # the fork server runs before the variable is set
    monkeypatch.setenv("MINE", "here")
    values = sb.run(surroundings, 5, y="z", world_size=3).values
    assert values == [(5, "z", r, 3, 1, "here") for r in range(3)]
    assert "MASTER_PORT" not in os.environ


def test_closures_classes_and_tensors_go_there_and_back():
    class Pair:
        def __init__(self, x):
            self.x = x

    weight = torch.randn(3, 4)

    def double(pair):
        return Pair(pair.x * 2 + weight * dist.get_rank())

    values = sb.run(double, Pair(weight), world_size=2).values
    assert all(type(v) is Pair for v in values)
    assert torch.equal(values[1].x, weight * 3)


def test_large_values_come_back():
    values = sb.run(torch.ones, 3_000_000, world_size=2).values
    assert [v.sum().item() for v in values] == [3e6, 3e6]


def test_world_size_is_not_the_number_of_devices():
    assert sb.run(dist.get_world_size, world_size=1).values == [1]
    assert sb.run(dist.get_world_size, world_size=5).values == [5] * 5


def test_a_run_is_ready_again_at_once():
    sb.run(int)
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        sb.run(dist.barrier)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 1.0 * slowness()  # 0.06 s on a quiet machine


def test_collectives_of_subgroups_threads_and_async_work_pass_the_watch():
    def many():
        rank = dist.get_rank()
        half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        x = torch.full((4,), float(rank))
        works = [dist.all_reduce(x.clone(), group=half, async_op=True) for _ in range(3)]
        if rank < 2:
            dist.all_reduce(x, group=half)  # only one half makes a fourth call
        for work in works:
            work.wait()
        ops = [
            dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % 4),
            dist.P2POp(dist.irecv, torch.ones(2), (rank - 1) % 4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        sizes = [1 + (rank + r) % 3 for r in range(4)]
        dist.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes)
        gathered = [None] * 4
        dist.all_gather_object(gathered, "x" * rank)
        thing = [rank]
        dist.broadcast_object_list(thing, src=2)
        if rank == 0:
            dist.recv(torch.ones(1))  # from any
        elif rank == 3:
            dist.send(torch.ones(1), 0)
        dist.barrier()
        dist.scatter(torch.ones(2), [torch.ones(2)] * 4 if rank == 1 else None, src=1)
        dist.gather(torch.ones(2), [torch.ones(2)] * 4 if rank == 1 else None, dst=1)
        return thing[0]

    assert sb.run(many).values == [2] * 4


def test_ddp_and_functional_collectives_pass_the_watch():
    def train():
        import torch.distributed._functional_collectives as funcol
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
        return funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist()

    assert sb.run(train, world_size=2).values == [[2.0, 2.0]] * 2


def fsdp():
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 7)).sum().backward()
    return model[0].weight.grad.full_tensor().sum().item()


def interleaved_pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = [
        PipelineStage(torch.nn.Linear(6, 6), chunk * 4 + rank, 8, torch.device("cpu"))
        for chunk in range(2)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 8, loss_fn=lambda a, b: (a - b).pow(2).mean())
    x, losses = torch.randn(16, 6), []
    schedule.step(
        *([x] if rank == 0 else []), **({"target": x, "losses": losses} if rank == 3 else {})
    )
    return len(losses)


@pytest.mark.skipif(sb.device().type != "cpu", reason="these make CPU tensors")
def test_torchs_own_parallelisms_pass_the_watch():
    sums = sb.run(fsdp).values
    assert sums[0] != 0 and sums == [sums[0]] * 4
    assert sb.run(interleaved_pipeline).values == [0, 0, 0, 8]


def test_output_is_by_rank_and_folded(capfd):
    def talk():
        rank = dist.get_rank()
        print("hello")
        print(f"I am {rank}", file=sys.stderr)
        os.system("echo from a subprocess")
        warnings.warn("careful", stacklevel=1)
        if rank == 1:
            print("only one")
        print("bye", end="")

    result = sb.run(talk, world_size=2)
    assert result.output[0] == "hello\nI am 0\nfrom a subprocess\nUserWarning: careful\nbye"
    assert capfd.readouterr().out == (
        "[ranks 0-1] hello\n[rank 0] I am 0\n[rank 1] I am 1\n[ranks 0-1] from a subprocess\n"
        "[ranks 0-1] UserWarning: careful\n[rank 1] only one\n[ranks 0-1] bye\n"
    )
    sb.run(talk, world_size=2, echo=False)
    assert capfd.readouterr().out == ""


def test_output_of_a_failed_run_is_kept():
    def fails():
        print("before")
        raise ValueError

    with pytest.raises(sb.RankError, match="raised ValueError") as caught:
        sb.run(fails, world_size=2)
    assert caught.value.output == ["before\n"] * 2


@pytest.mark.parametrize(
    ("outputs", "folded"),
    [
        (["a\nc", "b\nc"], "[rank 0] a\n[rank 1] b\n[ranks 0-1] c"),
        (["a\nb", "b\na"], "[rank 0] a\n[ranks 0-1] b\n[rank 1] a"),
        (["", "x", "", "x", "x", "y"], "[ranks 1, 3-4] x\n[rank 5] y"),
        (["a\na\nb", "a\nb"], "[ranks 0-1] a\n[rank 0] a\n[ranks 0-1] b"),
        (["", ""], ""),
    ],
)
def test_fold(outputs, folded):
    assert fold(outputs) == folded
    lines = [re.fullmatch(r"\[ranks? ([\d, -]+)\] (.*)", x).groups() for x in folded.splitlines()]
    for r, text in enumerate(outputs):  # every rank's lines, in its order
        mine = [line for who, line in lines if re.search(rf"\b{r}\b", _spelled(who))]
        assert mine == text.splitlines()


def _spelled(who: str) -> str:
    spans = [[int(x) for x in part.split("-")] for part in who.split(", ")]
    return " ".join(str(r) for s in spans for r in range(s[0], s[-1] + 1))


def test_ranks_in_words():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([2, 0, 1, 5]) == "ranks 0-2, 5"


def test_the_result_is_quiet():
    assert repr(sb.run(int, world_size=2)) == "<Result of 2 ranks: .values, .output, .trace>"


def test_trace_of_all_ranks():
    def step():
        model = torch.nn.Linear(3, 2)
        y = model(torch.ones(4, 3))
        dist.all_reduce(y.detach())

    trace = sb.run(step, world_size=2, trace=True).trace
    events = trace.chrome()["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1}
    assert {e["name"] for e in slices} >= {"all_reduce"}


SCRIPT = textwrap.dedent(
    """
    import sys
    import time

    import torch
    import torch.distributed as dist

    import shardbook as sb


    class Answer:
        def __call__(self, k):
            x = torch.full((2,), float(dist.get_rank() * k))
            dist.all_reduce(x)
            return dist.get_rank(), x[0].item()


    def unwritten():
        raise NotImplementedError("exercise 1: it is not written yet")


    def hangs():
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(2))
        else:
            time.sleep(1000)


    def say(*words):  # in one write: two ranks share a torchrun agent's output
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()


    # No `if __name__ == "__main__"`: a run does not start the file again.
    say("VALUES", sb.run(Answer(), 2, world_size=4).values)
    say("AGAIN", sb.run(Answer(), 3, world_size=4).values)
    try:
        sb.run(unwritten, world_size=4)
    except sb.NotWritten as error:
        say("UNWRITTEN", str(error).splitlines()[0])
    if "hang" in sys.argv:
        sb.run(hangs, world_size=4, timeout=5)
    """
)
VALUES = "VALUES [(0, 12.0), (1, 12.0), (2, 12.0), (3, 12.0)]"
AGAIN = "AGAIN [(0, 18.0), (1, 18.0), (2, 18.0), (3, 18.0)]"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_file_runs_under_python(script):
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[:2] == [VALUES, AGAIN]
    assert "UNWRITTEN ranks 0-3 raised NotImplementedError: exercise 1" in done.stdout
    assert done.stdout.count("VALUES") == 1


def torchrun(nodes: int, script: str, *args: str) -> list[subprocess.CompletedProcess]:
    """As many torchrun agents as hosts, on this one, with one c10d rendezvous between them."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)),
        *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", f"test{port}"),
        *("--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost", script, *args),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        for _ in range(nodes)
    ]
    done = []
    try:
        for agent in agents:
            out, err = agent.communicate(timeout=200)
            done.append(subprocess.CompletedProcess(command, agent.returncode, out, err))
    finally:
        for agent in agents:
            agent.kill()
    return done


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_the_same_file_runs_under_torchrun_on_two_hosts(script):
    for host in torchrun(2, script):
        assert host.returncode == 0, host.stderr
        assert host.stdout.count(VALUES) == 2  # on each of its two ranks
        assert host.stdout.count(AGAIN) == 2
        assert len(re.findall(r"UNWRITTEN rank \d raised NotImpl", host.stdout)) == 2


def test_a_hang_under_torchrun_ends_with_a_line(script):
    (host,) = torchrun(1, script, "hang")
    assert host.returncode != 0
    assert "sb.run: 2 ranks, as torchrun started them (world_size=4 is unused)" in host.stdout
    waits = r"RankError: rank 0 did not end within 5 s: it waits in all_reduce, script.py:\d+"
    sleeps = (
        r"RankError: rank 1 did not end within 5 s: it is at script.py:\d+ in hangs: time.sleep"
    )
    assert re.search(waits, host.stderr) or re.search(sleeps, host.stderr), host.stderr
