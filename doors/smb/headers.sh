#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
#
# The headers of the Samba that is installed here. No package has them, and a
# VFS module must be built against exactly those smbd was built with: the
# distribution's source of the same version is fetched, configured as the
# distribution does it as far as structures depend on it, and only its headers
# (a third of them generated) are kept.
#
#   headers.sh            makes them (75 s, once a version), prints the folder
#   headers.sh --path     prints the folder and makes nothing
#
# They are kept in BUILD/samba-headers/VERSION (BUILD: $RUSHES_BUILD_DIR or
# build/ of the checkout). Several runs at once wait for each other.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "${RUSHES_BUILD_DIR:-$root/build}"
build=$(cd "${RUSHES_BUILD_DIR:-$root/build}" && pwd)
recipe=1 # raise it when what is built or kept below changes

say() { echo "headers.sh: $*" >&2; }
die() { say "$*"; exit 1; }

version=$(dpkg-query -W -f '${Version}' samba 2>/dev/null) || version=
[ -n "$version" ] || die "Samba is not installed from a Debian package" \
	"(dpkg knows no 'samba'): apt-get install samba, then run this again."
folder=$build/samba-headers/${version#*:} # without Debian's epoch

if [ "${1:-}" = --path ]; then
	echo "$folder"
	exit 0
fi
[ $# -eq 0 ] || die "unknown argument '$1': expected --path or nothing."

is_ready() { [ "$(cat "$folder/.recipe" 2>/dev/null)" = "$recipe" ]; }

if is_ready; then
	echo "$folder"
	exit 0
fi

mkdir -p "$build/samba-headers"
exec 9>"$build/samba-headers/.lock"
flock 9
if is_ready; then # somebody else made them while we waited
	echo "$folder"
	exit 0
fi

# Leftovers of a killed run are swept here: the lock says that nobody uses them.
rm -rf "$build/samba-headers"/.work.*
work=$(mktemp -d "$build/samba-headers/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
log=$work/log

# step SENTENCE COMMAND...: run it quietly; on failure show the log's end.
step() {
	sentence=$1
	shift
	if ! "$@" >"$log" 2>&1 9>&-; then
		tail -n 40 "$log" >&2
		die "$sentence failed (the end of its output is above)."
	fi
}

# ---- 1. what its configure and code generators need ----

wanted="libparse-yapp-perl libtalloc-dev libtevent-dev libtdb-dev libpopt-dev
libcmocka-dev libkeyutils-dev python3-dev flex bison libgnutls28-dev
zlib1g-dev libacl1-dev libcap-dev libicu-dev libreadline-dev libtasn1-6-dev
libjson-perl pkg-config dpkg-dev gcc libc6-dev xz-utils"
missing=
for package in $wanted; do
	status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) ||
		status=
	# A virtual name (pkg-config may be pkgconf's) has no status of its own.
	if [ "$status" != installed ] &&
		! { [ "$package" = pkg-config ] && command -v pkg-config >/dev/null; }
	then
		missing="$missing $package"
	fi
done
if [ -n "$missing" ]; then
	[ "$(id -u)" -eq 0 ] || die "not installed:$missing." \
		"Run once as root: apt-get install --no-install-recommends$missing"
	say "installing$missing"
	step "apt-get update" apt-get -q -o DPkg::Lock::Timeout=300 update
	# shellcheck disable=SC2086 # a list of words is meant
	step "apt-get install of$missing" env DEBIAN_FRONTEND=noninteractive \
		apt-get -q -y -o DPkg::Lock::Timeout=300 install \
		--no-install-recommends $missing
fi

# ---- 2. the source of that very version ----
# The system's own sources with deb for deb-src, in private lists: nothing of
# the system's configuration is changed.

parts=$work/sources.d
mkdir -p "$parts" "$work/lists/partial" "$work/download"
for file in /etc/apt/sources.list.d/*.sources; do
	[ -e "$file" ] || continue
	sed -E 's/^Types:.*/Types: deb-src/' "$file" >"$parts/$(basename "$file")"
done
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
	[ -e "$file" ] || continue
	sed -nE 's/^[[:space:]]*deb(-src)?[[:space:]]/deb-src /p' "$file" |
		sort -u >"$parts/$(basename "$file" .list).list"
done
apt_private() {
	apt-get -q -o Dir::Etc::SourceList=/dev/null \
		-o Dir::Etc::SourceParts="$parts" \
		-o Dir::State::Lists="$work/lists" \
		-o APT::Sandbox::User=root "$@"
}
say "fetching the source of samba $version"
step "apt-get update (source packages)" apt_private update
fetch_source() (
	cd "$work/download" && apt_private source --download-only \
		"samba=$version"
)
step "fetching the source of samba $version (if the distribution has replaced \
that version, apt-get install samba brings the new one)" fetch_source
source=$work/samba
step "unpacking the source of samba" \
	dpkg-source -x "$work/download"/samba_*.dsc "$source"

# ---- 3. configure as Debian does, so far as structures depend on it ----
# Their layout was compared (pahole) with that of a full Debian configure:
# identical. /usr/bin/python3 before any other python3 in PATH.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
without_ldap=--without-ldap
if [ "$(dpkg-query -W -f '${db:Status-Status}' libldap2-dev 2>/dev/null)" \
	= installed ]; then
	without_ldap= # with the library there, configure wants it
fi
sed -i 's/^\(SAMBA_VERSION_VENDOR_SUFFIX\).*/\1=Debian/' "$source/VERSION"
multiarch=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
lib=/usr/lib/$multiarch
say "configuring it (a minute)"
configure() (
	# shellcheck disable=SC2086 # empty means no argument
	cd "$source" && PYTHONHASHSEED=1 ./buildtools/bin/waf -j1 -C configure \
		--prefix=/usr --enable-fhs --sysconfdir=/etc --localstatedir=/var \
		--libexecdir=/usr/libexec --libdir="$lib" --datadir=/usr/share \
		--with-modulesdir="$lib/samba" \
		--with-pammodulesdir="/lib/$multiarch/security" \
		--with-privatedir=/var/lib/samba/private \
		--with-smbpasswd-file=/etc/samba/smbpasswd \
		--with-piddir=/run/samba --with-lockdir=/run/samba \
		--with-sockets-dir=/run/samba --with-statedir=/var/lib/samba \
		--with-cachedir=/var/cache/samba \
		--with-socketpath=/run/ctdb/ctdbd.socket --with-logdir=/var/log/ctdb \
		--disable-python --without-ad-dc --without-ads $without_ldap \
		--without-pam --without-json --without-libarchive \
		--without-winbind --without-gpgme --without-ldb-lmdb \
		--disable-avahi --disable-cups --disable-iprint --without-systemd \
		--disable-cephfs --disable-glusterfs --disable-spotlight \
		--without-quotas --with-syslog --with-utmp --with-profiling-data \
		--disable-rpath --disable-rpath-install \
		--bundled-libraries=NONE,ldb '--with-shared-modules=!vfs_snapper'
)
step "configure of samba $version" configure

# ---- 4. the generated headers; no C library of Samba is built ----

targets=param_local.h,s3_param_proto_h,ntstatus_generated,werror_generated
for idl in MISC SECURITY SERVER_ID FILE_ID SMB2_LEASE_STRUCT SMBXSRV SMB_ACL \
	NOTIFY OPEN_FILES MESSAGING LEASES_DB IDMAP AUTH NETLOGON LSA SAMR \
	KRB5PAC XATTR QUOTA IOCTL NAMED_PIPE_AUTH DFSBLOBS; do
	targets=$targets,PIDL_$idl
done
# What later releases have besides. waf refuses a target that it does not know.
if grep -qs hresult_generated "$source/libcli/util/wscript_build"; then
	targets=$targets,hresult_generated # 4.22
fi
if [ -e "$source/librpc/idl/smb3posix.idl" ]; then
	targets=$targets,PIDL_SMB3POSIX,PIDL_NBT # 4.22
fi
say "generating its headers"
generate() (
	cd "$source" &&
		PYTHONHASHSEED=1 ./buildtools/bin/waf build -j2 --targets="$targets"
)
step "generating the headers of samba $version" generate

# Valgrind's headers are not ours to demand.
sed -i '/HAVE_VALGRIND/d' "$source/bin/default/include/config.h"

# ---- 5. keep the headers only ----

keep=$work/keep
mkdir "$keep"
(cd "$source" && find . -name '*.h' -print0 |
	tar --null -ch -T - -f - 2>>"$log") | tar -xf - -C "$keep"
[ -f "$keep/bin/default/include/config.h" ] &&
	[ -f "$keep/source3/include/vfs.h" ] ||
	die "the headers of samba $version were made but vfs.h or config.h is" \
		"not among them: its source tree is laid out differently."
echo "$recipe" >"$keep/.recipe"
rm -rf "$folder"
mv "$keep" "$folder"
say "headers of samba $version are ready"
echo "$folder"
