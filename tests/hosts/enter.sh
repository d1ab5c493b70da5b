#!/bin/sh
# enter.sh [-OPTION...] HOST COMMAND...: what a launcher of MPI calls in place of ssh: run a
# command on one of the hosts that tools/test_hosts.sh made.  MLSTATE_HOSTS lists them as
# NAME=PID; the process PID holds the namespaces of NAME.
while [ "${1#-}" != "$1" ]; do
    shift
done
host=$1
shift
for entry in $MLSTATE_HOSTS; do
    if [ "${entry%%=*}" = "$host" ]; then
        exec nsenter --target "${entry#*=}" --net --uts --ipc --mount \
            --wd="$PWD" sh -c "$*"
    fi
done
echo "enter.sh: no host $host in '$MLSTATE_HOSTS'" >&2
exit 1
