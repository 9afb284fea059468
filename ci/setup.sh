# Sourced by ci/test and ci/demo, from the root of the checkout. Makes the virtual environment .venv (or
# $PORTABLE_VENV), with the checkout installed in it in editable mode. Running it again costs a second: a stamp
# holds what the environment was made from (first line) and the hash of the files that say what goes in (second).
# PYTHON names the interpreter to start from; a torch that it can import is used and never replaced.
# shellcheck shell=bash

say() { printf '\n== %s\n' "$*"; }
fail() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    (($#)) && printf '       %s\n' "$@" >&2
    exit 1
}

venv=${PORTABLE_VENV:-$PWD/.venv}
python=$venv/bin/python
log=$venv/setup.log
stamp=$venv/portable.stamp

find_python() {
    local found="" name names="python3 python3.13 python3.12 python3.11 python3.10"
    for name in ${PYTHON:-$names}; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && base=$name && return
        [ -n "$found" ] || found=$("$name" --version 2>/dev/null | head -n 1 || true)
    done
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not Python 3.10 or newer; it says: ${found:-nothing}." \
        "Name another interpreter, or leave PYTHON unset."
    fail "Python 3.10 or newer is needed; found: ${found:-none}." \
        "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python $0"
}

# Free disk of at least $1 GB where the environment goes.
need_disk() {
    local free
    mkdir -p "$(dirname "$venv")" || fail "$(dirname "$venv") cannot be made." "Name another folder: PORTABLE_VENV=/path $0"
    free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1000000) }')
    ((free >= $1)) || fail "$1 GB of free disk are needed for the virtual environment; $(dirname "$venv") has $free GB." \
        "Free some space, or put it elsewhere: PORTABLE_VENV=/path/to/folder $0"
}

# pip with its own configuration (indexes, find-links, constraints), quiet but for failures.
pip_install() {
    printf '\n# pip install %s\n' "$*" >>"$log"
    "$python" -m pip --no-input --disable-pip-version-check install --progress-bar off "$@" >>"$log" 2>&1
}
no_answer() { # whether the last pip_install failed for want of a network
    awk '/^# pip install/ { text = "" } { text = text $0 "\n" } END { printf "%s", text }' "$log" | grep -qiE 'connection (broken|refused|reset)|timed out|name resolution|network is unreachable'
}
pip_failed() {
    no_answer && fail "no package index answered, so pip could not install $1." \
        "Check the network, or pip's settings ($python -m pip config list); pip's output is in $log."
    tail -n 15 "$log" >&2
    fail "pip could not install $1; its last lines are above, all of them in $log."
}

# A torch of at least 2.11 that the starting interpreter has: prints its version.
installed_torch() {
    "$1" -c 'import re, torch; v = torch.__version__; print(v) if tuple(map(int, re.findall(r"\d+", v)[:2])) >= (2, 11) else exit(1)' \
        2>/dev/null
}

make_venv() {
    local options="" site
    if [ -n "$torch" ]; then
        echo "torch $torch of $(command -v "$base") is used as it is: the environment sees that interpreter's packages"
        options=--system-site-packages
        need_disk 2
    else
        need_disk 4
    fi
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then # of another Python or torch, or not finished
        [ -e "$log" ] || fail "$venv was not made by this script, which would have to empty it." \
            "Name a folder that does not exist yet: PORTABLE_VENV=/path/to/folder $0"
        options+=" --clear"
    fi
    # shellcheck disable=SC2086
    "$base" -m venv $options "$venv" || fail "python -m venv failed for $venv." \
        "Its message is above; on Debian and Ubuntu, apt-get install python3-venv is the usual remedy."
    date >"$log"
    if [ -n "$torch" ] && ! installed_torch "$python" >/dev/null; then # it lives in another virtual environment
        site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$base" -c 'import sysconfig; print(*{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}, sep="\n")' \
            >"$site/portable-base.pth"
    fi
}

# A build for the CPU where pip's indexes have one and no GPU is here; else the one that pip takes by itself.
install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' ci/constraints.txt)
    if [ ! -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null; then
        [ -e /dev/kfd ] && echo "note: an AMD GPU is here, but no torch for it. To use it, install torch's ROCm build" \
            "for $base, remove $venv and start again."
        say "set-up: torch $version, CPU build"
        pip_install "torch==$version+cpu" && return
        no_answer && pip_failed "torch $version"
        echo "pip's indexes have no separate CPU build; the default one is taken, which on Linux may be several GB"
    fi
    [ "$(uname -s)" != Linux ] || need_disk 12
    say "set-up: torch $version"
    pip_install "torch==$version" || pip_failed "torch $version"
}

# Everything that the project declares, except what is there under another distribution's name (AMD's builds of torch
# bring triton as a distribution of another name, which PyPI's triton would overwrite).
requirements() {
    "$python" - <<'PY'
from importlib import metadata, util
from packaging.requirements import Requirement

for requirement in map(Requirement, metadata.requires("portable-attention")):
    wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in ("cli", "conformance", "demo", "test"))
    if wanted and not (requirement.name in ("torch", "triton") and util.find_spec(requirement.name)):
        requirement.marker = None
        print(requirement)
PY
}

setup() {
    local base torch start files held=$venv/constraints.txt
    find_python
    torch=$(installed_torch "$base" || true)
    start="$PWD $venv $torch $("$base" -VV | tr '\n' ' ')"
    files=$(cat ci/constraints.txt ci/setup.sh pyproject.toml setup.py | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$start"$'\n'"$files" ]; then
        say "set-up: $venv is up to date"
        return
    fi
    say "set-up: a virtual environment in $venv, from $("$base" --version) ($(command -v "$base"))"
    if [ "$(head -n 1 "$stamp" 2>/dev/null)" != "$start" ]; then
        make_venv
        echo "$start" >"$stamp"
    fi
    installed_torch "$python" >/dev/null || install_torch
    say "set-up: the project and what it needs (pip's output: $log)"
    {   # from here on torch and triton are held at what is installed
        grep -v -E '^(torch|triton)==' ci/constraints.txt
        "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))'
        "$python" -c 'import triton' 2>/dev/null || grep '^triton==' ci/constraints.txt
    } >"$held"
    pip_install -c "$held" setuptools packaging || pip_failed "setuptools and packaging"
    pip_install --no-deps --no-build-isolation --editable . || pip_failed "the project itself"
    requirements >"$venv/requirements.txt" || fail "the project's own requirements could not be read"
    pip_install -c "$held" -r "$venv/requirements.txt" || pip_failed "the project's requirements"
    printf '%s\n%s\n' "$start" "$files" >"$stamp"
}

setup
