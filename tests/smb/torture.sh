#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# smbtorture, test by test: does a client see any difference between stock
# Samba and Samba with our module? Stock itself fails some tests, so that never
# an exit code counts but the comparison.
#
#   torture.sh              the quick suites, under a minute
#   torture.sh --all        all suites, some ten minutes
#   torture.sh SUITE...     these (names as smbtorture lists them: smb2.read)
#
# Left out: smb2.maxfid, which opens files until descriptors run out.
#
# Compared with stock: the module without a daemon ("absent"), with a client
# library that is as nasty as it may be ("chaos", doors/smb/test), and with a
# daemon where the program `rushes` is built: one that reads ahead ("present")
# and one that also keeps what is written ("writing"). VARIANTS names those that
# are wanted, if not all. A suite with a difference is run again, twice: what
# then agrees was noise and is reported as such, the rest is a failure.

# shellcheck source=lib/smbd.bash
. "$(dirname "$0")/lib/smbd.bash"

quick=(read rw lock rename compound compound_async
	delete-on-close-perms durable-open durable-v2-open ioctl sharemode deny
	streams credits fileid create timestamps)
slow=(oplock lease dir compound_find getinfo setinfo bench
	session connect multichannel kernel-oplocks notify acls
	durable-v2-delay dosmode maximum_allowed)
suite_seconds_max=400
runs_max=3

suites=()
case ${1:-} in
'') suites=("${quick[@]/#/smb2.}") ;;
--all)
	suites=("${quick[@]/#/smb2.}" "${slow[@]/#/smb2.}")
	;;
-*) die "unknown option '$1': expected --all or names of suites" ;;
*) suites=("$@") ;;
esac

needs_root
needs_programs smbd smbtorture pdbedit setsid unshare
needs_module
make_scratch

# Without these, smbtorture's results are noisy by nature (clocks of a second,
# locks of the kernel).
share() { # NAME VFS-OBJECTS [LINE...]
	share_folder "$scratch/share-$1"
	cat <<-SHARE
	[torture]
		path = $scratch/share-$1
		read only = no
		store dos attributes = yes
		map hidden = no
		map system = no
		map readonly = no
		map archive = no
		create mask = 755
		dos filemode = yes
		strict rename = yes
		strict sync = yes
		kernel oplocks = no
		kernel share modes = no
		posix locking = no
		ea support = yes
		smbd:sharedelay = 100000
		smbd:writetimeupdatedelay = 500000
		vfs objects = $2
	SHARE
	shift 2
	printf '\t%s\n' "$@"
}

wanted=" ${VARIANTS:-absent chaos present writing} "
variants=(stock)
smbd_start stock < <(share stock "acl_xattr streams_xattr")

# variant NAME SOCKET: the module, with what listens there
variant() {
	variants+=("$1")
	smbd_start "$1" < <(share "$1" "acl_xattr streams_xattr rushes" \
		"rushes:socket = $2")
}

# variant_with_daemon NAME WRITE-BUFFER
variant_with_daemon() {
	share_folder "$scratch/share-$1"
	daemon_start "$1" "$2" torture "$scratch/share-$1"
	variant "$1" "$session_socket"
}

if [[ $wanted == *" absent "* ]]; then
	variant absent "$scratch/no-daemon.sock"
fi
if [[ $wanted == *" chaos "* ]]; then
	chaos_start
	variant chaos "$chaos_socket"
fi
if ! has_daemon; then
	say "no program rushes with a daemon: compared without it"
else
	if [[ $wanted == *" present "* ]]; then
		variant_with_daemon present ""
	fi
	if [[ $wanted == *" writing "* ]]; then
		variant_with_daemon writing 64MiB
	fi
fi
((${#variants[@]} > 1)) || die "nothing to compare with: VARIANTS=$VARIANTS"

# run VARIANT SUITE: "TEST RESULT" lines, sorted, in $scratch/VARIANT/results
run() {
	local folder=$scratch/$1/torture
	mkdir -p "$folder"
	(cd "$folder" && timeout -k 5 "$suite_seconds_max" smbtorture \
		"//127.0.0.1/torture" -p "${port_of[$1]}" \
		-U "$user%$password" "$2" >out 2>&1) || true
	# Names hold spaces, and some come twice.
	sed -nE 's/^(success|failure|error|skip|xfail|uxsuccess): ([^[]*[^[ ]).*/\1 \2/p' \
		"$folder/out" | awk '{
			result = $1
			$1 = ""
			name = substr($0, 2)
			gsub(/ /, "_", name)
			print name (seen[name]++ ? "#" seen[name] : ""), result
		}' | sort >"$scratch/$1/results"
}

run_all() {
	local variant pids=()
	for variant in "${variants[@]}"; do
		run "$variant" "$1" &
		pids+=("$!")
	done
	wait "${pids[@]}"
}

# differences VARIANT: lines "TEST: stock RESULT, here RESULT"
differences() {
	join -a1 -a2 -e missing -o 0,1.2,2.2 "$scratch/stock/results" \
		"$scratch/$1/results" |
		awk '$2 != $3 { print $1 ": stock " $2 ", here " $3 }'
}

compared=0
passed=0
failed=0
noisy=0
for suite in "${suites[@]}"; do
	start=$SECONDS
	declare -A still=()
	for ((run_count = 1; run_count <= runs_max; run_count++)); do
		run_all "$suite"
		again=0
		for variant in "${variants[@]:1}"; do
			now=$(differences "$variant" | cut -d: -f1 | sort)
			if ((run_count == 1)); then
				still[$variant]=$now
			else
				still[$variant]=$(comm -12 <(echo "${still[$variant]}") <(echo "$now"))
			fi
			if [[ -n ${still[$variant]} ]]; then
				again=1
			fi
		done
		if ((run_count == 1)); then
			count=$(wc -l <"$scratch/stock/results")
			success=$(grep -c ' success$' "$scratch/stock/results" || true)
			first=$again
		fi
		((again)) || break
	done
	((count > 0)) || {
		tail -n 20 "$scratch/stock/torture/out" >&2
		die "$suite: stock Samba gave no result at all"
	}
	compared=$((compared + count))
	passed=$((passed + success))
	verdict="same as stock"
	if ((first && !again)); then
		noisy=$((noisy + 1))
		verdict="same as stock, after run $run_count (noise)"
	fi
	for variant in "${variants[@]:1}"; do
		[[ -n ${still[$variant]} ]] || continue
		failed=$((failed + 1))
		verdict="DIFFERS"
		differences "$variant" | sed "s/^/  $suite, daemon $variant: /"
		cp "$scratch/$variant/torture/out" "$build/torture-$variant-$suite.log"
		say "output kept: $build/torture-$variant-$suite.log"
	done
	say "$suite: $count tests, stock passes $success, $verdict ($((SECONDS - start)) s)"
done
no_panic
daemons_are_well

((failed == 0)) || die "$failed suites differ from stock"
((passed * 2 > compared)) || die "stock passed only $passed of $compared tests:" \
	"that compares nothing"
say "passed: ${#suites[@]} suites, $compared tests, each with the result of stock" \
	"(which passes $passed); compared: ${variants[*]:1}; noisy suites: $noisy"
