#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Unmounts the mounts of other tests and of the lab, in the mount namespace that
# it runs in: their disks would not end before the namespace does. The list is
# complete before the first one goes. kit/src/mounts.rs does so in Rust.
others=$(awk '$5 ~ /\/rushes-(tests|lab)[.\/]/ { print $5 }' /proc/self/mountinfo | tac)
printf '%s\n' "$others" | while IFS= read -r other; do umount -l "$other"; done 2>/dev/null
exit 0
