#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Is there a Rust that can build this? Says how to get one when there is not.
set -euo pipefail

manifest="$(cd "$(dirname "$0")/.." && pwd)/Cargo.toml"
wanted="$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$manifest")"
remedy="Install it from https://rustup.rs (Debian's own is older), then run this again."

if ! command -v cargo >/dev/null; then
	echo "rust: no cargo in PATH, Rust $wanted or later is needed. $remedy" >&2
	exit 1
fi
found="$(cargo --version | sed -n 's/^cargo \([0-9.]*\).*/\1/p')"
if [ "$(printf '%s\n%s\n' "$wanted" "$found" | sort -V | head -n1)" != "$wanted" ]; then
	echo "rust: cargo is $found, $wanted or later is needed. $remedy" >&2
	exit 1
fi
for component in fmt clippy; do
	if ! cargo "$component" --version >/dev/null 2>&1; then
		echo "rust: cargo $component is missing; run: rustup component add rustfmt clippy" >&2
		exit 1
	fi
done
echo "rust: $found (at least $wanted)"
