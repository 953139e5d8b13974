# shellcheck shell=bash
# Sourced by the scripts beside it, under `set -euo pipefail`: finds a Python and keeps .venv in step with
# pyproject.toml. Keeps to bash 3.2, which macOS has.
#
# ensure_venv EXTRA   makes $VENV ready with the package and its extra ("dev", or "" for none); $PY runs in it
# say, die            a progress line with the seconds since the start; a last line and exit 1

# What the caller's shell has set up must not leak into .venv.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX

ROOT="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
UNFINISHED="$VENV/.jaxinfer-unfinished" # there while .venv is being filled
PIP_LOG="$VENV/pip.log"

trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '[%3d s] %s\n' "$SECONDS" "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Fails unless run by a CPython >= 3.12 with the GIL; else prints "MINOR venv|no-venv PATH" of the interpreter
# itself, not of a venv or a shim before it. Python 2 must be able to parse it.
PROBE='
import sys
if sys.version_info < (3, 12) or sys.implementation.name != "cpython":
    sys.exit(1)
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
try:
    import ensurepip, venv
    has_venv = "venv"
except ImportError:
    has_venv = "no-venv"
print("%d %s %s" % (sys.version_info[1], has_venv, sys._base_executable))
'

# Every command that may be a Python, one a line.
python_candidates() {
  local name path
  for name in python3.12 python3.13 python3.14 python3 python; do
    type -aP "$name" || true
  done
  for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python; do
    if [ -x "$path" ]; then printf '%s\n' "$path"; fi
  done
  uv python find --system '>=3.12' 2>/dev/null || true
}

# Sets PYTHON to $JAXINFER_PYTHON, else to the lowest version >= 3.12 that runs: the older, the surer its wheels.
find_python() {
  local candidate reply minor has_venv path best=999 crippled=""
  PYTHON=""
  if [ -n "${JAXINFER_PYTHON:-}" ]; then
    reply="$("$JAXINFER_PYTHON" -c "$PROBE" 2>/dev/null </dev/null)" ||
      die "JAXINFER_PYTHON=$JAXINFER_PYTHON is not a CPython >= 3.12 that runs: set it to one, or unset it"
    read -r minor has_venv path <<<"$reply"
    if [ "$has_venv" = venv ]; then PYTHON="$path"; else crippled="$path"; fi
  else
    while IFS= read -r candidate; do
      # Run it: pyenv leaves shims on PATH that refuse to.
      reply="$("$candidate" -c "$PROBE" 2>/dev/null </dev/null)" || continue
      read -r minor has_venv path <<<"$reply"
      if [ "$has_venv" != venv ]; then
        crippled="$path"
      elif [ "$minor" -lt "$best" ]; then
        best="$minor" PYTHON="$path"
      fi
      if [ "$best" -eq 12 ]; then break; fi
    done < <(python_candidates)
  fi
  if [ -n "$PYTHON" ]; then return; fi
  if [ -n "$crippled" ]; then
    die "$crippled cannot make virtual environments: install its venv module" \
      "(Debian and Ubuntu: apt install python3.$minor-venv), or set JAXINFER_PYTHON to another Python >= 3.12"
  fi
  die "no Python >= 3.12 found on PATH, in pyenv or in uv: install one (apt install python3 python3-venv," \
    "brew install python@3.12, pyenv install 3.12 or uv python install 3.12), or set JAXINFER_PYTHON to its path"
}

ensure_venv() {
  local extra="$1" flaw wanted stamp="$VENV/.jaxinfer-installed${1:+-$1}"
  flaw="$(venv_flaw)"
  if [ -n "$flaw" ]; then
    find_python
    if [ -e "$VENV" ] || [ -L "$VENV" ]; then say "making .venv anew: $flaw"; fi
    make_venv
  fi
  wanted="$(fingerprint "$PY")"
  if [ "$wanted" = "$(cat "$stamp" 2>/dev/null)" ] || [ "$wanted" = "$(cat "$VENV/.jaxinfer-installed-dev" 2>/dev/null)" ]; then
    return
  fi
  pip_install "$extra"
  printf '%s\n' "$wanted" >"$stamp"
}

# Prints why .venv cannot be used, or nothing.
venv_flaw() {
  if [ ! -e "$VENV" ]; then
    echo "there is none"
  elif [ -e "$UNFINISHED" ]; then
    echo "an earlier run was interrupted while filling it"
  elif ! "$PY" -c "$PROBE" >/dev/null 2>&1 </dev/null; then
    echo "its Python does not run or is older than 3.12"
  elif [ -n "${JAXINFER_PYTHON:-}" ] && [ "$(identity "$PY")" != "$(identity "$JAXINFER_PYTHON")" ]; then
    echo "it was made with another Python than JAXINFER_PYTHON=$JAXINFER_PYTHON"
  elif ! "$PY" -m pip --version >/dev/null 2>&1 </dev/null && ! "$PY" -m ensurepip >/dev/null 2>&1 </dev/null; then
    echo "it has no pip"
  fi
}

make_venv() {
  local output
  say "making .venv with $PYTHON"
  rm -rf "$VENV"
  mkdir "$VENV"
  : >"$UNFINISHED"
  output="$("$PYTHON" -m venv "$VENV" 2>&1 </dev/null)" ||
    die "$PYTHON -m venv failed; its last line: $(tail -n 1 <<<"$output")"
}

identity() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null </dev/null; }

# What an installation depends on: the declared dependencies, the Python, and the path that the editable
# install and the console scripts have written into them.
fingerprint() {
  "$1" - "$ROOT" <<'PYTHON'
import hashlib, pathlib, sys
root = sys.argv[1]
parts = [sys.version, sys.base_prefix, root, pathlib.Path(root, "pyproject.toml").read_text("utf-8")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

pip_install() {
  local extra="$1" rc=0
  say "installing jaxinfer${extra:+[$extra]} and what it needs (minutes the first time, 0.8 GB)"
  : >"$UNFINISHED"
  (cd -- "$ROOT" && exec "$PY" -m pip install --no-input --disable-pip-version-check --progress-bar off \
    -e ".${extra:+[$extra]}" </dev/null 2>&1) | pip_progress || rc=$?
  if [ "$rc" -ne 0 ]; then
    tail -n 5 "$PIP_LOG" >&2
    rm -f "$UNFINISHED" # pip has put things back itself
    die "pip could not install jaxinfer (its last lines are above, all of them in $PIP_LOG)." \
      "Most likely the package index cannot be reached: run this again with a network"
  fi
  rm -f "$UNFINISHED"
  say "installed"
}

# Keeps pip's output in the log and shows the lines that tell how far it is.
pip_progress() {
  local line file
  while IFS= read -r line; do
    printf '%s\n' "$line"
    case "$line" in
      *"Downloading "*.whl" ("*" MB)"*)
        file="${line##*Downloading }" # NAME-VERSION-PYTHON-ABI-PLATFORM.whl (SIZE MB)
        file="${file##*/}"
        say "  downloading ${file%-*-*-*} (${file##* (}"
        ;;
      "Installing collected packages:"*) say "  unpacking" ;;
    esac
  done >"$PIP_LOG"
}
