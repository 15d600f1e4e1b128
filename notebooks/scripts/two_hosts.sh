#!/bin/bash
# Runs one command on two hosts inside this machine: bash two_hosts.sh 'echo host $NODE_RANK'
# Each host is a network namespace with an address of its own and a link to the other host. This
# needs Linux, root and iproute2; without them, both commands run on this host, and a line says so.

[ $# = 1 ] || { echo "usage: bash two_hosts.sh 'COMMAND'"; exit 2; }
hosts=("ddp$$-0" "ddp$$-1")
export MASTER_ADDR=10.199.0.1 MASTER_PORT=$((20000 + $$ % 10000))

remove() {
    for pid in $(ip netns pids "$1"); do kill -9 "$pid"; done
    ip netns del "$1"
} 2>/dev/null

connect() {
    for host in $(ip netns list | grep -o '^ddp[0-9]*-[01]'); do  # left by a script that was killed
        pid=${host#ddp}; [ -d "/proc/${pid%-?}" ] || remove "$host"
    done
    ip netns add "${hosts[0]}" && ip netns add "${hosts[1]}" || return
    ip link add cable netns "${hosts[0]}" type veth peer name cable netns "${hosts[1]}" || return
    for n in 0 1; do
        ip -n "${hosts[n]}" addr add "10.199.0.$((n + 1))/30" dev cable || return
        ip -n "${hosts[n]}" link set cable up && ip -n "${hosts[n]}" link set lo up || return
        ip netns exec "${hosts[n]}" true || return
    done
}

clean_up() {
    trap '' INT TERM  # a second one must not end this
    for pid in "${started[@]}"; do kill -- "-$pid"; done  # - means all processes of its group
    for host in "${hosts[@]}"; do remove "$host"; done
    for pid in "${started[@]}"; do
        for _ in {1..30}; do kill -0 -- "-$pid" && sleep 0.1 || break; done
        kill -9 -- "-$pid"
    done
} 2>/dev/null

trap clean_up EXIT
trap 'exit 130' INT TERM
if connect 2>/dev/null; then
    export GLOO_SOCKET_IFNAME=cable
    enter="ip netns exec" addresses=(10.199.0.1 10.199.0.2)
else
    echo "Network namespaces are unavailable: both commands run on this host."
    export MASTER_ADDR=127.0.0.1
    enter= addresses=(127.0.0.1 127.0.0.1)
fi
set -m  # gives each command a process group of its own
for n in 0 1; do
    export NODE_RANK=$n LOCAL_ADDR=${addresses[n]}
    ${enter:+$enter ${hosts[n]}} bash -c "$1" </dev/null &
    started[n]=$!
done
wait "${started[0]}"; first=$?
wait "${started[1]}" && exit "$first"
