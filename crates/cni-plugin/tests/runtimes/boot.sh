#!/bin/sh
# The first process of a test machine, in its own namespaces for mounts, network and processes.
# Arguments: the folder with the machine's disk, and a file with the id of this boot.
# Prints this process's number on the host once the machine is up.
set -eu
disk=$1 boot_id=$2

# The host's /proc is still mounted here, so this is the number on the host.
read -r number rest </proc/self/stat

mount -t proc proc /proc
mount --bind "$boot_id" /proc/sys/kernel/random/boot_id
mount -t overlay -o "ro,lowerdir=$disk/etc:/etc" etc /etc
mount --bind "$disk/etc/cni" /etc/cni
mount --bind "$disk/opt" /opt
mount --bind "$disk/var-lib" /var/lib
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs shm /dev/shm
mkdir /run/lock
ip link set lo up
echo "$number"

# Keep waiting, so that orphaned processes are reaped and runtimes see them end.
while sleep 1; do :; done
