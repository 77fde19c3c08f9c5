// SPDX-License-Identifier: Apache-2.0
//! Just enough Rust to ask "does the code, not a comment or a string, say this?"
//!
//! No parser: [`code_only`] blanks out comments and literals and keeps every line where it was, and
//! [`without_tests`] cuts what stands behind `#[cfg(test)]`. A rule that needs more than words in
//! code belongs into clippy, not here.

/// The same text with comments, strings and character literals replaced by spaces. Newlines stay.
pub fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skip(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
        } else {
            for &c in &chars[at..end] {
                out.push(if c == '\n' { '\n' } else { ' ' });
            }
            at = end;
        }
    }
    out
}

/// End of the comment or literal that starts at `at`; `at` itself when none does.
fn skip(chars: &[char], at: usize) -> usize {
    let next = chars.get(at + 1).copied();
    match (chars[at], next) {
        ('/', Some('/')) => until(chars, at, |c| c == '\n'),
        ('/', Some('*')) => block_comment(chars, at),
        ('"', _) => string(chars, at),
        ('r', Some('"' | '#')) if !in_word(chars, at) => raw_string(chars, at),
        ('b', Some('r')) if !in_word(chars, at) => match raw_string(chars, at + 1) {
            end if end == at + 1 => at,
            end => end,
        },
        ('\'', _) => character(chars, at),
        _ => at,
    }
}

/// Whether the character before `at` continues a word, so that this `r` is not a prefix.
fn in_word(chars: &[char], at: usize) -> bool {
    at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_')
}

fn until(chars: &[char], from: usize, stop: impl Fn(char) -> bool) -> usize {
    (from..chars.len())
        .find(|&i| stop(chars[i]))
        .unwrap_or(chars.len())
}

/// Block comments nest.
fn block_comment(chars: &[char], at: usize) -> usize {
    let mut depth = 0_u32;
    let mut i = at;
    while i + 1 < chars.len() {
        match (chars[i], chars[i + 1]) {
            ('/', '*') => {
                depth += 1;
                i += 2;
            }
            ('*', '/') => {
                depth -= 1;
                i += 2;
                if depth == 0 {
                    return i;
                }
            }
            _ => i += 1,
        }
    }
    chars.len()
}

fn string(chars: &[char], at: usize) -> usize {
    let mut i = at + 1;
    while i < chars.len() {
        match chars[i] {
            '\\' => i += 2,
            '"' => return i + 1,
            _ => i += 1,
        }
    }
    chars.len()
}

/// `r"…"`, `r#"…"#`; `at` is the r. A raw identifier (`r#type`) is no string.
fn raw_string(chars: &[char], at: usize) -> usize {
    let hashes = until(chars, at + 1, |c| c != '#') - (at + 1);
    let open = at + 1 + hashes;
    if chars.get(open) != Some(&'"') {
        return at;
    }
    let mut i = open + 1;
    while i < chars.len() {
        if chars[i] == '"' && chars[i + 1..].iter().take_while(|c| **c == '#').count() >= hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    chars.len()
}

/// `'x'` or `'\n'`; a lifetime is left alone.
fn character(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), Some(_)) => (until(chars, at + 3, |c| c == '\'') + 1).min(chars.len()),
        (Some(_), Some('\'')) => at + 3,
        _ => at,
    }
}

/// `code` (already [`code_only`]) with every item behind `#[cfg(test)]` or `#[cfg(all(test, …))]`
/// blanked out.
pub fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    for marker in ["#[cfg(test)]", "#[cfg(all(test"] {
        while let Some(start) = out.find(marker) {
            let end = item_end(&out, start + marker.len());
            let blank: String = out[start..end]
                .chars()
                .map(|c| if c == '\n' { '\n' } else { ' ' })
                .collect();
            out.replace_range(start..end, &blank);
        }
    }
    out
}

