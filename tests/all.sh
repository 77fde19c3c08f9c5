#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Phases of `make test`, and where the time went.
#
#   all.sh PHASE[+][:AFTER,...]... [--alone PHASE...]
#
# Phases are targets of the Makefile. Each begins, in this order, when those that
# it comes AFTER have passed and one of two places is free. A phase with a + takes
# no place: it waits more than it works. Those behind --alone keep time: they run
# one at a time when the others have passed. What a phase prints comes in one piece
# when it ends, and is in build/make-test/PHASE.log before. The first phase that
# fails ends them all.
#
# At the end the processor time is held to tests/processor-time.txt.
set -euo pipefail

cd "$(dirname "$0")/.."
make=${MAKE:-make}
places=2
heartbeat_s=60
aim_s=1800
goes_on_s=240
budget=tests/processor-time.txt
logs=$PWD/build/make-test
rm -rf "$logs"
mkdir -p "$logs"

# In an empty clone cargo keeps no notes for the next compilation: they cost time, and
# a clone that is worked in has them already.
[[ -d ${CARGO_TARGET_DIR:-target}/debug/incremental ]] || export CARGO_INCREMENTAL=0

names=()
alone=()
declare -A after=() waits=() group=() began=() passed=()
took=()
heartbeat=

while (($# > 0)); do
	case $1 in
	--alone)
		shift
		alone=("$@")
		break
		;;
	esac
	name=${1%%:*}
	[[ $1 != *:* ]] || after[${name%+}]=${1#*:}
	[[ $name != *+ ]] || waits[${name%+}]=1
	names+=("${name%+}")
	shift
done

# A phase that goes on has mounts and servers, and puts them away as its tests end:
# it may end them, unless somebody waits at the keyboard.
end_all() {
	local name end
	trap '' EXIT
	[[ -z $heartbeat ]] || kill "$heartbeat" 2>/dev/null || true
	end=$((SECONDS + ${1:-0}))
	for name in "${!group[@]}"; do
		while ((SECONDS < end)) && kill -0 "${group[$name]}" 2>/dev/null; do
			sleep 1
		done
		kill -TERM -- "-${group[$name]}" 2>/dev/null || true
	done
	sleep 1
	for name in "${!group[@]}"; do
		kill -KILL -- "-${group[$name]}" 2>/dev/null || true
	done
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() { # PHASE
	echo "==== $1 begins ($SECONDS s)"
	began[$1]=$SECONDS
	# A group of its own, so that it can be ended whole.
	# shellcheck disable=SC2016 # for the inner shell
	setsid /bin/bash -c 'TIMEFORMAT="%U %S"
		{ time "$0" "$1" >"$2.log" 2>&1 </dev/null; } 2>"$2.times"' \
		"$make" "$1" "$logs/$1" &
	group[$1]=$!
}

# A fixed piece of work, in thousandths of a second of processor time: how fast is
# this machine while it does all this?
pace() {
	# Before `setup` a machine may have no Python.
	[[ -x /usr/bin/python3 ]] || return 0
	/usr/bin/python3 -c 'import time
begun = time.process_time()
sum(number * number for number in range(10_000_000))
print(round(1000 * (time.process_time() - begun)))' >>"$logs/pace"
}

beat() {
	sleep "$heartbeat_s" &
	heartbeat=$!
}

# Waits until a phase has ended, and says what came of it.
join_one() {
	local pid code=0 name said worked
	wait -n -p pid || code=$?
	if [[ $pid == "$heartbeat" ]]; then
		pace
		said=
		for name in "${!group[@]}"; do
			# The file may not be there yet.
			said+="${said:+, }$name ($(tail -n 1 "$logs/$name.log" 2>&1 | cut -c 1-60 || true))"
		done
		echo "==== $SECONDS s: $said"
		beat
		return
	fi
	for name in "${!group[@]}"; do
		[[ ${group[$name]} != "$pid" ]] || break
	done
	unset "group[$name]"
	echo "==== $name"
	cat "$logs/$name.log"
	if ((code != 0)); then
		((${#group[@]} == 0)) || echo "==== these are let end, for $goes_on_s s at most: ${!group[*]}"
		end_all "$goes_on_s"
		echo "make test: FAILED in $name (alone: make $name)" >&2
		exit 1
	fi
	worked=$(tail -n 1 "$logs/$name.times" | awk '{ printf "%d", $1 + $2 }')
	passed[$name]=$worked
	took+=("$name $((SECONDS - began[$name])) s (processor time $worked s)")
	echo "==== passed: ${took[-1]}"
}

is_ready() { # PHASE
	local name those=${after[$1]:-}
	for name in ${those//,/ }; do
		[[ -n ${passed[$name]:-} ]] || return 1
	done
}

busy() {
	local name count=0
	for name in "${!group[@]}"; do
		[[ -n ${waits[$name]:-} ]] || count=$((count + 1))
	done
	echo "$count"
}

# Starts what may begin.
start_some() {
	local name
	for name in "${names[@]}"; do
		[[ -z ${began[$name]:-} ]] || continue
		is_ready "$name" || continue
		[[ -n ${waits[$name]:-} ]] || (($(busy) < places)) || continue
		start "$name"
	done
}

echo "==== what phases print: $logs"
pace
beat
while ((${#passed[@]} < ${#names[@]})); do
	start_some
	((${#group[@]} > 0)) || {
		echo "make test: FAILED: phases that nothing lets begin" >&2
		exit 1
	}
	join_one
done
for name in "${alone[@]}"; do
	start "$name"
	while [[ -z ${passed[$name]:-} ]]; do
		join_one
	done
done
pace

printf '%s\n' "make test: all ${#took[@]} phases passed in $SECONDS s:" "${took[@]/#/   }"
# check-tidy runs three of the programs early, and they are counted with the others.
find "$logs" -name '*.log' ! -name 'check-tidy.log' -exec cat {} + | awk '/^test result: / { passed += $4; failed += $6; ignored += $8; programs++ }
	END { printf "make test: %d test programs\ntest result: %s. %d passed; %d failed; %d ignored\n",
		programs, failed ? "FAILED" : "ok", passed, failed, ignored }'
((SECONDS <= aim_s)) ||
	echo "make test: took longer than the $aim_s s that two idle cores need"
for name in "${!passed[@]}"; do
	echo "$name ${passed[$name]}"
done | tests/processor-time.py "$budget" "$logs/pace" "$logs/processor-time.txt"
