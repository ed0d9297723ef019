"""`make lab` and `make test` on a fresh clone: what they install, what they say if they can't."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UTILITIES = ("sh", "cat", "cksum", "printf", "mkdir", "rm")


@pytest.fixture
def clone(tmp_path):
    """A folder with what the installation reads, and a PATH that has no Python."""
    folder = tmp_path / "clone"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "install.sh", folder / "tools")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "bin").mkdir()
    for name in UTILITIES:
        (folder / "bin" / name).symlink_to(shutil.which(name))
    return folder


def install(folder, kind="lab", as_user=(), **env):
    done = subprocess.run(
        [*as_user, "/bin/sh", "tools/install.sh", kind],
        cwd=folder,
        env={"PATH": str(folder / "bin"), "HOME": str(folder)} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a venv's python is a link: never write through it
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_python_it_says_which_is_needed(clone):
    code, out, err = install(clone)
    assert code == 1 and not out
    assert "Python 3.11 or newer is needed" in err and "none was found" in err
    assert "Traceback" not in err and not (clone / ".venv").exists()


def test_an_old_python_is_named(clone):
    script(clone / "bin" / "python3", 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    code, _, err = install(clone)
    assert code == 1 and "python3 is 3.9" in err and "3.11" in err


def test_without_write_access_it_says_where_to_go(clone):
    as_user = ()
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if not setpriv:
            pytest.skip("root may write everywhere and setpriv is not there")
        as_user = (setpriv, "--reuid=65534", "--clear-groups")
        for parent in [*clone.parents][:3]:
            parent.chmod(0o755)
    clone.chmod(0o555)
    code, _, err = install(clone, as_user=as_user)
    clone.chmod(0o755)
    assert code == 1 and "can't be written to" in err and "folder of yours" in err


def test_without_a_network_it_says_so_and_can_be_repeated(clone):
    (clone / "shardbook").mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    code, _, err = install(clone, **offline)
    assert code == 1 and "pip could not install" in err and "network" in err
    assert not list((clone / ".venv").glob("shardbook-lab"))
    script(clone / ".venv" / "bin" / "python", 'echo "$@" >> calls')  # pip that succeeds
    assert install(clone, **offline)[0] == 0
    assert "pip install" in (clone / "calls").read_text()
    (clone / "calls").unlink()
    assert install(clone, **offline) == (0, "", ""), "the second time there is nothing to do"
    assert "pip" not in (clone / "calls").read_text()
    with open(clone / "pyproject.toml", "a") as f:
        f.write("# changed\n")
    assert install(clone, **offline)[0] == 0
    assert "pip install" in (clone / "calls").read_text(), "a changed pyproject is installed"


@pytest.mark.installation
@pytest.mark.parametrize(("kind", "extras"), [("lab", ".[npu]"), ("test", ".[test,npu]")])
def test_where_an_npu_is_torch_npu_comes_along(clone, kind, extras):
    (clone / "shardbook").mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    install(clone, kind, **offline)  # makes .venv; pip has no network
    script(clone / ".venv" / "bin" / "python", 'echo "$@" >> calls')
    code, _, err = install(clone, kind, **offline)
    assert code == 0 and "NPU" not in err
    assert "npu" not in (clone / "calls").read_text()
    (clone / "dev").mkdir()
    (clone / "dev" / "davinci0").touch()
    code, _, err = install(clone, kind, **offline, SHARDBOOK_DEV=str(clone / "dev"))
    assert code == 0 and "an Ascend NPU is here" in err and "set_env.sh" in err
    assert f"-e {extras}" in (clone / "calls").read_text()
    again = install(clone, kind, **offline, SHARDBOOK_DEV=str(clone / "dev"))
    assert again == (0, "", ""), "the second time there is nothing to do"


def test_conda_users_are_told_the_same_extra():
    assert "-e .[test,npu]" in (ROOT / "env.yml").read_text()


def test_every_make_target_installs_first_and_calls_what_exists():
    text = (ROOT / "Makefile").read_text()
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # as in no `make`
    for target in (
        "lab",
        "test",
        "test-all",
        "test-rest",
        "test-fast",
        "test-npu",
        "book",
        "bench",
    ):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, env=alone
        )
        first, then = done.stdout.split("\n", 1)
        assert first.startswith("sh tools/install.sh"), target
        for path in re.findall(r"\b(?:tools|book|tests)/\w+\.py", then):
            assert (ROOT / path).exists(), path
    assert "test:" in text and "lab:" in text


@pytest.mark.installation
def test_make_lab_serves_the_first_notebook(tmp_path):
    wanted = subprocess.run(
        ["sh", "-c", 'echo "$PWD $(cksum < pyproject.toml)"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    stamps = [p.read_text() for p in (ROOT / ".venv").glob("shardbook-*")]
    if wanted not in stamps:
        pytest.skip("this checkout's .venv was not made by make")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = f"--no-browser --port {port} --ServerApp.port_retries=0 --IdentityProvider.token=t"
    if os.geteuid() == 0:
        args += " --allow-root"
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            ["make", "lab", f"ARGS={args}"],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                page = urllib.request.urlopen(f"{base}/?token=t", timeout=10)
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
        assert page.url.split("?")[0].endswith("/lab/tree/notebooks/00_start_here.ipynb"), page.url
        found = urllib.request.urlopen(
            f"{base}/api/contents/notebooks/00_start_here.ipynb?content=0&token=t", timeout=10
        )
        assert found.status == 200
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)  # this is make; the server under it may take longer, or hang
        with contextlib.suppress(ProcessLookupError):
            for _ in range(20):
                os.killpg(server.pid, 0)
                time.sleep(0.5)
            os.killpg(server.pid, signal.SIGKILL)


def test_readme_and_ci_name_what_exists():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in ci.replace(" ||", "\n") and "make test-rest" in ci
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert ".ci/run ${{ matrix.parts }}" in workflow
    named = re.search(r"parts: \[(.*)\]", workflow)[1].replace('"', " ").replace(",", " ").split()
    listed = [sys.executable, "tools/test.py", "--list"]
    parts = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert sorted(named) == sorted(parts), "the jobs together run every part once"
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / path).exists(), f"README links to {path}"
    developing = (ROOT / "DEVELOPING.md").read_text()
    for path in re.findall(r"`((?:shardbook|book|tests|tools)/[\w/]+\.(?:py|js))`", developing):
        assert (ROOT / path).exists(), f"DEVELOPING.md names {path}"
    for target in re.findall(r"`make ([\w-]+)", readme + developing):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.installation
@pytest.mark.timeout(900)
def test_env_yml_installs_the_project(tmp_path):
    import yaml

    env = yaml.safe_load((ROOT / "env.yml").read_text())
    python, pip = [d for d in env["dependencies"] if d != "pip"]
    assert python.startswith("python>=3.11") and env["channels"] == ["conda-forge"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    fresh = tmp_path / "env" / "bin" / "python"
    wanted = [word for line in pip["pip"] for word in line.split(" ")]
    subprocess.run([fresh, "-m", "pip", "install", "-q", *wanted], cwd=ROOT, check=True)
    program = "import shardbook, jupyterlab, viztracer, torch; print(torch.__version__)"
    done = subprocess.run(
        [fresh, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("2.13.0")
    subprocess.run([fresh, "-m", "pip", "check"], check=True)
    listed = subprocess.run(
        [tmp_path / "env" / "bin" / "shardbook"], capture_output=True, text=True, check=True
    )
    assert "check" in listed.stdout
