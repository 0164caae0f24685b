# Sourced by the scripts beside it: `bootstrap` leaves the locked versions of everything in .venv,
# and the path of its interpreter in $python.
#
# A caller may set PYTHON, the interpreter to use (a name or a path), and WHEELS, a folder of wheels
# to install from instead of the network. The last thing a set-up writes is .venv/stamp, which says
# what it was made from; while that still fits, nothing is started here, not even Python.

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
venv=$root/.venv
stamp=$venv/stamp
python=$venv/bin/python
supported='3.11, 3.12 or 3.13'

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "scripts/${0##*/}: $*"
  exit 1
}

write() { printf '%s\n' "$1" >"$2"; }

# The lock for Python $1; nothing when there is none.
lock_of() {
  case $1 in
    3.11) printf '%s' "$root/requirements/py3.11.txt" ;;
    3.12 | 3.13) printf '%s' "$root/requirements/py3.12.txt" ;;
  esac
}

# What .venv/stamp says when it was made with Python $1, the interpreter $2.
stamp_text() { printf 'python %s %s\nroot %s\n%s' "$1" "$2" "$root" "$(<"$(lock_of "$1")")"; }

# Sets `version` and `base` (the real path) of the interpreter $1, and `refusal`: nothing, or why
# it will not do.
inspect() {
  local answer name
  version= base= refusal="$1 does not run as Python"
  answer=$("$1" -c '
import os, sys
try:
  import ensurepip, venv
  kind = "whole"
except ImportError:
  kind = "lean"
path = os.path.realpath(sys.executable)
sys.stdout.write("%d.%d.%d %s %s" % (tuple(sys.version_info[:3]) + (kind, path)))
' 2>/dev/null) || return 0
  [[ $answer =~ ^([0-9]+)\.([0-9]+)\.([0-9]+)\ (whole|lean)\ (.+)$ ]] || return 0
  version=${BASH_REMATCH[1]}.${BASH_REMATCH[2]} base=${BASH_REMATCH[5]}
  name="$1 is Python $version.${BASH_REMATCH[3]}"
  if [[ -n $(lock_of "$version") && ${BASH_REMATCH[4]} == whole ]]; then
    refusal=
  elif [[ -n $(lock_of "$version") ]]; then
    refusal="$name without venv or ensurepip (on Debian: apt install python$version-venv)"
  elif ((BASH_REMATCH[1] < 3 || (BASH_REMATCH[1] == 3 && BASH_REMATCH[2] < 11))); then
    refusal="$name, too old"
  else
    refusal="$name, for which requirements/ has no locked versions"
  fi
}

# Whether .venv is whole and made from what is wanted now.
ready() {
  local word made_with
  [[ -f $stamp && -x $python ]] || return 1
  read -r word version base <"$stamp" || return 1
  [[ $word == python && -n $(lock_of "$version") ]] || return 1
  [[ $(<"$stamp") == "$(stamp_text "$version" "$base")" ]] || return 1
  [[ -z ${PYTHON:-} || $(type -P "$PYTHON") -ef $base ]] && return 0
  made_with=$base
  inspect "$PYTHON"
  [[ -z $refusal && $base == "$made_with" ]]
}

# Sets `version` and `base` to those of $PYTHON, or of the newest Python that will do.
choose_python() {
  local name found=
  if [[ -n ${PYTHON:-} ]]; then
    type -P "$PYTHON" >/dev/null ||
      fail "PYTHON=$PYTHON is not a program; set it to the name or path of a Python $supported"
    inspect "$PYTHON"
    [[ -z $refusal ]] || fail "$refusal; set PYTHON to the name or path of a Python $supported"
    return
  fi
  for name in python3.13 python3.12 python3.11 python3 python; do
    type -P "$name" >/dev/null || continue
    inspect "$name"
    [[ -n $refusal ]] || return 0
    [[ -z $version ]] || found="${found:+$found; }$refusal"
  done
  fail "no Python $supported found${found:+ ($found)}; install one, or set PYTHON to its path"
}

# One line on why a step with the output $1 failed.
explain() {
  local what=${1##*No matching distribution found for } text=${1%$'\n'}
  what=${what%%$'\n'*}
  case $1 in
    *'No space left on device'* | *'Disk quota exceeded'*)
      printf 'the disk is full: %s takes 1 GB, its downloads pass through %s; free some, ' \
        "$venv" "${TMPDIR:-/tmp}"
      printf 'then run this again' ;;
    *'No matching distribution found for '*)
      if [[ -n ${WHEELS:-} ]]; then
        printf 'WHEELS=%s has no wheel of %s for Python %s' "$WHEELS" "$what" "$version"
      elif [[ $1 == *Retrying* ]]; then
        printf 'no network: the package index cannot be reached; connect, or set WHEELS to a folder'
        printf ' of wheels'
      else
        printf 'the package index has no wheel of %s for this machine' "$what"
      fi ;;
    *Retrying* | *'onnection'* | *'imed out'* | *IncompleteRead*)
      printf 'the network failed; run this again, or set WHEELS to a folder of wheels' ;;
    *'Permission denied'* | *'Read-only file system'*)
      printf 'no permission to write %s' "$venv" ;;
    *)
      printf 'set-up failed: %s' "${text##*$'\n'}" ;;
  esac
}

