#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Builds BUILD/rushes.so, the module for the Samba that is installed here
# (BUILD: $RUSHES_BUILD_DIR or build/ of the checkout). CARGO_TARGET_DIR and
# CARGO are honoured. Does nothing when nothing has changed.
#
#   build.sh                the module
#   build.sh --chaos FILE   the module for tests into FILE: linked with
#                           test/chaos_client.c in place of engine/shm
#
# No Samba library is linked: the symbols are smbd's own at run time, and the
# module is not tied to one build of them. smbd loads with RTLD_NOW, so that a
# single name it does not have fails the whole share; hence the check at the
# end.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "${RUSHES_BUILD_DIR:-$root/build}"
build=$(cd "${RUSHES_BUILD_DIR:-$root/build}" && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
case $target in
/*) ;;
*) target=$root/$target ;; # cargo runs in the checkout's root, below
esac

die() { echo "build.sh: $*" >&2; exit 1; }

chaos=
case ${1:-} in
'') ;;
--chaos)
	chaos=${2:-}
	[ -n "$chaos" ] || die "--chaos expects the file to be made."
	;;
*) die "unknown argument '$1': expected --chaos FILE or nothing." ;;
esac

smbd=$(command -v smbd || echo /usr/sbin/smbd)
[ -x "$smbd" ] || die "no smbd in PATH or /usr/sbin: apt-get install samba," \
	"then run this again."
headers=$("$here/headers.sh")

# ---- compiling ----

work=$(mktemp -d "$build/.rushes.so.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

compile() { # SOURCE OBJECT
	source=$1
	object=$2
	set --
	for folder in bin/default bin/default/include bin/default/source3 \
		bin/default/source3/include . include lib lib/replace source3 \
		source3/include source3/lib source4 source4/include; do
		# Warnings of ours are errors, those of Samba's headers are not.
		set -- "$@" -isystem "$headers/$folder"
	done
	${CC:-gcc} -c -fPIC -O2 -g -Wall -Wextra \
		-Wdeclaration-after-statement -Wstrict-prototypes \
		-Wmissing-prototypes -Wno-unused-parameter \
		-Wno-sign-compare -Werror \
		-D_SAMBA_BUILD_=4 -DHAVE_CONFIG_H=1 -D_GNU_SOURCE=1 \
		-D__STDC_WANT_LIB_EXT1__=1 -D_XOPEN_SOURCE_EXTENDED=1 \
		-D_FILE_OFFSET_BITS=64 -DSTATIC_vfs_MODULES_PROTO= \
		-ffile-prefix-map="$root"=. \
		-I "$here" -I "$root/engine/shm/include" "$@" \
		-o "$object" "$source"
}

link() { # OBJECT-OR-LIBRARY...
	${CC:-gcc} -shared -o "$work/rushes.so" "$@" \
		-Wl,--version-script="$here/rushes.map" \
		-Wl,--exclude-libs,ALL -Wl,--gc-sections -Wl,--as-needed \
		-Wl,-z,relro,-z,now -Wl,-soname,rushes.so \
		-lpthread -ldl -lm -lgcc_s
}

compile_all() {
	for file in vfs_rushes vfs_rushes_read vfs_rushes_write rushes_fsp \
		rushes_session rushes_write; do
		compile "$here/$file.c" "$work/$file.o"
	done
}

# What it exports, and whether smbd has what it wants.
check_symbols() {
	exports=$(nm -D --defined-only --format=posix "$work/rushes.so" |
		cut -d' ' -f1 | tr '\n' ' ')
	[ "$exports" = "samba_init_module " ] ||
		die "the module exports '$exports', expected samba_init_module alone."

	# ldd prints "name => /path (address)"; the module's own needs are libc's.
	{
		ldd "$smbd"
		ldd "$work/rushes.so"
	} | grep -o '/[^ ]*' | sort -u >"$work/libraries"
	{
		nm -D --defined-only --format=posix "$smbd"
		while read -r file; do
			nm -D --defined-only --format=posix "$file"
		done <"$work/libraries"
	} 2>/dev/null | sed 's/[@ ].*//' | sort -u >"$work/there"
	# A weak symbol may be absent.
	nm -D --undefined-only --format=posix "$work/rushes.so" |
		awk '$2 != "w" && $2 != "v" { sub(/@.*/, "", $1); print $1 }' |
		sort -u >"$work/wanted"
	absent=$(comm -23 "$work/wanted" "$work/there" | tr '\n' ' ')
	[ -z "$absent" ] || die "smbd $(smbd --version) and its libraries lack:" \
		"$absent- the module would not load. $1"
}

if [ -n "$chaos" ]; then
	compile_all
	compile "$here/test/chaos_client.c" "$work/chaos_client.o"
	link "$work"/*.o
	check_symbols "Does doors/smb/test/chaos_client.c have all of rushes_client.h?"
	mv "$work/rushes.so" "$chaos"
	exit 0
fi

# ---- the client library ----

(cd "$root" && "${CARGO:-cargo}" build --release --quiet -p rushes-shm)
library=$target/release/librushes_shm.a
[ -f "$library" ] || die "cargo built rushes-shm but not $library: its" \
	"Cargo.toml must name the crate-type staticlib."

# ---- the module ----

module=$build/rushes.so
is_fresh() {
	[ -f "$module" ] || return 1
	for source in "$here"/*.c "$here"/*.h "$here/rushes.map" \
		"$here/build.sh" "$root/engine/shm/include/rushes_client.h" \
		"$library" "$headers/.recipe" "$smbd"; do
		[ "$module" -nt "$source" ] || return 1
	done
}
if is_fresh; then
	exit 0
fi

compile_all
link "$work"/*.o "$library"
check_symbols "Was Samba replaced? Then remove $headers and run this again."
mv "$work/rushes.so" "$module"
echo "build.sh: $module for Samba interface version" \
	"$(sed -n 's/^#define SMB_VFS_INTERFACE_VERSION //p' \
		"$headers/source3/include/vfs.h")" >&2
