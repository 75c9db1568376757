#!/bin/sh
# The first process of the node's machine, in namespaces of its own for mounts, network, processes and the host name.
# Arguments: the folder with the machine's disk, and a file with the id of this boot.
# Prints this process's number on the host once the machine is up.
set -eu
disk=$1 boot_id=$2

# The host's /proc is still mounted here, so this is the number on the host.
read -r number rest </proc/self/stat

mount -t proc proc /proc
mount --bind "$boot_id" /proc/sys/kernel/random/boot_id
echo node1 >/proc/sys/kernel/hostname
# The kubelet sets these kernel settings, which belong to the whole host: let it write into files instead.
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    [ -e /proc/sys/$setting ] || continue
    mkdir -p "$disk/settings/${setting%/*}"
    cat /proc/sys/$setting >"$disk/settings/$setting"
    mount --bind "$disk/settings/$setting" /proc/sys/$setting
done
mount -t overlay -o "ro,lowerdir=$disk/etc:/etc" etc /etc
mount --bind "$disk/etc/cni" /etc/cni
mount --bind "$disk/opt" /opt
mount --bind "$disk/var-lib" /var/lib
mount --bind "$disk/var-log" /var/log
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs shm /dev/shm
mkdir /run/lock /run/netns

# A network card that leads to no other machine. The default route is for the next hop of routed pods, 169.254.1.1: a
# machine answers for an address only if it has a route to it.
ip link set lo up
ip link add card type veth peer name wire
ip link set wire up
ip address add 192.0.2.7/24 dev card
ip address add fd00:192::7/64 dev card nodad
ip link set card up
ip route add default via 192.0.2.1 dev card
ip -6 route add default via fd00:192::1 dev card
echo "$number"

# Keep waiting, so that orphaned processes are reaped and runtimes see them end.
while sleep 1; do :; done