# Shows on stderr what pip is at, and passes on the lines that may explain a failure.
progress() {
  local line file size
  while IFS= read -r line; do
    case $line in
      *'Downloading '*' MB)' | *'Using cached '*' MB)')
        file=${line##* cached } file=${file##*Downloading } file=${file##*/} size=${line##*(}
        say "  ${file%%-*} (${size%)})" ;;
      *Retrying*)
        say '  no answer from the package index, trying again'
        printf '%s\n' "$line" ;;
      *) printf '%s\n' "$line" ;;
    esac
  done
}

# Runs a step; when it fails, says why in one line.
step() {
  local output
  output=$("$@" 2>&1 </dev/null) || fail "$(explain "$output")"
}

# The lock is complete, so nothing that it does not name comes in (--no-deps). WHEELS means that
# folder and no other. Compiling is left to a later step, which uses all cores.
pip_install() {
  local pip=("$python" -I -m pip)
  local options=(--requirement "$(lock_of "$version")" --no-deps --no-user --no-compile
    --only-binary=:all: --no-input --progress-bar=off --disable-pip-version-check)
  if [[ -n ${WHEELS:-} ]]; then
    export PIP_CONFIG_FILE=/dev/null
    pip+=(--isolated)
    options+=(--no-index --find-links "$WHEELS")
  fi
  "${pip[@]}" install "${options[@]}"
}

make_venv() {
  local output packages=$venv/lib/python$version/site-packages lock
  lock=$(lock_of "$version")
  say "Setting up $venv with Python $version ($base); this takes a minute, once."
  rm -f "$stamp" 2>/dev/null || true
  step "$base" -I -m venv --clear --without-pip "$venv"
  step "$python" -I -m ensurepip --default-pip
  say "Installing what requirements/${lock##*/} lists, among it:"
  output=$(pip_install 2>&1 </dev/null | progress) || fail "$(explain "$output")"
  say 'Compiling.'
  step "$python" -I -m compileall -q -j 0 "$packages"
  # attn and experiments are used from where they are, whatever the current directory.
  step write "$root" "$packages/attn-project.pth"
  step write "$(stamp_text "$version" "$base")" "$stamp"
  say "Set up in $SECONDS s."
}

# Waits until no other script sets up. The lock belongs to the open file, so it ends when this
# script and all that it started have ended.
lock_setup() {
  { exec 9>>"$venv.lock"; } 2>/dev/null ||
    fail "cannot write in $root: the disk is full, or you may not"
  "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return
  say "Waiting for another script that sets up $venv."
  step "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

bootstrap() {
  local chosen
  # The environment is the locked one, whatever the caller's shell would add to it.
  unset PYTHONPATH PYTHONHOME
  ready && return
  if [[ -n ${WHEELS:-} && -z $(find "$WHEELS/" -name '*.whl' -print -quit 2>/dev/null) ]]; then
    fail "WHEELS=$WHEELS is not a folder with wheels in it"
  fi
  choose_python
  chosen=("$version" "$base")
  lock_setup
  if ! ready; then
    version=${chosen[0]} base=${chosen[1]}
    make_venv
  fi
  exec 9>&-
}
