#!/bin/sh
# Make .venv and install the book into it: `sh tools/install.sh lab|test|bench`. Does nothing, and
# needs no network, if that was done for this folder and this pyproject.toml.
set -u
kind=${1:-lab}
case $kind in
  lab) extras="" enough="lab test bench" ;;
  test) extras="[test]" enough="test bench" ;;
  bench) extras="[test,bench]" enough="bench" ;;
  *) echo "usage: sh tools/install.sh lab|test|bench" >&2; exit 2 ;;
esac

say() { printf '%s\n' "shardbook: $*" >&2; }

# Where the driver shows an Ascend NPU, torch_npu comes along. (A test sets the folder of devices.)
devices=${SHARDBOOK_DEV:-/dev}
npu=""
command -v npu-smi > /dev/null 2>&1 && npu=npu
for device in "$devices"/davinci[0-9]*; do
  [ -e "$device" ] && npu=npu
done
if [ -n "$npu" ]; then
  case $extras in
    "") extras="[npu]" ;;
    *) extras="${extras%]},npu]" ;;
  esac
fi

wanted="$PWD $(cksum < pyproject.toml)${npu:+ $npu}"
for done in $enough; do
  if [ "$(cat ".venv/shardbook-$done" 2>/dev/null)" = "$wanted" ] &&
    .venv/bin/python -c "" 2>/dev/null; then
    exit 0
  fi
done

if ! [ -w . ] || { [ -e .venv ] && ! [ -w .venv ]; }; then
  say "$PWD can't be written to, and the environment goes into $PWD/.venv."
  say "Copy or clone the repository into a folder of yours and run make there."
  exit 1
fi

# The first Python that is new enough; PYTHON=/path/to/python make lab chooses another.
python=""
tried=""
for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
  found=$(command -v "$name" 2>/dev/null) || continue
  version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  if "$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$found
    break
  fi
  tried="$tried $name is $version;"
done
if [ -z "$python" ]; then
  say "Python 3.11 or newer is needed, and none was found${tried:+ (${tried# })}."
  say "Install one (python.org, apt install python3 python3-venv, brew install python, conda), or"
  say "name yours: PYTHON=/path/to/python3 make lab. env.yml makes an environment with conda."
  exit 1
fi

if ! [ -x .venv/bin/python ] || ! .venv/bin/python -m pip --version > /dev/null 2>&1 ||
  [ "$(cat .venv/shardbook-home 2>/dev/null || echo "$PWD")" != "$PWD" ]; then
  say "making .venv with $python"
  if ! "$python" -m venv --clear .venv; then
    say "$python could not make a virtual environment. On Debian and Ubuntu it is a package of its"
    say "own: apt install python3-venv. A full disk stops it too: torch and JupyterLab take 2 GB."
    exit 1
  fi
fi
echo "$PWD" > .venv/shardbook-home

say "installing into .venv: minutes the first time, most of them for torch"
if [ -n "$npu" ]; then
  say "an Ascend NPU is here, so torch_npu is installed too (the extra \"npu\"); it needs CANN, whose"
  say "set_env.sh you source before Jupyter starts. Chapter 02 tells all of it, and afterwards"
  say "python -m shardbook doctor says whether torch, torch_npu and CANN go together."
fi
quiet=--quiet
if [ -t 1 ]; then quiet=""; fi # a person sees pip at work, a log only what went wrong
# shellcheck disable=SC2086  # nothing, or one option
if ! .venv/bin/python -m pip install --disable-pip-version-check $quiet -e ".$extras"; then
  say "pip could not install the packages; its own message is above. Without a network, it needs"
  say "wheels on disk (pip's find-links); behind a proxy, set https_proxy. Then run make again: what"
  say "was downloaded is kept."
  exit 1
fi
# JupyterLab's question about news would lie over the first page.
settings=.venv/share/jupyter/lab/settings
mkdir -p "$settings"
[ -e "$settings/overrides.json" ] ||
  echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' \
    > "$settings/overrides.json"
echo "$wanted" > ".venv/shardbook-$kind"
