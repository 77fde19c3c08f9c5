#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# pjdfstest and fsx on the mounts of two pools over two ext4 members each, one with a keeper. The same pjdfstest on a bare ext4 says what has to pass: all
# that passes there, test by test, but for what is named here.
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
# Tests that pass on ext4 and are skipped on a pool: the C library knows no limit of names for FUSE. (That there is one: tests/tests/pool_parity.rs.)
known_skips=(link::link_count_max)
# Fewer on ext4 itself: pjdfstest, or what is read of it, is not what it was.
passed_at_least=350

fail() { echo "posix.sh: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail "needs root, because it mounts disks"
[ -x "$rushes" ] || fail "read no $rushes; expected what make build makes"

install_tool() { # NAME VERSION
	if ! "$tools/bin/$1" --version 2>/dev/null | grep -qF "$2"; then
		echo "posix.sh: installing $1 $2, once"
		# They wait more than they compute: it takes longer to optimise them than is won.
		CARGO_TARGET_DIR="$target/tools-build" CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
			CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
			cargo install --quiet --locked --root "$tools" "$1@$2"
	fi
}
install_tool pjdfstest "$pjdfstest_version"
install_tool fsx "$fsx_version"

scratch=$(mktemp -d)
mount_pids=()
tests=()
mounts=()
put_away() {
	[ ${#tests[@]} -eq 0 ] || kill "${tests[@]}" 2>/dev/null || true
	[ ${#mount_pids[@]} -eq 0 ] || kill "${mount_pids[@]}" 2>/dev/null || true
	for ((at = ${#mounts[@]} - 1; at >= 0; at--)); do
		umount "${mounts[at]}" 2>/dev/null || umount -l "${mounts[at]}" 2>/dev/null || true
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
	mounts+=("$scratch/$1")
}

pool() { # NAME, and options of its mount
	local name=$1
	shift
	disk "$name-catalogue" 300
	disk "$name-m0" 300
	disk "$name-m1" 500
	mkdir "$scratch/$name"-{catalogue,m0,m1}/pool "$scratch/$name"
	"$rushes" pool create --policy round_robin "$scratch/$name"-{catalogue,m0,m1}/pool
	"$rushes" pool mount "$@" "$scratch/$name-catalogue/pool" "$scratch/$name" 2> "$scratch/$name.log" &
	local pid=$!
	mount_pids+=("$pid")
	mounts+=("$scratch/$name")
	for _ in $(seq 300); do
		mountpoint -q "$scratch/$name" && return
		kill -0 "$pid" 2>/dev/null || fail "the mount ended: $(cat "$scratch/$name.log")"
		sleep 0.1
	done
	fail "the mount does not come up: $(cat "$scratch/$name.log")"
}
disk bare 500
pool plain
pool kept --keeper

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
# They wait for clocks most of the time, so that three beside each other take as long as one. The exit code says only that something failed; the
# lines say what.
echo "posix.sh: pjdfstest on a bare ext4, on a pool and on one with a keeper"
for place in bare plain kept; do
	mkdir "$scratch/$place/pjdfstest"
	chmod 777 "$scratch/$place/pjdfstest"
	NO_COLOR=1 "$tools/bin/pjdfstest" -c "$scratch/pjdfstest.toml" -p "$scratch/$place/pjdfstest" > "$scratch/$place.out" 2>&1 &
	tests+=($!)
done
for pid in "${tests[@]}"; do wait "$pid" || true; done
tests=()

for place in bare plain kept; do
	summary=$(tail -n 3 "$scratch/$place.out" | grep '^Summary:') ||
		fail "pjdfstest said nothing of its tests on $place: $(tail -n 5 "$scratch/$place.out")"
	echo "posix.sh: $place, $summary"
	sed -nE 's/^([^[:space:]]+)[[:space:]]+(ok|skipped|FAILED)$/\1 \2/p' "$scratch/$place.out" | LC_ALL=C sort > "$scratch/$place.verdicts"
	# What is not read here is not compared below.
	total=$(sed -nE 's/.* ([0-9]+) total$/\1/p' <<< "$summary")
	[ "$(wc -l < "$scratch/$place.verdicts")" -eq "$total" ] ||
		fail "read $(wc -l < "$scratch/$place.verdicts") verdicts of pjdfstest on $place; expected $total"
done
passed() { grep -c ' ok$' "$scratch/$1.verdicts" || true; }
[ "$(passed bare)" -ge "$passed_at_least" ] || fail "only $(passed bare) tests pass on a bare ext4; expected $passed_at_least"
for place in plain kept; do
	# Test, what ext4 says, what the pool says; of those that pass on ext4 alone.
	differ=$(LC_ALL=C join -a 1 -e absent -o 0,1.2,2.2 "$scratch/bare.verdicts" "$scratch/$place.verdicts" | awk '$2 == "ok" && $3 != "ok"')
	for known in "${known_skips[@]}"; do
		differ=$(grep -vxF "$known ok skipped" <<< "$differ" || true)
	done
	[ -z "$differ" ] || fail "these tests pass on a bare ext4 and not on $place:
$differ
$(grep -a -A 2 'FAILED$' "$scratch/$place.out" || true)"
	[ "$(passed "$place")" -ge $(($(passed bare) - ${#known_skips[@]})) ] ||
		fail "$(passed "$place") tests pass on $place and $(passed bare) on a bare ext4"
done

for run in plain:1 plain:2 plain:3 kept:4; do
	place=${run%:*}
	seed=${run#*:}
	echo "posix.sh: fsx on $place, seed $seed, $operations operations"
	timeout 300 "$tools/bin/fsx" -N "$operations" -S "$seed" "$scratch/$place/fsx$seed" > "$scratch/fsx.out" 2>&1 ||
		fail "fsx, seed $seed: $(tail -n 20 "$scratch/fsx.out")"
done
umount "$scratch/plain" "$scratch/kept"
for pid in "${mount_pids[@]}"; do
	wait "$pid" || fail "a mount ended badly: $(cat "$scratch"/{plain,kept}.log)"
done
mount_pids=()
for place in plain kept; do
	"$rushes" pool ls "$scratch/$place-catalogue/pool"
	left=$(find "$scratch/$place"-m?/pool/objects -type f | wc -l)
	[ "$left" -le 3 ] || fail "$left objects on the members of $place, of three files at most"
done
echo "posix.sh: passed"
