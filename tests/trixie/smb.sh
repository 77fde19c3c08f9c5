#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The module for Debian 13's Samba: Debian 13 in a folder, everything built in
# it, and tests/smb there. Of no part of `make test`: it asks the network for a
# gigabyte of packages, once.
#
#   smb.sh                 all of tests/smb
#   smb.sh SCRIPT...       these scripts of it (stack.sh, torture.sh, ...)
#
# The folder is BUILD/trixie (BUILD: $RUSHES_BUILD_DIR or build/ of the
# checkout) and is kept; `rm -rf` of it is all that is needed to begin anew.
# Packages come from the mirror that this machine's own apt uses; Rust, the
# crates and the programs are this machine's, as `make build` made them (Debian
# 13 itself has Rust 1.85). Mounts are made in a mount
# namespace of their own, processes in a process namespace: both end with this
# script, however it ends.
set -euo pipefail

script=$(basename "$0")
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${RUSHES_BUILD_DIR:-$root/build}
suite=trixie
place=$build/trixie
chroot=$place/root

die() { echo "$script: FAILED: $*" >&2; exit 1; }
skip() {
	[[ ${RUSHES_TEST_ALL:-} == 1 ]] && die "$* (and RUSHES_TEST_ALL is set)"
	echo "$script: SKIPPED: $*" >&2
	exit 0
}

# ---- 2. inside the namespaces: mounts, then a shell in the folder ----

if [[ ${1:-} == --inside ]]; then
	shift
	cargo_home=$1 rustup_home=$2
	shift 2
	"$root/kit/src/let-go.sh"
	# Its root is a mount, so that namespaces can be made in it.
	mount --bind "$chroot" "$chroot"
	mount -t proc proc "$chroot/proc"
	mount --rbind /sys "$chroot/sys"
	mount --rbind /dev "$chroot/dev"
	mount -t tmpfs tmpfs "$chroot/run"
	# The checkout lies where it lies outside, so that cargo knows it again.
	for folder in "$root" "$cargo_home" "$rustup_home"; do
		mkdir -p "$chroot$folder"
		mount --bind "$folder" "$chroot$folder"
	done
	exec chroot "$chroot" /usr/bin/env -i \
		PATH="$cargo_home/bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/root \
		LANG=C.UTF-8 CARGO_HOME="$cargo_home" RUSTUP_HOME="$rustup_home" \
		CARGO_TARGET_DIR="$place/target" RUSHES_BUILD_DIR="$place/build" \
		RUSHES_TEST_ALL="${RUSHES_TEST_ALL:-1}" "$@"
fi

in_chroot() {
	unshare --mount --propagation private --pid --fork --kill-child \
		"$root/tests/trixie/$script" --inside "$cargo_home" "$rustup_home" "$@"
}

# ---- 1. outside: the folder ----

[[ $(id -u) -eq 0 ]] || skip "needs root: it makes a Debian 13 in a folder"
command -v debootstrap >/dev/null || skip "needs debootstrap: apt-get install debootstrap"
rushes=${CARGO_TARGET_DIR:-$root/target}/release/rushes
[[ -x $rushes ]] || skip "needs $rushes: make build"
command -v cargo >/dev/null || skip "needs cargo: packaging/check-rust.sh"
cargo_home=${CARGO_HOME:-$HOME/.cargo}
rustup_home=${RUSTUP_HOME:-$HOME/.rustup}

mkdir -p "$place/build" "$place/target"
exec 9>"$place/.lock"
flock 9

# The mirror of this machine's own release, as apt has it.
mirror_of_system() {
	local codename file
	codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
	for file in /etc/apt/sources.list.d/*.sources; do
		[[ -e $file ]] || continue
		awk -v RS= -v codename="$codename" '{
			uri = ""; fits = 0
			lines = split($0, line, "\n")
			for (i = 1; i <= lines; i++) {
				words = split(line[i], word, /[ \t]+/)
				if (word[1] == "URIs:") uri = word[2]
				if (word[1] == "Suites:")
					for (j = 2; j <= words; j++) if (word[j] == codename) fits = 1
			}
			if (fits && uri != "") print uri
		}' "$file"
	done
	for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
		[[ -e $file ]] || continue
		sed -nE "s/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+)[[:space:]]+${codename}[[:space:]].*/\2/p" "$file"
	done
}

if [[ ! -e $chroot/.rushes-ready ]]; then
	mirror=$(mirror_of_system | head -n 1)
	[[ -n $mirror ]] || die "read no mirror for this machine's release in" \
		"/etc/apt; expected what apt itself uses."
	if [[ ! -e $chroot/etc/debian_version || -d $chroot/debootstrap ]]; then
		rm -rf "$chroot"
		echo "$script: Debian 13 into $chroot, once"
		debootstrap --variant=minbase "$suite" "$chroot" "$mirror" \
			>"$place/debootstrap.log" 2>&1 ||
			die "debootstrap: $(tail -n 5 "$place/debootstrap.log")"
	fi
	cp -L /etc/resolv.conf "$chroot/etc/resolv.conf"
	# Proxies and the like, and no service is started.
	apt-config dump Acquire >"$chroot/etc/apt/apt.conf.d/99rushes"
	printf '#!/bin/sh\nexit 101\n' >"$chroot/usr/sbin/policy-rc.d"
	chmod 755 "$chroot/usr/sbin/policy-rc.d"
	in_chroot "$root/packaging/install-packages.sh"
	touch "$chroot/.rushes-ready"
fi

# ---- 3. build and test ----

mkdir -p "$place/target/release"
cp -u "$rushes" "$place/target/release/rushes"
scripts=("$@")
if [[ ${#scripts[@]} -eq 0 ]]; then
	mapfile -t scripts < <(cd "$root/tests/smb" && printf '%s\n' *.sh)
fi
# shellcheck disable=SC2016 # for the inner shell
in_chroot /bin/bash -euc '
	cd "$1"
	shift
	packaging/install-packages.sh
	echo "== build in Debian $(cat /etc/debian_version), $(smbd --version | sed "s/Version //")"
	CARGO_NET_OFFLINE=true doors/smb/build.sh
	for script in "$@"; do
		echo "-- tests/smb/$script"
		"tests/smb/$script"
	done' bash "$root" "${scripts[@]}"
echo "$script: passed on Debian 13"
