#!/bin/sh
# Make a virtual environment in $1 with the first Python that is new enough. PYTHON=… names another one.
set -eu

# `python3` first: it is what the reader's machine calls Python. The others help where it is too old.
find_python() {
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "bullpen needs Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python3 …" >&2
  return 1
}

python=$(find_python)

# Debian keeps ensurepip in a package of its own. Without it `venv` fails half-way and leaves a broken directory behind.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  if [ "$(id -u)" = 0 ]; then run=""; elif sudo -n true 2>/dev/null; then run="sudo -n"; else run="none"; fi
  if [ "$run" = none ] || ! command -v apt-get >/dev/null; then
    echo "$python cannot make virtual environments; install $package (apt-get install $package)" >&2
    exit 1
  fi
  echo "installing $package"
  $run apt-get update -qq
  $run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null
fi

"$python" -m venv "$1"
