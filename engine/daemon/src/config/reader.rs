// SPDX-License-Identifier: Apache-2.0
//! Walks a parsed TOML document and remembers the line of each value.
//!
//! serde would stop at the first mistake and lose the line of a value that is well-formed but
//! wrong; an operator fixes a file faster when every finding is there at once, with its line.

use super::amount;
use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One thing wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Counted from 1; 0 when it is about the file as a whole.
    pub line: usize,
    /// As `cache.bytes` or `share[2].path`.
    pub key: String,
    /// The value as it stands in the file, perhaps shortened; empty when the key is absent.
    pub read: String,
    /// The value that was expected, or the one to write instead.
    pub expected: String,
    /// The remedy, unless it is to correct that line.
    pub remedy: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        if !self.key.is_empty() {
            write!(f, "{}", self.key)?;
            if !self.read.is_empty() {
                write!(f, " = {}", self.read)?;
            }
            write!(f, ": ")?;
        }
        write!(f, "{}", self.expected)
    }
}

/// The text, and the problems found in it so far.
pub(super) struct Reader<'t> {
    text: &'t str,
    pub(super) problems: Vec<Problem>,
}

impl<'t> Reader<'t> {
    pub(super) fn new(text: &'t str) -> Reader<'t> {
        Reader {
            text,
            problems: Vec::new(),
        }
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes()[..at.min(self.text.len())]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count()
    }

    fn excerpt(&self, span: &Range<usize>) -> String {
        let raw = self.text.get(span.clone()).unwrap_or("");
        let first = raw.lines().next().unwrap_or("");
        let short: String = first.chars().take(60).collect();
        if short.len() < raw.trim_end().len() {
            format!("{short}…")
        } else {
            short
        }
    }

    /// Something is wrong with the value at `place`.
    pub(super) fn wrong(&mut self, place: &Place, expected: impl Into<String>) {
        self.note(place, expected.into(), None);
    }

    /// The same, with another remedy than to correct that line.
    pub(super) fn wrong_with_remedy(
        &mut self,
        place: &Place,
        expected: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.note(place, expected.into(), Some(remedy.into()));
    }

    fn note(&mut self, place: &Place, expected: String, remedy: Option<String>) {
        self.problems.push(Problem {
            line: place.span.as_ref().map_or(0, |span| self.line(span.start)),
            key: place.key.clone(),
            read: match (&place.span, place.is_table) {
                (Some(span), false) => self.excerpt(span),
                _ => String::new(),
            },
            expected,
            remedy,
        });
    }

    /// The line of a place, for a sentence that points elsewhere.
    pub(super) fn line_of(&self, place: &Place) -> usize {
        place.span.as_ref().map_or(0, |span| self.line(span.start))
    }

    /// Parse errors of the language itself.
    pub(super) fn syntax(&mut self, error: &toml::de::Error) {
        let span = error.span().unwrap_or(0..0);
        let line_number = self.line(span.start);
        let line = self.text.lines().nth(line_number - 1).unwrap_or("").trim();
        self.problems.push(Problem {
            line: line_number,
            key: String::new(),
            read: String::new(),
            expected: format!("{line:?} is not TOML: {}", error.message()),
            remedy: Some(String::from(
                "write it as key = value, with text, sizes and times in double quotes, below its [section]; the mistake may be in the line before",
            )),
        });
    }
}

/// The key of a value and its place in the text.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) key: String,
    pub(super) span: Option<Range<usize>>,
    /// The place is a whole table; its text is not quoted.
    pub(super) is_table: bool,
}

/// A table that is read key by key; the keys that are left at the end are unknown.
pub(super) struct Section<'a, 'i> {
    name: String,
    place: Place,
    table: Option<&'a DeTable<'i>>,
    known: Vec<&'static str>,
}

/// A value and where it stands.
pub(super) struct Found<T> {
    pub(super) value: T,
    pub(super) place: Place,
}

impl<'a, 'i> Section<'a, 'i> {
    /// `table`: None stands for an absent, therefore empty, table.
    pub(super) fn new(
        name: &str,
        span: Option<Range<usize>>,
        table: Option<&'a DeTable<'i>>,
    ) -> Section<'a, 'i> {
        Section {
            name: name.to_string(),
            place: Place {
                key: name.to_string(),
                span,
                is_table: true,
            },
            table,
            known: Vec::new(),
        }
    }

