#!/usr/bin/env bash
# Sets everything up in .venv and runs one job:
#   bash run.sh test      [pytest arguments]
#   bash run.sh accuracy  [flags]      any main in experiments/: accuracy, drift, train, ...
# With --jax VERSION before the job, in an environment of its own with exactly that jax.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() { sed -n '2,5s/^# \{0,1\}//p' "$0"; }

find_python() { # the newest Python >= 3.12 on PATH or under pyenv
  local candidate
  for candidate in python3.14 python3.13 python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  cat >&2 <<'TEXT'
LeapQuant-JAX needs Python 3.12 or newer, with venv, and found none on PATH or under ~/.pyenv/versions.
Install one and run this again, for example:
    Debian, Ubuntu:  sudo apt install python3.12 python3.12-venv
    pyenv:           pyenv install 3.12
    conda:           conda create -n leapquant python=3.12 && conda activate leapquant
TEXT
  return 1
}

install() { # once, and again whenever pyproject.toml changes
  local stamp=$venv/installed.sha256 python
  if [[ -x $venv/bin/python ]] && sha256sum --check --status "$stamp" 2>/dev/null; then return; fi
  python=$(find_python)
  echo "Setting up $venv with $("$python" --version) (a few minutes, once) ..." >&2
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]' \
    ${jax:+"jax==$jax" "jaxlib==$jax"}
  sha256sum pyproject.toml >"$stamp"
}

venv=.venv jax=
if [[ ${1:-} == --jax ]]; then
  jax=${2:?--jax needs a version} venv=.venv-jax-$2
  shift 2
fi
job=${1:-}
[[ -n $job ]] || { usage >&2; exit 2; }
shift
case $job in
  -h | --help) usage; exit ;;
  setup) install ;;
  test) install; exec "$venv/bin/python" -m pytest -n "${PYTEST_WORKERS:-2}" "$@" ;;
  *)
    [[ -f experiments/$job.py ]] || { echo "unknown job '$job': there is no experiments/$job.py" >&2; usage >&2; exit 2; }
    install
    exec "$venv/bin/python" -m "experiments.$job" "$@"
    ;;
esac