/// End of the item that follows an attribute: its closing brace, or a semicolon that comes first.
fn item_end(code: &str, from: usize) -> usize {
    let mut depth = 0_u32;
    for (i, c) in code[from..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return from + i + 1;
                }
            }
            ';' if depth == 0 => return from + i + 1,
            _ => {}
        }
    }
    code.len()
}

/// Whether `word` stands in `code` as a word of its own.
pub fn has_word(code: &str, word: &str) -> bool {
    word_lines(code, word).next().is_some()
}

/// Numbers (from 1) of the lines where `word` stands as a word of its own.
pub fn word_lines<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    code.lines().enumerate().filter_map(move |(number, line)| {
        line.match_indices(word)
            .any(|(at, _)| {
                let before = line[..at].chars().next_back();
                let after = line[at + word.len()..].chars().next();
                !before.is_some_and(inside) && !after.is_some_and(inside)
            })
            .then_some(number + 1)
    })
}

/// First names of the paths that start with `prefix` (such as `crate::`), groups included:
/// `crate::{a::B, c}` is a, c.
pub fn path_heads(code: &str, prefix: &str) -> Vec<String> {
    let mut heads = Vec::new();
    for (at, _) in code.match_indices(prefix) {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(group) => heads.extend(group_heads(group)),
            None => heads.extend(leading_name(rest)),
        }
    }
    heads
}

fn leading_name(text: &str) -> Option<String> {
    let name: String = text
        .trim_start()
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    (!name.is_empty()).then_some(name)
}

/// First names of the members of a `use` group; `group` starts behind its opening brace.
fn group_heads(group: &str) -> Vec<String> {
    let mut depth = 1_u32;
    let mut heads = Vec::new();
    let mut member_start = 0;
    for (i, c) in group.char_indices() {
        let ends_member = match c {
            '{' => {
                depth += 1;
                false
            }
            '}' => {
                depth -= 1;
                depth == 0
            }
            ',' => depth == 1,
            _ => false,
        };
        if ends_member {
            heads.extend(leading_name(&group[member_start..i]));
            member_start = i + 1;
        }
        if depth == 0 {
            break;
        }
    }
    heads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_lines_stay() {
        let check = |text: &str, kept: &[&str], gone: &[&str]| {
            let code = code_only(text);
            assert_eq!(code.lines().count(), text.lines().count(), "{text}");
            for word in kept {
                assert!(has_word(&code, word), "{word} lost from {text}: {code}");
            }
            for word in gone {
                assert!(!has_word(&code, word), "{word} kept from {text}: {code}");
            }
        };
        check("a // unsafe\nb", &["a", "b"], &["unsafe"]);
        check("a /* x /* y */ z */ b", &["a", "b"], &["x", "y", "z"]);
        check(
            r#"let s = "quoted \" unsafe"; after"#,
            &["after"],
            &["unsafe"],
        );
        check(
            "let s = r#\"raw \" unsafe\"#; after",
            &["after"],
            &["unsafe"],
        );
        check("br\"raw unsafe\" after", &["after"], &["unsafe"]);
        check(
            "fn f<'a>(c: &'a str) { let q = '\"'; } after",
            &["after", "str"],
            &[],
        );
        check(
            "let r#type = 1; // gone\nlet c = '\\''; after",
            &["after", "type"],
            &["gone"],
        );
    }

    #[test]
    fn items_behind_cfg_test_are_cut() {
        let code =
            "a\n#[cfg(test)]\nmod tests { fn f() { inner } }\nb\n#[cfg(test)]\nmod other;\nc";
        let cut = without_tests(code);
        for word in ["a", "b", "c"] {
            assert!(has_word(&cut, word));
        }
        assert!(!has_word(&cut, "inner") && !has_word(&cut, "other"));
    }

    #[test]
    fn heads_of_paths_are_found_in_groups_too() {
        let code =
            "use crate::units::*; use crate::{cache::{A, B}, sched}; mycrate::x; crate::stream::Y";
        assert_eq!(
            path_heads(code, "crate::"),
            ["units", "cache", "sched", "stream"]
        );
    }
}
