#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Takes away what install.sh has put in place: uninstall.sh. Configuration and measured devices stay
# (/etc/rushes, /var/lib/rushes), and it says so. $DESTDIR is honoured.
#
# Refused while something is in use, or while clients were told that bytes are safe which no disk has.
set -eu

dest=${DESTDIR:-}

die() { echo "uninstall.sh: $*" >&2; exit 1; }

[ -n "$dest" ] || [ "$(id -u)" -eq 0 ] || die "run this as root, or set DESTDIR."

smbd=$(command -v smbd || echo /usr/sbin/smbd)
modules=$("$smbd" -b 2>/dev/null | sed -n 's/^ *MODULESDIR: *//p')

if [ -z "$dest" ]; then
	if testparm -s --suppress-prompt 2>/dev/null |
		sed -n 's/^[[:space:]]*vfs objects *= *//p' | tr ' ' '\n' | grep -qx rushes; then
		die "smb.conf names the module: take rushes out of vfs objects, then" \
			"smbcontrol all reload-config, and let clients connect anew."
	fi
	if [ -d /run/systemd/system ]; then
		running=$(systemctl list-units --no-legend --plain --state=active,activating,reloading,deactivating 'rushes.service' 'rushes-pool*' |
			cut -d ' ' -f 1 | tr '\n' ' ')
		[ -z "$running" ] || die "still running: ${running}; systemctl disable --now $running"
	fi
	! grep -q ' - fuse\.rushes ' /proc/self/mountinfo ||
		die "a pool is mounted: umount it first (findmnt -t fuse.rushes shows where)."
	if [ -e /run/rushes/lock ] && ! flock --nonblock /run/rushes/lock true; then
		die "a daemon serves from /run/rushes, or something is being recovered: end that first."
	fi
	if [ -x /usr/bin/rushes ] && [ -e /etc/rushes/rushes.toml ]; then
		code=0
		left=$(/usr/bin/rushes recover --list 2>&1) || code=$?
		case $code in
		0) ;;
		1) die "acknowledged bytes are in memory alone:" "$left
write them with rushes recover, then repeat this." ;;
		*) die "it cannot be seen whether acknowledged bytes are in memory alone: $left" ;;
		esac
	fi
fi

rm -f "$dest/usr/bin/rushes" "$dest/usr/bin/rushes-lab"
for unit in rushes rushes-pool@ rushes-pool-nfs@ rushes-pool-iscsi@; do
	rm -f "$dest/lib/systemd/system/$unit.service"
done
rm -f "$dest"/usr/share/man/man1/rushes.1 "$dest"/usr/share/man/man1/rushes-*.1
rm -f "$dest/usr/share/bash-completion/completions/rushes" \
	"$dest/usr/share/zsh/vendor-completions/_rushes" \
	"$dest/usr/share/fish/vendor_completions.d/rushes.fish"
rm -rf "$dest/usr/share/doc/rushes"
[ -z "$modules" ] || rm -f "$dest$modules/vfs/rushes.so"
if [ -z "$dest" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
left=
for folder in etc/rushes var/lib/rushes; do
	[ -e "$dest/$folder" ] && left="$left $dest/$folder"
done
echo "uninstall.sh: done${left:+; configuration and measured devices are still there:$left};" \
	"a folder that a pool was mounted on with --protect is writable again after chattr -i FOLDER" >&2
