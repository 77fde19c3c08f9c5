#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# pjdfstest and fsx on the mount of a pool over two ext4 members. The same pjdfstest on a bare ext4 says what may fail: nothing that passes there.
#
# Both programs are built from the crate registry, once, into target/tools. Everything else is in one scratch folder, which goes at the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
target=$(realpath -m "$target")
tools=$target/tools
rushes=$target/release/rushes
pjdfstest_version=0.2.2
fsx_version=0.3.2
operations=20000

fail() { echo "posix.sh: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail "needs root, because it mounts disks"
[ -x "$rushes" ] || fail "read no $rushes; expected what make build makes"

install_tool() { # NAME VERSION
	if ! "$tools/bin/$1" --version 2>/dev/null | grep -qF "$2"; then
		echo "posix.sh: installing $1 $2, once"
		env -u CARGO_TARGET_DIR CARGO_TARGET_DIR="$target/tools-build" \
			cargo install --quiet --locked --root "$tools" "$1@$2"
	fi
}
install_tool pjdfstest "$pjdfstest_version"
install_tool fsx "$fsx_version"

scratch=$(mktemp -d)
mount_pid=
put_away() {
	[ -z "$mount_pid" ] || kill "$mount_pid" 2>/dev/null || true
	for folder in mnt bare m0 m1 catalogue; do
		umount "$scratch/$folder" 2>/dev/null || umount -l "$scratch/$folder" 2>/dev/null || true
	done
	rm -rf --one-file-system "$scratch"
}
trap put_away EXIT
chmod 755 "$scratch"

disk() { # NAME MIB
	truncate -s "$2M" "$scratch/$1.img"
	mkfs.ext4 -q -F -m 0 "$scratch/$1.img"
	mkdir "$scratch/$1"
	mount -o loop "$scratch/$1.img" "$scratch/$1"
}
disk catalogue 300
disk m0 300
disk m1 500
disk bare 500
mkdir "$scratch"/{catalogue,m0,m1}/pool "$scratch/mnt"
"$rushes" pool create --policy round_robin "$scratch"/{catalogue,m0,m1}/pool
"$rushes" pool mount "$scratch/catalogue/pool" "$scratch/mnt" 2> "$scratch/log" &
mount_pid=$!
for _ in $(seq 300); do
	mountpoint -q "$scratch/mnt" && break
	kill -0 "$mount_pid" 2>/dev/null || fail "the mount ended: $(cat "$scratch/log")"
	sleep 0.1
done
mountpoint -q "$scratch/mnt" || fail "the mount does not come up: $(cat "$scratch/log")"

cat > "$scratch/pjdfstest.toml" <<TOML
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}
stat_st_birthtime = {}
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"], ["bin", "bin"]]
TOML
# Its own exit code says only that something failed; the lines say what.
pjdfstest() { # FOLDER OUT
	mkdir "$1/pjdfstest"
	chmod 777 "$1/pjdfstest"
	"$tools/bin/pjdfstest" -c "$scratch/pjdfstest.toml" -p "$1/pjdfstest" > "$2" 2>&1 || true
	tail -n 3 "$2" | grep '^Summary:' || fail "pjdfstest said nothing of its tests: $(tail -n 5 "$2")"
}
echo "posix.sh: pjdfstest on a bare ext4"
pjdfstest "$scratch/bare" "$scratch/bare.out"
echo "posix.sh: pjdfstest on the pool"
pjdfstest "$scratch/mnt" "$scratch/pool.out"
failed_count() { sed -nE 's/^Summary: ([0-9]+) failed.*/\1/p' "$1"; }
bare=$(failed_count "$scratch/bare.out")
pool=$(failed_count "$scratch/pool.out")
[ -n "$bare" ] && [ -n "$pool" ] || fail "pjdfstest says its sum in another way: $(tail -n 1 "$scratch/pool.out")"
# (A test more is skipped on the pool, as it is on XFS.)
[ "$pool" -le "$bare" ] || fail "$pool tests fail on the pool and $bare on a bare ext4:
$(grep -a -iE 'fail' "$scratch/pool.out")"

for seed in 1 2 3; do
	echo "posix.sh: fsx, seed $seed, $operations operations"
	timeout 300 "$tools/bin/fsx" -N "$operations" -S "$seed" "$scratch/mnt/fsx$seed" > "$scratch/fsx.out" 2>&1 ||
		fail "fsx, seed $seed: $(tail -n 20 "$scratch/fsx.out")"
done
umount "$scratch/mnt"
wait "$mount_pid" || fail "the mount ended badly: $(cat "$scratch/log")"
mount_pid=
"$rushes" pool ls "$scratch/catalogue/pool"
left=$(find "$scratch"/m?/pool/objects -type f | wc -l)
[ "$left" -le 3 ] || fail "$left objects on the members, of three files"
echo "posix.sh: passed"
