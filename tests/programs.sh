#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The test programs of all crates, several at a time and the tests of each one
# after the other. A program's output is shown when it ends; where the time
# went is shown at the end.
#
#   programs.sh --build    only build them
#   programs.sh --crates   those of the crates, and the unit tests of the lab
#   programs.sh --together those of the doors and runs of the lab that keep no time
#   programs.sh --alone    those of the doors and the lab that keep time, one at a time
#   programs.sh NAME...    these (pool_mount, failure, lab:power, ...)
#
# All are built by one cargo command, so that no library is compiled again for
# another choice of crates. A program is named after its test target, one that
# is not in tests/tests with its crate before it: pool:fsck, lab:disk.
#
# A program whose header has a line "//! Runs alone" keeps time: it runs when
# nothing else does. RUSHES_TEST_JOBS says how many of the others run at a time
# (4 if unset; most of the time they wait). The longest begin first, in the order
# of tests/longest.txt.
set -euo pipefail

script=$(basename "$0")
root=$(cd "$(dirname "$0")/.." && pwd)
jobs=${RUSHES_TEST_JOBS:-4}
case $jobs in
'' | *[!0-9]* | 0)
	echo "$script: RUSHES_TEST_JOBS is '$jobs'; expected a number from 1 on" >&2
	exit 2
	;;
esac

which=named
case ${1:-} in
--build | --crates | --together | --alone)
	which=${1#--}
	shift
	;;
-* | '')
	echo "$script: '${1:-}' is no choice; expected --build, --crates, --together, --alone" \
		"or names of programs" >&2
	exit 2
	;;
esac
wanted=("$@")
if [[ $which != named ]] && ((${#wanted[@]} > 0)); then
	echo "$script: --$which takes no names; read ${wanted[*]}" >&2
	exit 2
fi

scratch=$(mktemp -d "${TMPDIR:-/tmp}/rushes-programs.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

cd "$root"
# Somebody who names one test waits for no other to be built.
targets=()
for name in "${wanted[@]}"; do
	target=${name#*:}
	if compgen -G "*/tests/$target.rs" >/dev/null ||
		compgen -G "*/*/tests/$target.rs" >/dev/null; then
		targets+=(--test "$target")
	else
		targets=()
		break
	fi
done
"${CARGO:-cargo}" test --locked --workspace --no-run "${targets[@]}" \
	--message-format=json-render-diagnostics >"$scratch/built"
[[ $which != build ]] || exit 0

# Lines "NAME PROGRAM FOLDER CHOICE".
/usr/bin/python3 - "$scratch/built" tests/longest.txt >"$scratch/all" <<'PYTHON'
import json, os, re, sys

found = {}
for line in open(sys.argv[1]):
    message = json.loads(line)
    if message.get("reason") != "compiler-artifact" or not message.get("executable") \
            or not message["profile"]["test"]:
        continue
    folder = os.path.dirname(message["manifest_path"])
    crate = re.search(r'^name = "(?:rushes-)?(\w+)"', open(message["manifest_path"]).read(), re.M)
    target = message["target"]
    name = target["name"] if crate[1] == "tests" else f"{crate[1]}:{target['name']}"
    if name in found:
        sys.exit(f"programs.sh: two test programs are called {name}")
    header = [line for line in open(target["src_path"]) if line.startswith("//!")]
    if any(line.startswith("//! Runs alone") for line in header):
        choice = "alone"
    elif crate[1] in ("tests", "lab") and target["kind"] == ["test"]:
        choice = "together"
    else:
        choice = "crates"
    found[name] = f"{name} {message['executable']} {folder} {choice}"
longest = open(sys.argv[2]).read().split("\n")
longest = [line for line in longest if line and not line.startswith("#")]
for name in sorted(found, key=lambda name: (longest.index(name) if name in longest else
                                            len(longest), name)):
    print(found[name])
PYTHON

together=()
alone=()
while read -r name program folder choice; do
	if [[ $which == named ]]; then
		[[ " ${wanted[*]} " == *" $name "* ]] || continue
	else
		[[ $which == "$choice" ]] || continue
	fi
	if [[ $choice == alone ]]; then
		alone+=("$name $program $folder")
	else
		together+=("$name $program $folder")
	fi
done <"$scratch/all"
for name in "${wanted[@]}"; do
	grep -q "^$name " "$scratch/all" || {
		echo "$script: no test program is called $name; there are:" \
			"$(cut -d' ' -f1 "$scratch/all" | tr '\n' ' ')" >&2
		exit 2
	}
done
count=$((${#together[@]} + ${#alone[@]}))
((count > 0)) || {
	echo "$script: no test program is of --$which" >&2
	exit 2
}

# one SCRATCH NAME PROGRAM FOLDER: runs it where cargo would; says what came of it.
one() {
	local code=0 real worked
	local TIMEFORMAT='%0R %U %S'
	{ time env -C "$4" CARGO_MANIFEST_DIR="$4" "$3" --test-threads=1 \
		>"$1/$2.log" 2>&1 </dev/null; } 2>"$1/$2.time" || code=$?
	read -r real worked < <(tail -n 1 "$1/$2.time" | awk '{ printf "%d %d\n", $1, $2 + $3 }')
	echo "$real $worked $2 $code" >>"$1/took"
	# As cargo prints it, and in one piece, though others print beside it.
	{
		echo "     Running $2 ($real s, processor time $worked s)"
		if ((code == 0)); then
			cat "$1/$2.log"
		else
			tail -n 400 "$1/$2.log"
			echo "==== $2 FAILED (exit $code; alone: tests/programs.sh $2)"
		fi
	} >"$1/$2.said"
	cat "$1/$2.said"
}
export -f one

run() { # JOBS LINE...
	local at_a_time=$1
	shift
	(($# == 0)) && return
	printf '%s\n' "$@" | xargs -P "$at_a_time" -L 1 \
		/bin/bash -c 'one "$@"' one "$scratch"
}

: >"$scratch/took"
run "$jobs" "${together[@]}"
run 1 "${alone[@]}"

echo "$script: the longest:" "$(sort -rn "$scratch/took" | head -n 20 |
	awk '{ printf "%s%s %d s (%d)", sep, $3, $1, $2; sep = ", " }')"
echo "$script: the most processor time:" "$(sort -k 2,2rn "$scratch/took" | head -n 8 |
	awk '{ printf "%s%s %d s", sep, $3, $2; sep = ", " }')"
failed=$(awk '$4 != 0 { print $3 }' "$scratch/took" | tr '\n' ' ')
[[ -z $failed ]] || {
	echo "$script: FAILED: $failed" >&2
	exit 1
}
# A folder without space would lose what came of one.
(($(wc -l <"$scratch/took") == count)) || {
	echo "$script: FAILED: of $count programs $(wc -l <"$scratch/took") told how they ended" >&2
	exit 1
}
echo "$script: $(wc -l <"$scratch/took") programs passed in $SECONDS s"
