#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The module at the end of a stack of Samba's own, in every way in which smbd
# moves data: whatever a client does, the file on the disk and what it reads
# back are the same: without a daemon ("absent"), with a client library that is
# as nasty as it may be ("chaos", doors/smb/test), and with a daemon where the
# program `rushes` is built: one that reads ahead ("present") and one that also
# keeps what is written ("writing").

# shellcheck source=lib/smbd.bash
. "$(dirname "$0")/lib/smbd.bash"

needs_root
needs_programs smbd smbclient pdbedit setsid unshare cmp setfattr
needs_module
make_scratch

stacks=("rushes" "acl_xattr streams_xattr rushes" "catia rushes"
	"catia fruit streams_xattr rushes"
	"catia fruit streams_xattr acl_xattr rushes")
declare -A ways=(
	[asynchronous]=""
	[synchronous]="aio read size = 0|aio write size = 0"
	[sendfile]="aio read size = 0|aio write size = 0|use sendfile = yes"
	[recvfile]="min receivefile size = 16384"
	[leases]="kernel oplocks = yes"
)

daemons=(${DAEMONS:-absent chaos})
chaos_start
if has_daemon; then
	daemons+=(present writing)
else
	say "no program rushes with a daemon: tried without it"
fi

# Names that catia translates need not exist for the others.
data=$scratch/data
mkdir "$data"
head -c 9000001 /dev/urandom >"$data/long"
head -c 70001 /dev/urandom >"$data/short"
head -c 1500 /dev/urandom >"$data/note" # a stream is an extended attribute here
: >"$data/empty"

# shares DAEMON WAY SOCKET: one share for each stack
shares() {
	local index way=$2
	for index in "${!stacks[@]}"; do
		share_folder "$scratch/$1-$way-$index"
		cat <<-SHARE
		[s$index]
			path = $scratch/$1-$way-$index
			read only = no
			ea support = yes
			vfs objects = ${stacks[$index]}
			catia:mappings = 0x22:0xa8
			fruit:metadata = stream
			rushes:share = $1-$way-$index
			rushes:socket = $3
		SHARE
	done
}

same() { # WHAT FILE FILE
	cmp -s "$2" "$3" || die "$where: $1: $2 and $3 differ"
}

# What was acknowledged reaches the disk by and by.
same_on_disk() { # WHAT FILE FILE
	local tries
	for ((tries = 0; tries < 300; tries++)); do
		cmp -s "$2" "$3" && return 0
		sleep 0.05
	done
	same "$@"
}

# Everyday work, as one client after the other.
work() { # SMBD SHARE FOLDER
	local out
	mkdir -p "$scratch/back"
	cd "$scratch/back"
	smb_ok() {
		out=$(smb "$1" "$2" "$3") && [[ $out != *NT_STATUS_* ]] ||
			die "$where: $3: $out"
	}

	smb_ok "$1" "$2" "put $data/long a.mov; get a.mov r1; get a.mov r2"
	same "read back" "$data/long" r1
	same "read again" "$data/long" r2
	same_on_disk "written" "$data/long" "$3/a.mov"

	# Shorter than what was cached, then longer again.
	smb_ok "$1" "$2" "put $data/short a.mov; get a.mov r1"
	same "overwritten by less" "$data/short" r1
	smb_ok "$1" "$2" "put $data/long a.mov; get a.mov r1"
	same "overwritten by more" "$data/long" r1

	smb_ok "$1" "$2" "scopy a.mov b.mov; get b.mov r1"
	same "copied by the server" "$data/long" r1

	smb_ok "$1" "$2" "put $data/short c.mov; get c.mov r1; rename a.mov c.mov -f; get c.mov r2"
	same "before a rename over it" "$data/short" r1
	same "after the rename over it" "$data/long" r2

	smb_ok "$1" "$2" "del c.mov; put $data/short c.mov; get c.mov r1"
	same "a new file of an old name" "$data/short" r1

	smb_ok "$1" "$2" "put $data/empty d.mov; get d.mov r1"
	same "an empty file" "$data/empty" r1

	if [[ ${stacks[${2#s}]} == *streams_xattr* ]]; then
		smb_ok "$1" "$2" "put $data/note b.mov:notes; get b.mov:notes r1; get b.mov r2"
		same "a named stream" "$data/note" r1
		same "the file that has it" "$data/long" r2
	fi
	smb_ok "$1" "$2" "del b.mov; del c.mov; del d.mov; ls"
	[[ -z $(ls "$3") ]] || die "$where: left over after deletion: $(ls "$3")"
	cd "$scratch"
}

tried=0
for daemon in "${daemons[@]}"; do
	socket=$scratch/no-daemon.sock
	if [[ $daemon == chaos ]]; then
		socket=$chaos_socket
	elif [[ $daemon != absent ]]; then
		served=()
		for way in "${!ways[@]}"; do
			for index in "${!stacks[@]}"; do
				share_folder "$scratch/$daemon-$way-$index"
				served+=("$daemon-$way-$index" "$scratch/$daemon-$way-$index")
			done
		done
		buffer=
		if [[ $daemon == writing ]]; then
			buffer=64MiB
		fi
		daemon_start "$daemon" "$buffer" "${served[@]}"
		socket=$session_socket
	fi
	for way in "${!ways[@]}"; do
		smbd_start "$daemon-$way" < <(
			tr '|' '\n' <<<"${ways[$way]}" | sed 's/^/\t/'
			shares "$daemon" "$way" "$socket"
		)
		for index in "${!stacks[@]}"; do
			# Every stack in smbd's own way, every way with none and all.
			if [[ $way != asynchronous ]] &&
				((index != 0 && index != ${#stacks[@]} - 1)); then
				continue
			fi
			where="daemon $daemon, $way, vfs objects = ${stacks[$index]}"
			work "$daemon-$way" "s$index" "$scratch/$daemon-$way-$index"
			tried=$((tried + 1))
		done
		smbd_stop "$daemon-$way"
	done
done
no_panic
daemons_are_well
say "passed: $tried stacks and ways"
