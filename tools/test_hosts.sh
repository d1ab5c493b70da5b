#!/usr/bin/env bash
# test_hosts.sh PYTHON [PYTEST_ARGS...]: run the tests of tests/hosts/ on two "hosts" of this
# machine.  Each is a set of namespaces: network, hostname, IPC, and mounts with a separate
# /dev/shm, so that memory cannot be shared by mistake; a veth pair is the only connection.
#
# Everything runs in a process namespace, whose first process runs this script a second time.
# When that process ends for any reason, the kernel ends every process inside, and with them the
# namespaces, the interfaces and the mounts disappear.  Nothing is written outside.
set -euo pipefail

skip() {
    echo "skipped test-hosts: $1"
    exit 0
}

if [ "${MLSTATE_HOSTS_INSIDE:-}" != yes ]; then
    [ "$(uname -s)" = Linux ] || skip "network namespaces are Linux's"
    [ "$(id -u)" = 0 ] || skip "only root can make network namespaces"
    for tool in ip unshare nsenter; do
        command -v "$tool" >/dev/null || skip "no $tool here; apt-get install iproute2 util-linux"
    done
    unshare --net --uts --ipc --mount --pid --fork --mount-proc true 2>/dev/null ||
        skip "this system makes no namespaces (a container without CAP_SYS_ADMIN?)"
    unshare --net ip link add probe0 type veth peer name probe1 2>/dev/null ||
        skip "this kernel has no veth interfaces"
    cd "$(dirname "$0")/.."
    export MLSTATE_HOSTS_INSIDE=yes
    exec unshare --pid --fork --kill-child --mount --mount-proc tools/test_hosts.sh "$@"
fi

trap 'exit 130' INT
trap 'exit 143' TERM
python=$1
shift

# host NAME: start a host; sets `pid` to the process that holds its namespaces.
host() {
    unshare --net --uts --ipc --mount sleep infinity &
    pid=$!
    until [ "$(readlink "/proc/$pid/ns/net")" != "$(readlink /proc/self/ns/net)" ] &&
        [ "$(cat "/proc/$pid/comm")" = sleep ]; do
        sleep 0.01
    done
    nsenter --target "$pid" --net --uts --ipc --mount sh -euc "
        echo $1 >/proc/sys/kernel/hostname
        mount -t sysfs sysfs /sys
        mount -t tmpfs -o size=512m tmpfs /dev/shm
        printf '127.0.0.1 localhost\n10.213.0.1 mls-a\n10.213.0.2 mls-b\n' >/dev/shm/hosts
        mount --bind /dev/shm/hosts /etc/hosts
        ip link set lo up"
}

host mls-a && a=$pid
host mls-b && b=$pid
nsenter --target "$a" --net ip link add veth0 type veth peer name veth0 netns "$b"
nsenter --target "$a" --net ip addr add 10.213.0.1/24 dev veth0
nsenter --target "$b" --net ip addr add 10.213.0.2/24 dev veth0
nsenter --target "$a" --net ip link set veth0 up
nsenter --target "$b" --net ip link set veth0 up
for pid in "$a" "$b"; do # the kernel takes up to a second to report the carrier
    until nsenter --target "$pid" --net ip link show veth0 | grep -q 'state UP'; do
        sleep 0.05
    done
done

export MLSTATE_HOSTS="mls-a=$a mls-b=$b"
"$python" -m pytest -p no:cacheprovider tests/hosts "$@" &
wait $!
