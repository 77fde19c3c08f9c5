# SPDX-License-Identifier: Apache-2.0
# A private smbd for the tests in this folder; sourced, never run.
#
# Everything of a run lies in one folder, $scratch, and ends with the script:
# also when it fails or is interrupted. smbd sees our module in a mount
# namespace of its own (it loads modules from its own folder only), so that
# nothing of this machine's Samba changes because somebody runs tests.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
build=${RUSHES_BUILD_DIR:-$root/build}
module=$build/rushes.so
user=daemon # an account that every Debian has
password=rushes-tests
script=$(basename "$0")
PATH=$PATH:/usr/sbin:/sbin

say() { echo "$script: $*"; }
die() { echo "$script: FAILED: $*" >&2; exit 1; }

# What is needed and not here: aloud, and a failure where nothing may be
# skipped ($RUSHES_TEST_ALL, set by make test).
skip() {
	if [[ ${RUSHES_TEST_ALL:-} == 1 ]]; then
		die "$* (and RUSHES_TEST_ALL is set: nothing may be skipped)"
	fi
	echo "$script: SKIPPED: $*" >&2
	exit 0
}

needs_root() {
	[[ $(id -u) -eq 0 ]] || skip "needs root: smbd changes users"
}

needs_programs() {
	local program
	for program in "$@"; do
		command -v "$program" >/dev/null || skip "needs $program: run make setup"
	done
}

needs_module() {
	[[ -f $module ]] || skip "needs $module: run doors/smb/build.sh"
}

scratch=
group_pids=() # process groups that end with the script

# The pid of `unshare` is smbd's own after two execs, and its process group is
# its own (setsid), so that its children are reached by it.
cleanup() {
	local pid signal tries
	trap - EXIT
	for signal in TERM KILL; do
		for pid in "${group_pids[@]}"; do
			kill -"$signal" -- "-$pid" 2>/dev/null || true
		done
		for ((tries = 0; tries < 50; tries++)); do
			any_alive || break 2
			sleep 0.1
		done
	done
	if [[ -n $scratch ]]; then
		rm -rf "$scratch"
	fi
}

any_alive() {
	local pid
	for pid in "${group_pids[@]}"; do
		kill -0 -- "-$pid" 2>/dev/null && return 0
	done
	return 1
}

make_scratch() {
	scratch=$(mktemp -d "${TMPDIR:-/tmp}/rushes-smb.XXXXXX")
	chmod 755 "$scratch"
	trap cleanup EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM
}

