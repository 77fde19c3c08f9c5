#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Puts programs, module, service, man pages and completions in place: install.sh FOLDER-OF-PROGRAMS.
# Nothing of the machine's own configuration is overwritten. $DESTDIR is honoured.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
bin=${1:?usage: install.sh FOLDER-OF-PROGRAMS}
dest=${DESTDIR:-}

die() { echo "install.sh: $*" >&2; exit 1; }

[ -x "$bin/rushes" ] || die "there is no $bin/rushes: run make server first (or make build)."
[ -n "$dest" ] || [ "$(id -u)" -eq 0 ] || die "run this as root, or set DESTDIR."

# A running program cannot be written to; install(1) replaces it, and who runs it keeps the old one.
install -D -m 755 "$bin/rushes" "$dest/usr/bin/rushes"
if [ -x "$bin/rushes-lab" ]; then
	install -D -m 755 "$bin/rushes-lab" "$dest/usr/bin/rushes-lab"
fi
install -D -m 644 "$here/rushes.service" "$dest/lib/systemd/system/rushes.service"
for unit in "rushes-pool@" "rushes-pool-nfs@" "rushes-pool-iscsi@"; do
	install -D -m 644 "$here/$unit.service" "$dest/lib/systemd/system/$unit.service"
done
install -D -m 644 "$here/rushes.toml" "$dest/usr/share/doc/rushes/examples/rushes.toml"
install -D -m 644 "$here/smb.conf.sample" "$dest/usr/share/doc/rushes/examples/smb.conf.sample"
# The guide, the reference and the decisions. (Messages name these pages; links to sources lead nowhere here.)
for folder in guide reference decisions decisions/detail decisions/measured images; do
	for page in "$root/docs/$folder"/*.*; do
		install -D -m 644 "$page" "$dest/usr/share/doc/rushes/docs/$folder/${page##*/}"
	done
done
for page in PROMISES HISTORY; do
	install -D -m 644 "$root/bench/$page.md" "$dest/usr/share/doc/rushes/bench/$page.md"
done
if [ ! -e "$dest/etc/rushes/rushes.toml" ]; then
	install -D -m 644 "$here/rushes.toml" "$dest/etc/rushes/rushes.toml"
fi

"$bin/rushes" man --out "$dest/usr/share/man/man1"
completions() { # SHELL FILE
	mkdir -p "$(dirname "$dest/usr/share/$2")"
	"$bin/rushes" completions "$1" >"$dest/usr/share/$2"
}
completions bash bash-completion/completions/rushes
completions zsh zsh/vendor-completions/_rushes
completions fish fish/vendor_completions.d/rushes.fish

if [ -f "${RUSHES_BUILD_DIR:-$root/build}/rushes.so" ]; then
	"$root/doors/smb/install.sh"
else
	echo "install.sh: the Samba module was not built; doors/smb/build.sh makes it" >&2
fi

if [ -z "$dest" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
echo "install.sh: done; next: edit /etc/rushes/rushes.toml, rushes check, systemctl enable --now rushes" >&2
