#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Is every entry of Samba's VFS accounted for? doors/smb/vfs-table.txt is held
# to the headers of the installed Samba and to the module's function table.

# shellcheck source=lib/smbd.bash
. "$(dirname "$0")/lib/smbd.bash"

headers=$("$root/doors/smb/headers.sh" --path)
header=$headers/source3/include/vfs.h
table=$root/doors/smb/vfs-table.txt
code=$root/doors/smb/vfs_rushes.c
[[ -f $header ]] || skip "needs $header: run doors/smb/headers.sh"

entries() { # HEADER: the function pointers of the struct, comments left out
	sed -n '/^struct vfs_fn_pointers {/,/^};/p' "$1" |
		/usr/bin/python3 -c 'import re, sys
print(re.sub(r"/\*.*?\*/", "", sys.stdin.read(), flags=re.S))' |
		grep -oE '\(\*?\(?\*?[a-z0-9_]+_fn\)' | tr -d '(*)' | sort
}

# check HEADER TABLE CODE: one line for each finding
check() {
	local lines known hooked_table hooked_code
	lines=$(sed 's/#.*//; /^[[:space:]]*$/d' "$2")
	known=$(cut -d' ' -f1 <<<"$lines" | sort)
	hooked_table=$(sed -n 's/ hooked: .*//p' <<<"$lines" | sort)
	hooked_code=$(sed -n '/vfs_fn_pointers vfs_rushes_fns/,/^};/s/^\t\.\([a-z0-9_]*\) = .*/\1/p' "$3" | sort)
	comm -23 <(entries "$1") <(uniq <<<"$known") |
		sed 's/$/: Samba has it, the table says neither hooked nor why not/'
	uniq -d <<<"$known" | sed 's/$/: stands in the table twice/'
	grep -vE '^[a-z0-9_]+_fn (hooked|passes): [^ ]+( [^ ]+)+' <<<"$lines" |
		sed 's/$/: expected "NAME hooked: what for" or "NAME passes: why"/'
	comm -23 <(echo "$hooked_table") <(echo "$hooked_code") |
		sed 's/$/: the table says hooked, the module does not/'
	comm -13 <(echo "$hooked_table") <(echo "$hooked_code") |
		sed 's/$/: the module hooks it, the table does not say so/'
}

# ---- the checker itself: each fault must be found ----

make_scratch
finds() { # WHAT HEADER TABLE CODE
	[[ $(check "$2" "$3" "$4" | wc -l) -eq 1 ]] ||
		die "the check does not find $1: $(check "$2" "$3" "$4")"
}
sed 's/^\tssize_t (\*pread_fn)/\tint (*new_data_fn)(void);\n&/' "$header" >"$scratch/h"
finds "an entry that a new Samba brings" "$scratch/h" "$table" "$code"
sed '/^rewind_dir_fn /d' "$table" >"$scratch/t"
finds "a line that is missing" "$header" "$scratch/t" "$code"
sed 's/^\(telldir_fn passes:\).*/\1/' "$table" >"$scratch/t"
finds "a line without a reason" "$header" "$scratch/t" "$code"
sed '/\.recvfile_fn = /d' "$code" >"$scratch/c"
finds "a hook that was lost" "$header" "$table" "$scratch/c"

# ---- and now ----

count=$(entries "$header" | wc -l)
((count > 90)) || die "read only $count entries from $header: its form has changed"
findings=$(check "$header" "$table" "$code")
[[ -z $findings ]] || die "doors/smb/vfs-table.txt:"$'\n'"$findings"
say "passed: $count entries of interface version" \
	"$(sed -n 's/^#define SMB_VFS_INTERFACE_VERSION //p' "$header")," \
	"$(grep -c '^[a-z].* hooked: ' "$table") hooked, $(grep -c '^[a-z].* passes: ' "$table") pass for a reason"
