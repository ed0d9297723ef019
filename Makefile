# Each target is enough on a fresh clone: it makes .venv and installs what it needs, once.
#   make lab        open the book in JupyterLab           make book       build notebooks that changed
#   make test       library, checks and notebooks         make test-fast  the quick part of it
#   make test-all   also browser, stand-in npu, install   make test-npu   only the stand-in npu
#   make bench      ratios against other tools
PYTHON ?=
ARGS ?=
export PYTHON
export JUPYTER_PREFER_ENV_PATH = 1

.PHONY: help lab test test-all test-rest test-fast test-npu book bench clean

help:
	@sed -n '2,5s/^# *//p' Makefile

lab:
	@sh tools/install.sh lab
	@.venv/bin/python -m jupyterlab --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

test:
	@sh tools/install.sh test
	@.venv/bin/python tools/test.py $(ARGS)

test-all:
	@sh tools/install.sh test
	@.venv/bin/python tools/test.py all $(ARGS)

test-rest:
	@sh tools/install.sh test
	@.venv/bin/python tools/test.py rest $(ARGS)

test-fast:
	@sh tools/install.sh test
	@.venv/bin/python tools/test.py style book fast $(ARGS)

test-npu:
	@sh tools/install.sh test
	@.venv/bin/python tools/test.py npu npu-one $(ARGS)

book:
	@sh tools/install.sh test
	@.venv/bin/python book/build.py $(ARGS)

bench:
	@sh tools/install.sh bench
	@.venv/bin/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
