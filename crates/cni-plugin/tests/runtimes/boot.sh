#!/bin/sh
# The first process of a machine of the tests, in namespaces of its own for mounts, network and processes. What a
# machine keeps on its disk is in the folder that is the first argument; the second is a file with the id of this boot.
# The first line on standard output is this process's number on the host, once the machine is up.
set -eu
disk=$1 boot_id=$2

# As the host's /proc has it, which is the one that is still mounted here.
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

# Waiting, so that processes without a parent are not left as zombies, and runtimes see them end.
while sleep 1; do :; done
