"""Under torchrun on two hosts: output arrives once, folded, and a variable reaches every host."""

import textwrap

from shardbook.studies.two_hosts import run_on_two_hosts

JOB = textwrap.dedent(
    """
    import os
    import shardbook as sb
    import torch.distributed as dist

    def report():
        for step in range(3):
            print("step", step)
        print("rank", dist.get_rank(), "sees", os.environ.get("LEARNING_RATE"))
        os.system("echo from a subprocess")  # by descriptor, not through sys.stdout
        return os.environ.get("LEARNING_RATE")

    env = {"LEARNING_RATE": "0.5"} if os.environ["RANK"] == "0" else {"LEARNING_RATE": "wrong"}
    result = sb.run(report, world_size=4, env=env)
    assert result.values == ["0.5"] * 4, result.values
    assert "LEARNING_RATE" not in os.environ
    quiet = sb.run(report, world_size=4, echo=False)
    assert quiet.output[2].startswith("step 0"), quiet.output
    dist.destroy_process_group()
    """
)


def test_prints_of_all_hosts_arrive_once_at_the_first_rank():
    said = run_on_two_hosts(JOB)
    lines = [line for out in said for line in out.splitlines()]
    for step in range(3):
        assert lines.count(f"[ranks 0-3] step {step}") == 1
    assert lines.count("[ranks 0-3] from a subprocess") == 1
    for rank in range(4):
        assert lines.count(f"[rank {rank}] rank {rank} sees 0.5") == 1
    assert len(lines) == 8, lines
    assert sorted(map(bool, said)) == [False, True], "one host prints for both"


def test_what_a_failing_rank_had_printed_is_not_lost():
    job = JOB.replace('print("rank"', 'raise ValueError("no") or print("rank"')
    try:
        run_on_two_hosts(job)
    except RuntimeError as error:
        assert "raised ValueError: no" in str(error) and "step 2" in str(error)
    else:
        raise AssertionError("a rank that raises must fail its agent")
