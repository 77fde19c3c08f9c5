#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The door tests, several programs at a time and the tests of each one after the
# other. What a program prints is shown if it fails; how long each took is shown
# at the end.
#
#   doors.sh               all
#   doors.sh --together    only those that may run beside others
#   doors.sh --alone       only those that keep time
#   doors.sh NAME...       these (pool_mount, failure, ...)
#
# A program whose source says "runs alone" in its header keeps time: it runs when
# the others are done. RUSHES_TEST_JOBS says how many run at a time (2 if unset).
set -euo pipefail

script=$(basename "$0")
root=$(cd "$(dirname "$0")/.." && pwd)
jobs=${RUSHES_TEST_JOBS:-2}
case $jobs in
'' | *[!0-9]* | 0)
	echo "$script: RUSHES_TEST_JOBS is '$jobs'; expected a number from 1 on" >&2
	exit 2
	;;
esac

which=all
case ${1:-} in
--together | --alone)
	which=${1#--}
	shift
	;;
-*)
	echo "$script: unknown option '$1'; expected --together, --alone or names of tests" >&2
	exit 2
	;;
esac

scratch=$(mktemp -d "${TMPDIR:-/tmp}/rushes-doors.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

cd "$root"
"${CARGO:-cargo}" test --locked --no-run -p rushes-tests \
	--message-format=json-render-diagnostics >"$scratch/built"
# Lines "NAME PROGRAM SOURCE".
/usr/bin/python3 -c 'import json, sys
for line in open(sys.argv[1]):
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable") \
            and message["profile"]["test"]:
        target = message["target"]
        print(target["name"], message["executable"], target["src_path"])' \
	"$scratch/built" | sort >"$scratch/all"

wanted=("$@")
is_wanted() {
	((${#wanted[@]} == 0)) || [[ " ${wanted[*]} " == *" $1 "* ]]
}
together=()
alone=()
while read -r name program source; do
	is_wanted "$name" || continue
	if grep -q '^//!.* runs alone' "$source"; then
		[[ $which == together ]] || alone+=("$name $program")
	else
		[[ $which == alone ]] || together+=("$name $program")
	fi
done <"$scratch/all"
((${#together[@]} + ${#alone[@]} > 0)) || {
	echo "$script: no test is called ${wanted[*]}; there are:" \
		"$(cut -d' ' -f1 "$scratch/all" | tr '\n' ' ')" >&2
	exit 2
}

# one SCRATCH NAME PROGRAM: runs it where cargo would; says what came of it.
one() {
	local start=$SECONDS code=0
	(cd tests && exec "$3" --test-threads=1) >"$1/$2.log" 2>&1 </dev/null || code=$?
	echo "$((SECONDS - start)) $2 $code" >>"$1/took"
	if ((code == 0)); then
		echo "$2: $(sed -n 's/^test result: ok\. //p' "$1/$2.log" |
			sed 's/; 0 measured.*//') ($((SECONDS - start)) s)"
	else
		# In one piece, though others print beside it.
		{
			echo "==== $2 FAILED (exit $code); it printed:"
			tail -n 400 "$1/$2.log"
			echo "==== $2 FAILED (alone: tests/doors.sh $2)"
		} >"$1/$2.said"
		cat "$1/$2.said"
	fi
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

echo "$script: the longest:" \
	"$(sort -rn "$scratch/took" | head -n 12 | awk '{ printf "%s%s %d s", sep, $2, $1; sep = ", " }')"
failed=$(awk '$3 != 0 { print $2 }' "$scratch/took" | tr '\n' ' ')
[[ -z $failed ]] || {
	echo "$script: FAILED: $failed" >&2
	exit 1
}
echo "$script: $(wc -l <"$scratch/took") programs passed in $SECONDS s"
