#!/usr/bin/env bash
# Makes .venv with everything users and tests need: PyTorch, this project, Ray, FFCV, the test tools.
#
#   bash setup.sh                     idempotent: a second run costs seconds, an interrupted one is resumed
#   PYTHON=python3.13 bash setup.sh   with another Python (3.11 or newer)
#
# On Debian and Ubuntu it installs the system packages that are missing (as root, or through sudo).
# Without them FFCV alone is left out: images are then read by the resident loader.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(pwd -P)
exec 9<setup.sh && flock 9 # two set-ups of one folder take turns

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*" && exit 1; }
pip() { .venv/bin/python -m pip "$@" -qq --disable-pip-version-check --no-input; }

# Installs Debian packages; fails, with one sentence, where that cannot be done.
apt_install() {
  local sudo=() log
  command -v apt-get >/dev/null || { say "no apt-get here; not installed: $*" && return 1; }
  if ((EUID != 0)); then
    sudo=(sudo)
    [[ -t 0 ]] || sudo=(sudo -n) # nobody there to type a password
    "${sudo[@]}" true 2>/dev/null || { say "neither root nor sudo; not installed: $*" && return 1; }
  fi
  say "installing system packages: $*"
  log=$(mktemp)
  if ! {
    "${sudo[@]}" apt-get update -q &&
      "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 \
        install -y -q --no-install-recommends "$@"
  } >"$log" 2>&1 </dev/null; then
    tail -n 5 "$log" >&2
    say "apt-get could not install: $* (all it said: $log)"
    return 1
  fi
  rm -f "$log"
}

find_python() {
  python=${PYTHON:-python3}
  if ! command -v "$python" >/dev/null || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is no Python that can make virtual environments"
    apt_install python3 python3-venv || die "python3 and its venv module are needed: install them"
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old: Python 3.11 or newer is needed (set PYTHON=…)"
}

# Keeps a .venv that works, is this folder's own and has the Python asked for.
make_venv() {
  local whole='import pip, sys; sys.exit(sys.argv[1] != sys.prefix or sys.version_info < (3, 11))'
  if .venv/bin/python -c "$whole" "$root/.venv" 2>/dev/null &&
    [[ -z ${PYTHON:-} || $("$python" --version) == "$(.venv/bin/python --version)" ]]; then
    return
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
}

# A package without its RECORD was cut short in an earlier run: forget it, so that pip lays it anew.
forget_cut_short() {
  local info
  for info in .venv/lib/python*/site-packages/*.dist-info; do
    [[ ! -d $info || -e $info/RECORD ]] || { say "again: $(basename "$info")" && rm -rf "$info"; }
  done
}

install_project() {
  forget_cut_short
  pip uninstall --yes ffcv # built anew below, for what is installed by then
  say "installing PyTorch (gigabytes: minutes)"
  pip install 'torch>=2.11' 'torchvision>=0.26'
  say "installing the project, Ray and the test tools"
  pip install --editable '.[study,ray,dev]'
}

# FFCV compiles against OpenCV's and TurboJPEG's headers. It needs two modules of OpenCV only: the shim
# names just those, so that 14 small packages do instead of some 200.
install_ffcv() {
  local missing=() headers=/usr/include/opencv4 shim=$root/.venv/ffcv-shim
  command -v g++ >/dev/null || missing+=(g++)
  command -v pkg-config >/dev/null || missing+=(pkg-config)
  [[ -e $headers/opencv2/core.hpp ]] || missing+=(libopencv-core-dev)
  [[ -e $headers/opencv2/imgproc.hpp ]] || missing+=(libopencv-imgproc-dev)
  [[ -e /usr/include/turbojpeg.h ]] || missing+=(libturbojpeg0-dev)
  .venv/bin/python -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
    missing+=("python$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev")
  ((${#missing[@]} == 0)) || apt_install "${missing[@]}" || return 1

  mkdir -p "$shim/opencv2"
  printf '#include <opencv2/core.hpp>\n#include <opencv2/imgproc.hpp>\n' >"$shim/opencv2/opencv.hpp"
  cat >"$shim/opencv4.pc" <<PC
Name: opencv4
Description: the two modules that FFCV uses
Version: 4
Cflags: -I$shim -I$headers
Libs: -lopencv_imgproc -lopencv_core
PC
  say "building FFCV"
  # Its own list asks for OpenCV's desktop build, which needs a screen's libraries: hence --no-deps.
  # A cached wheel may belong to another system's OpenCV: hence --no-cache-dir.
  pip install opencv-python-headless pillow setuptools numba \
    terminaltables pytorch-pfn-extras fastargs assertpy tqdm psutil || return 1
  PKG_CONFIG_PATH=$shim pip install --no-deps --no-cache-dir ffcv==1.0.2 || return 1
  .venv/bin/python -W ignore -c 'import ffcv' || return 1
}

find_python
make_venv
wanted=$({ echo "$root" && .venv/bin/python --version && cat pyproject.toml setup.sh; } | sha256sum)
done_already() { [[ $(cat ".venv/.done-$1" 2>/dev/null) == "$wanted" ]]; }
if ! done_already project; then
  install_project
  echo "$wanted" >.venv/.done-project
fi
if ! done_already ffcv; then
  if install_ffcv; then
    echo "$wanted" >.venv/.done-ffcv
  else
    say "going on without FFCV: images are read by the resident loader (run this again to retry)"
  fi
fi
if ! done_already loops; then
  say "compiling the CPU loops (half a minute, once)"
  .venv/bin/python -c 'import kernels; kernels.prepare()'
  echo "$wanted" >.venv/.done-loops
fi
echo "ready: .venv/bin/engine run --study digits_bn_vs_nobn"
