// SPDX-License-Identifier: Apache-2.0
//! The command lines of the test programs: pairs of `--word value`, or that they are to explain
//! themselves.

use std::io::Write;

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// With its dashes.
    pub word: String,
    /// The value that follows it.
    pub value: String,
}

impl Pair {
    /// The value, where it is to be a number.
    pub fn number(&self) -> Result<u64, String> {
        let parsed = self.value.parse();
        parsed.map_err(|error| format!("{} {}: {error}", self.word, self.value))
    }

    /// Nobody knows it.
    pub fn unknown(&self) -> String {
        format!("unknown option {} {}", self.word, self.value)
    }
}

/// Whether somebody asks for `usage`, which is then told.
pub fn explained(usage: &str) -> bool {
    let asked = std::env::args().skip(1).any(|word| asks(&word));
    if asked {
        // A reader that reads only the first lines of it closes the pipe.
        let _ = writeln!(std::io::stdout(), "{usage}");
    }
    asked
}

fn asks(word: &str) -> bool {
    matches!(word, "--help" | "-h")
}

/// All of them, in their order; an error for a last word without a value.
pub fn pairs(
    mut words: impl Iterator<Item = String>,
) -> impl Iterator<Item = Result<Pair, String>> {
    std::iter::from_fn(move || {
        let word = words.next()?;
        let value = words.next().ok_or(format!("{word} lacks a value"));
        Some(value.map(|value| Pair { word, value }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_with_their_values() {
        let words = ["--seed", "7", "--fs", "xfs", "--last"];
        let mut all = pairs(words.into_iter().map(String::from));
        let mut next = || all.next().expect("there is one more");
        assert_eq!(next().and_then(|pair| pair.number()), Ok(7));
        let fs = next().expect("it has a value");
        assert!(
            fs.number()
                .is_err_and(|error| error.starts_with("--fs xfs: "))
        );
        assert_eq!(fs.unknown(), "unknown option --fs xfs");
        assert_eq!(next(), Err(String::from("--last lacks a value")));
        assert!(all.next().is_none());
    }
}
