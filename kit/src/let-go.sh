#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Unmounts the mounts of other tests, of other rooms of the lab and of its disks,
# deepest first, in the mount namespace that it runs in: those disks could not end
# before the namespace does.
#
#   let-go.sh [FOLDER...] [-- COMMAND...]   and becomes the command
#   let-go.sh --list [FOLDER...]            prints those of the mountinfo on its
#                                           input, and unmounts nothing
#
# A mount stays that lies below such a folder (a real path), or on which such a
# folder lies. So does every mount that is neither of a test nor of the lab. A
# test's folder is called rushes-tests.PID.SERIAL, a room of the lab
# rushes-lab.PID-SERIAL, wherever they lie. The mounts of the lab's disks are in
# one place; a file system on such a disk needs the loop device alone.
#
# The list is made inside the namespace, since a mount that another program makes
# while that is copied would be missing from one made before. It is complete
# before the first mount goes: the kernel makes mountinfo while it is read.
others() { # FOLDER... [-- ...]
	awk '
	BEGIN {
		for (i = 1; i < ARGC && ARGV[i] != "--"; i++)
			keeps[++keep_count] = ARGV[i] "/"
		ARGC = 1
	}
	{
		place = $5
		gsub(/\\040/, " ", place)
		is_other = place ~ /\/rushes-tests\.[0-9]+\.[0-9]+(\/|$)/ ||
			place ~ /\/rushes-lab\.[0-9]+-[0-9]+(\/|$)/ ||
			place ~ /^\/run\/rushes-lab\/disks\/./
		for (i = 1; i <= keep_count; i++)
			if (index(place "/", keeps[i]) == 1 || index(keeps[i], place "/") == 1)
				is_other = 0
		if (is_other)
			others[++count] = place
	}
	END {
		for (i = count; i > 0; i--)
			print others[i]
	}' "$@"
}

if [ "${1:-}" = --list ]; then
	shift
	others "$@"
	exit
fi
found=$(others "$@" </proc/self/mountinfo)
printf '%s\n' "$found" | while IFS= read -r other; do umount -l "$other"; done 2>/dev/null
while [ $# -gt 0 ]; do
	word=$1
	shift
	[ "$word" != -- ] || exec "$@"
done
exit 0
