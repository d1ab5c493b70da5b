#!/bin/sh
# If a tool to build mlstate is missing, stop with one line that names it and how to install it.
set -u
python=${PYTHON:-python3}
cc=${CC:-cc}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

missing() {
    echo "mlstate cannot be built here: $1" >&2
    exit 1
}

# hint DEBIAN-PACKAGES MAC-COMMAND
hint() {
    if [ "$(uname -s)" = Darwin ]; then
        echo "$2"
    elif command -v apt-get >/dev/null 2>&1; then
        echo "apt-get install $1"
    elif command -v dnf >/dev/null 2>&1; then
        echo "dnf install gcc make python3-devel"
    else
        echo "install what your system calls: $1"
    fi
}

"$python" -c 'pass' 2>/dev/null ||
    missing "no Python at '$python'; $(hint 'python3 python3-venv python3-dev' 'brew install python'), or name one: make PYTHON=/path/to/python3"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    missing "'$python' is Python $("$python" -c 'import platform; print(platform.python_version())'), and 3.11 or newer is needed; name a newer one: make PYTHON=python3.12"

"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    missing "'$python' has no venv module; $(hint "$("$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')" 'brew install python')"

echo 'int main(void) { return 0; }' >"$work/a.c"
$cc "$work/a.c" -o "$work/a" 2>/dev/null ||
    missing "no working C compiler ('$cc'); $(hint 'gcc libc6-dev' 'xcode-select --install'), or name one: make CC=clang"

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
platform_include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platinclude"))')
printf '#include <Python.h>\nint x;\n' >"$work/b.c"
if ! $cc -I"$include" -I"$platform_include" -c "$work/b.c" -o "$work/b.o" 2>/dev/null; then
    [ -f "$include/Python.h" ] &&
        missing "'$cc' cannot compile Python's headers in $include; use the compiler that Python was built with: make CC=gcc"
    missing "no Python.h for '$python'; $(hint "$("$python" -c 'import sys; print("python3.%d-dev" % sys.version_info[1])')" 'brew install python')"
fi