free_port() {
	/usr/bin/python3 -c 'import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# smbd_start NAME <<lines of shares
# Sets port_of[NAME], log_of[NAME] and pid_of[NAME].
declare -A port_of log_of pid_of
smbd_start() {
	local name=$1 folder=$scratch/$1 port modules part tries
	port=$(free_port)
	modules=$(smbd -b | sed -n 's/^ *MODULESDIR: *//p')/vfs
	mkdir -p "$folder"
	for part in private lock state cache pid ncalrpc log vfs; do
		mkdir -p "$folder/$part"
	done
	cp -r "$modules/." "$folder/vfs/"
	if [[ $name == chaos* ]]; then
		cp "$scratch/chaos/rushes.so" "$folder/vfs/rushes.so"
	elif [[ -f $module ]]; then
		cp "$module" "$folder/vfs/rushes.so"
	fi
	{
		cat <<-GLOBAL
		[global]
			private dir = $folder/private
			lock directory = $folder/lock
			state directory = $folder/state
			cache directory = $folder/cache
			pid directory = $folder/pid
			ncalrpc dir = $folder/ncalrpc
			smb ports = $port
			interfaces = 127.0.0.1/8
			bind interfaces only = yes
			disable netbios = yes
			load printers = no
			disable spoolss = yes
			printcap name = /dev/null
			server role = standalone server
			max log size = 0
			panic action = touch $folder/panic
		GLOBAL
		cat
	} >"$folder/smb.conf"
	printf '%s\n%s\n' "$password" "$password" |
		pdbedit -s "$folder/smb.conf" -a -t -u "$user" >/dev/null 2>"$folder/pdbedit.log" ||
		die "pdbedit: $(cat "$folder/pdbedit.log")"
	# shellcheck disable=SC2016 # $1 is for the inner shell
	setsid unshare --mount --propagation private \
		"$root/kit/src/let-go.sh" -- /bin/sh -c \
		'mount --bind "$1" "$2" && shift 2 && exec "$@"' sh "$folder/vfs" "$modules" \
		smbd --foreground --no-process-group -s "$folder/smb.conf" \
		-l "$folder/log" </dev/null >"$folder/output" 2>&1 &
	group_pids+=("$!")
	port_of[$name]=$port
	log_of[$name]=$folder/log
	pid_of[$name]=$!
	for ((tries = 0; tries < 200; tries++)); do
		if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
			return 0
		fi
		kill -0 "$!" 2>/dev/null || break
		sleep 0.05
	done
	cat "$folder/output" "$folder"/log/* >&2 || true
	die "the private smbd '$name' does not answer on port $port"
}

# End one before the script does; its log stays.
smbd_stop() {
	local pid=${pid_of[$1]} tries
	kill -TERM -- "-$pid" 2>/dev/null || true
	for ((tries = 0; tries < 100; tries++)); do
		kill -0 -- "-$pid" 2>/dev/null || return 0
		sleep 0.05
	done
	die "the private smbd '$1' does not stop"
}

# smb NAME SHARE COMMANDS: what smbclient prints; fails as smbclient does.
smb() {
	timeout 60 smbclient "//127.0.0.1/$2" -p "${port_of[$1]}" \
		-U "$user%$password" -m SMB3 -c "$3" 2>&1
}

# No smbd may have panicked, whatever the clients saw.
no_panic() {
	local name
	for name in "${!port_of[@]}"; do
		if [[ -e $scratch/$name/panic ]] ||
			grep -rqs 'PANIC\|INTERNAL ERROR' "${log_of[$name]}"; then
			grep -rsh -A30 'PANIC\|INTERNAL ERROR' "${log_of[$name]}" | head -60 >&2
			die "the smbd '$name' panicked"
		fi
	done
}

# A folder that the test's user may write to.
share_folder() {
	mkdir -p "$1"
	chown "$user": "$1"
	chmod 777 "$1"
}

# ---- the daemon ----

target=${CARGO_TARGET_DIR:-$root/target}
rushes=$target/release/rushes
session_socket=
declare -A daemon_pid_of daemon_folder_of

has_daemon() {
	[[ -x $rushes ]] && "$rushes" serve --help >/dev/null 2>&1
}

# daemon_start NAME WRITE-BUFFER SHARE FOLDER [SHARE FOLDER]...: sets
# session_socket. A write buffer of "" is none.
daemon_start() {
	local name=$1 folder=$scratch/daemon-$1
	mkdir -p "$folder"
	{
		printf '[cache]\nbytes = "64MiB"\n'
		if [[ -n $2 ]]; then
			printf '[write]\nbuffer_bytes = "%s"\n' "$2"
		fi
		cat <<-TOML
		[server]
		runtime_dir = "$folder/run"
		state_dir = "$folder/state"
		TOML
		shift 2
		while (($# >= 2)); do
			printf '[[share]]\nname = "%s"\npath = "%s"\n' "$1" "$2"
			shift 2
		done
	} >"$folder/rushes.toml"
	session_socket=$folder/run/session.sock
	daemon_folder_of[$name]=$folder
	daemon_run "$name"
}

# Start it (again) with the configuration it has.
daemon_run() {
	local folder=${daemon_folder_of[$1]} tries
	setsid "$rushes" serve --config "$folder/rushes.toml" \
		</dev/null >>"$folder/log" 2>&1 &
	daemon_pid_of[$1]=$!
	group_pids+=("$!")
	for ((tries = 0; tries < 200; tries++)); do
		[[ -S $session_socket ]] && return 0
		kill -0 "$!" 2>/dev/null || break
		sleep 0.05
	done
	cat "$folder/log" >&2
	die "rushes serve did not make $session_socket"
}

# All that were started live, and reads (and writes) went through them.
daemons_are_well() {
	local name
	for name in "${!daemon_pid_of[@]}"; do
		daemon_is_well "$name"
	done
}

daemon_is_well() {
	local name=$1 folder=${daemon_folder_of[$1]} reads writes without
	if ! kill -0 "${daemon_pid_of[$1]}" 2>/dev/null; then
		tail -n 40 "$folder/log" >&2
		die "the daemon '$name' died"
	fi
	read -r reads writes < <("$rushes" status --runtime-dir "$folder/run" --json |
		/usr/bin/python3 -c 'import json, sys
status = json.load(sys.stdin)
cache = status["cache"]
print(cache["hit_count"] + cache["miss_count"], status["write"]["write_count"])') ||
		die "the daemon '$name' does not tell its status"
	((reads > 0)) || die "no read went through the daemon '$name': this compared nothing"
	if grep -q '^buffer_bytes' "$folder/rushes.toml"; then
		((writes > 0)) || die "no write went through the daemon '$name': this compared nothing"
	fi
	# A machine under load may take longer than a door waits; more is a fault.
	without=$(grep -rsh 'plain I/O until' "${log_of[@]}" |
		grep -cF "$folder/run/session.sock" || true)
	((without <= 10)) || die "$without sessions did without the daemon '$name'"
	say "the daemon '$name' answered $reads reads, $writes writes" \
		"($without sessions began without it)"
}

# ---- a module that is given a hard time ----

chaos_socket=

# Build the module with doors/smb/test/chaos_client.c, and let its daemon die
# and return all the time. Sets chaos_socket; an smbd whose name starts with
# "chaos" gets that module.
chaos_start() {
	chaos_socket=$scratch/chaos/socket
	mkdir -p "$scratch/chaos"
	"$root/doors/smb/build.sh" --chaos "$scratch/chaos/rushes.so" ||
		die "the module for tests does not build"
	touch "$chaos_socket"
	# shellcheck disable=SC2016 # expanded by the inner shell
	setsid /bin/bash -c 'while sleep "0.$((RANDOM % 5 + 1))"; do
		if ((RANDOM % 3 == 0)); then
			rm -f "$1"
			sleep "0.0$((RANDOM % 9))"
		fi
		touch "$1.new"
		mv "$1.new" "$1"
	done' chaos "$chaos_socket" </dev/null >/dev/null 2>&1 &
	group_pids+=("$!")
}
