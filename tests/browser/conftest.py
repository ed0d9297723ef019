"""JupyterLab and a headless Chromium for the browser tests: real ones, on this machine only."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

BASE = "/hub/user/x/"  # a prefix, as behind a JupyterHub
TOKEN = "browser-test"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "browser":
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.xdist_group("browser"))


@contextlib.contextmanager
def chromium_browser():
    """A headless browser. CI installs Debian's; any Chromium or Chrome on the PATH does."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def chromium():
    with chromium_browser() as browser:
        yield browser


class Lab:
    """A running JupyterLab: the folder it serves and the addresses of its pages."""

    def __init__(self, root, port):
        self.root, self.origin = root, f"http://127.0.0.1:{port}"

    def url(self, path=""):
        return f"{self.origin}{BASE}{path}"


@contextlib.contextmanager
def jupyterlab(folder):
    """JupyterLab from this environment, under a base URL with a prefix, with its own settings."""
    home, root = folder / "jupyter", folder / "notebooks"
    root.mkdir()
    quiet = home / "settings" / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),  # the database of trusted notebooks too
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    command += [f"--ServerApp.base_url={BASE}", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={root}", "--expose-app-in-browser"]
    with open(home / "lab.log", "w") as log:
        server = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        lab = Lab(root, port)
        try:
            api = lab.url(f"api?token={TOKEN}")
            wait_for(lambda: answers(api) or server.poll() is not None, 60)
            assert server.poll() is None, (home / "lab.log").read_text()
            yield lab
        finally:
            server.terminate()  # it ends its kernels
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def idle(page):
    """Wait until the kernel of the notebook in front has nothing to do."""
    page.wait_for_function(
        "jupyterapp.shell.currentWidget.sessionContext?.session?.kernel?.status === 'idle'",
        timeout=150_000,
    )


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def context(chromium, lab):
    """A logged-in browser session."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1100})
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(lab.url(f"lab?token={TOKEN}"))
    page.close()
    yield context
    context.close()


def notebook(path, *cells):
    """Write a notebook of code cells."""
    path.write_text(
        json.dumps(
            {
                "cells": [
                    {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source,
                     "outputs": [], "execution_count": None}
                    for i, source in enumerate(cells)
                ],
                "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
                "nbformat": 4,
                "nbformat_minor": 5,
            }
        )
    )  # fmt: skip
    return path
