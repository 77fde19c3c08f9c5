#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Phases of `make test`, and where the time went.
#
#   all.sh PHASE... [--beside PHASE PHASE... [--then PHASE...]]
#
# Phases are targets of the Makefile and run one after the other. The phase of
# --beside, which waits more than it works, runs beside the ones up to --then;
# what it prints comes at its end. The first phase that fails ends it all.
set -euo pipefail

cd "$(dirname "$0")/.."
make=${MAKE:-make}
log=$(mktemp "${TMPDIR:-/tmp}/rushes-beside.XXXXXX")
beside=
beside_pid=
took=()
worked=0

end_beside() {
	if [[ -n $beside_pid ]]; then
		kill -TERM -- "-$beside_pid" 2>/dev/null || true
		wait "$beside_pid" 2>/dev/null || true
	fi
	rm -f "$log" "$log.seconds" "$log.times"
}
trap end_beside EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
	echo "make test: FAILED in $1 (alone: make $1)" >&2
	exit 1
}

# Sets `worked`: processor seconds of the phases that have ended. `times` counts the
# children of the shell that calls it, so it may not run in a subshell.
count_work() {
	times >"$log.times"
	worked=$(tail -n 1 "$log.times" | tr ' ms' '\n  ' |
		awk '{ sum += 60 * $1 + $2 } END { printf "%d", sum }')
}

passed() { # PHASE SECONDS
	local before=$worked
	count_work
	took+=("$1 $2 s (processor time $((worked - before)) s)")
	echo "==== passed: ${took[-1]}"
}

# The phase beside the others has failed, or ended well: say so once.
join_beside() {
	local code=0
	[[ -n $beside_pid ]] || return 0
	wait "$beside_pid" || code=$?
	beside_pid=
	echo "==== $beside (it ran beside the ones above)"
	cat "$log"
	((code == 0)) || fail "$beside"
	passed "$beside" "$(cat "$log.seconds")"
}

while (($# > 0)); do
	case $1 in
	--beside)
		beside=$2
		shift 2
		echo "==== $beside begins, beside the next ones"
		# A group of its own, so that it can be ended whole.
		# shellcheck disable=SC2016 # for the inner shell
		setsid /bin/bash -c 'code=0
			"$0" "$1" || code=$?
			echo "$SECONDS" >"$2.seconds"
			exit "$code"' "$make" "$beside" "$log" >"$log" 2>&1 </dev/null &
		beside_pid=$!
		;;
	--then)
		shift
		join_beside
		;;
	*)
		start=$SECONDS
		echo "==== $1"
		"$make" "$1" || fail "$1"
		passed "$1" "$((SECONDS - start))"
		shift
		;;
	esac
done
join_beside
printf '%s\n' "make test: all ${#took[@]} phases passed in $SECONDS s:" "${took[@]/#/   }"
