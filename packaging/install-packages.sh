#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Install the Debian packages of packaging/packages.txt that are missing.
#
#   install-packages.sh [PACKAGE...]   and these, for what is not done every day
#   install-packages.sh --list         print them
#
# Quick and silent when nothing is missing: no network, no root. The package lists are refreshed
# only when there are none or a package is not found in them. Services of newly installed packages are not
# started: installing a build tool must not open port 445 of this machine to its network.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

list="$(cd "$(dirname "$0")" && pwd)/packages.txt"

more=("$@")
wanted() {
	sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$list"
	[ ${#more[@]} -eq 0 ] || printf '%s\n' "${more[@]}"
}

missing() {
	comm -23 <(wanted | sort -u) \
		<(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null |
			sed -n 's/^installed //p' | sort -u)
}

if [ "${1:-}" = --list ]; then
	more=()
	wanted
	exit
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
	echo "install-packages: this is not Debian (no dpkg-query or apt-get)." \
		"Install what $list names by your own means, then go on with 'make server'." >&2
	exit 1
fi

mapfile -t packages < <(missing)
if [ ${#packages[@]} -eq 0 ]; then
	echo "packages: all $(wanted | wc -l) installed"
	exit
fi

root=()
if [ "$(id -u)" -ne 0 ]; then
	if ! command -v sudo >/dev/null; then
		echo "install-packages: not root and no sudo; as root, run:" \
			"apt-get install --no-install-recommends ${packages[*]}" >&2
		exit 1
	fi
	root=(sudo "--preserve-env=DEBIAN_FRONTEND,LC_ALL")
fi

policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	trap '"${root[@]}" rm -f "$policy"' EXIT
	printf '#!/bin/sh\n# Left by Rushes packaging/install-packages.sh; may be removed.\nexit 101\n' |
		"${root[@]}" tee "$policy" >/dev/null
	"${root[@]}" chmod 755 "$policy"
fi

install() {
	"${root[@]}" apt-get install --yes --quiet --no-install-recommends \
		-o Dpkg::Use-Pty=0 "${packages[@]}"
}

echo "packages: installing ${#packages[@]}: ${packages[*]}"
if ! apt-cache show "${packages[@]}" >/dev/null 2>&1 || ! install; then
	echo "packages: the package lists are missing or old; refreshing them"
	"${root[@]}" apt-get update --quiet
	install
fi

mapfile -t packages < <(missing)
if [ ${#packages[@]} -ne 0 ]; then
	echo "install-packages: still missing after the installation: ${packages[*]}" >&2
	exit 1
fi