    /// Where the table itself stands.
    pub(super) fn place(&self) -> Place {
        self.place.clone()
    }

    fn key(&self, key: &str) -> String {
        if self.name.is_empty() {
            key.to_string()
        } else {
            format!("{}.{key}", self.name)
        }
    }

    /// The raw value of `key`, which is known from now on.
    pub(super) fn get(&mut self, key: &'static str) -> Option<Found<&'a DeValue<'i>>> {
        self.known.push(key);
        let (_, value) = self.table?.iter().find(|(name, _)| name.get_ref() == key)?;
        Some(Found {
            value: value.get_ref(),
            place: Place {
                key: self.key(key),
                span: Some(value.span()),
                is_table: false,
            },
        })
    }

    /// Whether the key is there, right or wrong.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table
            .is_some_and(|table| table.iter().any(|(name, _)| name.get_ref() == key))
    }

    /// A value that `convert` understands, else a problem with `expected`.
    pub(super) fn value<T>(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
        expected: &str,
        convert: impl FnOnce(&DeValue<'i>) -> Option<T>,
    ) -> Option<Found<T>> {
        let found = self.get(key)?;
        match convert(found.value) {
            Some(value) => Some(Found {
                value,
                place: found.place,
            }),
            None => {
                reader.wrong(&found.place, format!("expected {expected}"));
                None
            }
        }
    }

    pub(super) fn string(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
        expected: &str,
    ) -> Option<Found<String>> {
        self.value(reader, key, expected, |value| {
            value.as_str().map(str::to_string)
        })
    }

    pub(super) fn boolean(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<bool>> {
        self.value(reader, key, "true or false", |value| value.as_bool())
    }

    pub(super) fn size(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<u64>> {
        self.value(reader, key, amount::SIZE_EXPECTED, |value| {
            integer(value).or_else(|| amount::parse_size(value.as_str()?))
        })
    }

    pub(super) fn bitrate(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<u64>> {
        self.value(reader, key, amount::BITRATE_EXPECTED, |value| {
            integer(value).or_else(|| amount::parse_bitrate(value.as_str()?))
        })
    }

    pub(super) fn duration(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<u64>> {
        self.value(reader, key, amount::DURATION_EXPECTED, |value| {
            amount::parse_duration(value.as_str()?)
        })
    }

    /// Report every key that was not read.
    pub(super) fn finish(self, reader: &mut Reader<'_>) {
        let Some(table) = self.table else { return };
        for (name, value) in table {
            let name: &Spanned<_> = name;
            if self.known.iter().any(|known| name.get_ref() == known) {
                continue;
            }
            let place = Place {
                key: self.key(name.get_ref()),
                span: Some(name.span()),
                is_table: true,
            };
            let what = if value.get_ref().is_table() || value.get_ref().is_array() {
                "section"
            } else {
                "key"
            };
            let meant = match nearest(name.get_ref(), &self.known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known here: {}", self.known.join(", ")),
            };
            reader.wrong(&place, format!("there is no such {what}; {meant}"));
        }
    }
}

/// A non-negative TOML integer in any of its notations.
fn integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    u64::from_str_radix(&integer.as_str().replace('_', ""), integer.radix()).ok()
}

/// A TOML number as thousandths, exactly: `23.976` → 23976.
pub(super) fn thousandths(value: &DeValue<'_>) -> Option<u64> {
    if let Some(whole) = integer(value) {
        return whole.checked_mul(1000);
    }
    let text = value.as_float()?.as_str().to_string();
    let number: f64 = text.parse().ok()?;
    if !number.is_finite() || !(0.0..=1e9).contains(&number) {
        return None;
    }
    Some((number * 1000.0).round() as u64)
}

/// The known word that a mistyped one is most like, if any is like it at all.
pub(super) fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let lower = word.to_lowercase();
    known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, candidate), *candidate))
        .filter(|(distance, candidate)| {
            *distance <= 1 + candidate.len().min(lower.len()) / 3
                || candidate.starts_with(&lower)
                || lower.starts_with(candidate)
        })
        .min()
        .map(|(_, candidate)| candidate)
}
