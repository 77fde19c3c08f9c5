#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Puts BUILD/rushes.so (or the file given) into smbd's own module folder: smbd
# loads VFS modules from nowhere else. A smbd that has the old one loaded keeps
# it: the file is replaced by a rename, never written over. $DESTDIR is
# honoured.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
module=${1:-${RUSHES_BUILD_DIR:-$root/build}/rushes.so}

die() { echo "install.sh: $*" >&2; exit 1; }

smbd=$(command -v smbd || echo /usr/sbin/smbd)
[ -f "$module" ] || die "there is no $module: run doors/smb/build.sh first."
folder=$("$smbd" -b 2>/dev/null | sed -n 's/^ *MODULESDIR: *//p')
[ -n "$folder" ] || die "'$smbd -b' does not say MODULESDIR: is that Samba's" \
	"smbd?"
folder=${DESTDIR:-}$folder/vfs
if cmp -s "$module" "$folder/rushes.so"; then
	exit 0
fi
mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ] ||
	die "cannot write to $folder: run this as root."

work=$(mktemp "$folder/.rushes.so.XXXXXX")
trap 'rm -f "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cp "$module" "$work"
chmod 644 "$work"
mv -f "$work" "$folder/rushes.so"
echo "install.sh: $folder/rushes.so" >&2
