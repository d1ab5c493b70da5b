#!/usr/bin/env bash
# arm64.sh PYTHON [PYTEST ARGUMENTS]: build the extension for arm64 and run its tests under qemu.
#
# All files are below build/arm64; nothing is installed. apt uses package lists in that folder,
# so the system needs no second architecture:
#   root   Debian's arm64 Python with its libraries and headers, unpacked by dpkg -x
#   site   NumPy and the test tools: the manylinux wheels of aarch64
#   work   the package with the module that aarch64-linux-gnu-gcc compiles, and the tests
# A test that starts sys.executable starts build/arm64/python, a script that runs qemu again.
# Not tested: speed, and code that depends on arm64's memory order (under qemu the order of this
# machine applies).
set -euo pipefail
host=$1
shift
here=$PWD/build/arm64
root=$here/root
mkdir -p "$here"

for tool in qemu-aarch64 aarch64-linux-gnu-gcc apt-get dpkg; do
    command -v "$tool" >/dev/null || {
        echo "arm64: '$tool' not found; on Debian: apt-get install qemu-user" \
            "gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2
        exit 1
    }
done

apt_arm64() { # apt_arm64 COMMAND ARGUMENTS...: an apt command with separate state
    local command=$1 state=$here/apt
    shift
    "$command" -qq -o Dir::State="$state" -o Dir::State::status="$state/status" \
        -o Dir::Cache="$state/cache" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::sourcelist="$state/sources.list" -o APT::Sandbox::User=root \
        -o APT::Architecture=arm64 -o APT::Architectures=arm64 "$@"
}

unpack_python() { # Debian's arm64 Python, with its dependencies according to apt
    local suite name
    suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    rm -rf "$here/apt" "$root"
    mkdir -p "$here/apt/lists/partial" "$here/apt/cache/archives/partial" "$root"
    touch "$here/apt/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
        "http://deb.debian.org/debian $suite main" >"$here/apt/sources.list"
    apt_arm64 apt-get update
    name=$(apt_arm64 apt-cache depends python3-minimal |
        sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal$/\1/p')
    apt_arm64 apt-get install -y --download-only --no-install-recommends \
        "$name-minimal" "lib$name-stdlib" libstdc++6 >/dev/null
    (cd "$here/apt/cache/archives" && apt_arm64 apt-get download "lib$name-dev")
    for package in "$here"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$root"
    done
    cat >"$here/python" <<SCRIPT
#!/bin/sh
export PYTHONHOME='$root/usr'
exec qemu-aarch64 -L '$root' -0 '$here/python' '$root/usr/bin/$name' "\$@"
SCRIPT
    chmod +x "$here/python"
}

unpack_wheels() { # NumPy and the test tools, chosen by pip for aarch64
    local numpy version tag platforms=()
    numpy=$(grep '^numpy==' requirements/demo.txt)
    version=$("$here/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${tag}_aarch64")
    done
    rm -rf "$here/site"
    "$host" -m pip --disable-pip-version-check install -q --target "$here/site" \
        --only-binary=:all: --python-version "$version" "${platforms[@]}" \
        "$numpy" pytest pytest-timeout hypothesis
}

build_module() { # the core as tools/core.mk compiles it, and the binding
    local suffix include objects
    export PYTHONPATH=$here/site
    suffix=$("$here/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    include=$("$here/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    unset PYTHONPATH
    make --no-print-directory -s -j2 -f tools/core.mk BUILD="$here/core" OPT=-O2 \
        CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar lib
    local flags=(-std=c11 -O2 -fPIC -ffp-contract=off -fvisibility=hidden -D_GNU_SOURCE
        -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION -DNPY_TARGET_VERSION=NPY_2_0_API_VERSION
        -DPY_ARRAY_UNIQUE_SYMBOL=mlspy_array_api -Icsrc/core -Icsrc/python
        -isystem "$here/site/numpy/_core/include" -isystem "$include"
        -isystem "$root/usr/include")
    rm -rf "$here/work" "$here/binding"
    mkdir -p "$here/work"
    find csrc/python -type d -printf "$here/binding/%P\0" | xargs -0 mkdir -p
    find csrc/python -name '*.c' -printf '%P\n' | xargs -P 2 -I FILE \
        aarch64-linux-gnu-gcc "${flags[@]}" -c csrc/python/FILE -o "$here/binding/FILE.o"
    tar -c --exclude='*.so' --exclude=__pycache__ mlstate tests pyproject.toml README.md docs |
        tar -x -C "$here/work"
    mapfile -t objects < <(find "$here/binding" -name '*.o' | sort)
    aarch64-linux-gnu-gcc -shared "${objects[@]}" "$here/core/libmlstate.a" -lpthread -lm \
        -o "$here/work/mlstate/_core$suffix"
}

stamp=$here/.ready-$(cksum tools/arm64.sh requirements/demo.txt | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
    unpack_python
    unpack_wheels
    touch "$stamp"
fi
build_module
echo "ok  arm64: the extension is compiled"

if [ $# = 0 ]; then
    set -- tests/kv/test_transition.py tests/kv/test_kv_state.py tests/state/test_state.py tests/state/test_diff.py \
        tests/state/test_load_into.py tests/checkpoint/test_checkpoint.py tests/checkpoint/files/test_overwrite.py
fi
cd "$here/work"
export PYTHONPATH=$here/work:$here/site HOME=$here/work
"$here/python" -m pytest -q -p no:cacheprovider \
    -m "not long and not slow and not torch and not coremltools" "$@"
