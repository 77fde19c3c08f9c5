// SPDX-License-Identifier: Apache-2.0
//! Rules of a pool: the policies for files that are made under names of a pattern. They have an
//! order, and the first that matches counts.
//! engine/pool decides whether a name is of a pattern, and reads patterns as the daemon does; this
//! file defines which lists of rules are valid, and how they change.

use super::wish::{Wish, WishFault};
use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

/// Most rules of a pool.
pub const RULE_COUNT_MAX: usize = 64;
/// Longest pattern. Units: bytes.
pub const PATTERN_BYTES_MAX: usize = 255;

/// The policy for files that are made under names of this pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pattern: String,
    wish: Wish,
}

/// Why something is no rule, or no list of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFault(String);

impl fmt::Display for RuleFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Rule {
    /// Read one. Without words files of this pattern are spared the rules behind it.
    pub fn of(pattern: &str, words: &str) -> Result<Rule, RuleFault> {
        let fault = |what: &str| Err(RuleFault(format!("the pattern \"{pattern}\" {what}")));
        if pattern.is_empty() {
            return fault("is empty; expected one such as \"conform/**/*.exr\"");
        }
        if pattern.len() > PATTERN_BYTES_MAX {
            return fault(&format!(
                "has {} bytes; expected {PATTERN_BYTES_MAX} at most",
                pattern.len()
            ));
        }
        if pattern.chars().any(char::is_control) {
            return fault("has a character that cannot be shown; expected `?` in its place");
        }
        if let Some(folder) = pattern.strip_suffix('/') {
            return fault(&format!(
                "matches no file, since it ends with /; expected \"{folder}/**\" for all files below that folder"
            ));
        }
        if pattern
            .split('/')
            .any(|part| matches!(part, "" | "." | ".."))
        {
            return fault(
                "matches no file; expected one below the root of the pool's tree, without / at its beginning and without //, . and ..",
            );
        }
        let wish = Wish::of(words)
            .map_err(|fault: WishFault| RuleFault(format!("the rule \"{pattern}\": {fault}")))?;
        Ok(Rule {
            pattern: pattern.to_owned(),
            wish,
        })
    }

    /// The pattern of its names.
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// The policy.
    pub fn wish(&self) -> &Wish {
        &self.wish
    }
}

/// Whether these can be the rules of a pool.
pub fn check_rules(rules: &[Rule]) -> Result<(), RuleFault> {
    if rules.len() > RULE_COUNT_MAX {
        return Err(RuleFault(format!(
            "{} rules; expected {RULE_COUNT_MAX} at most",
            rules.len()
        )));
    }
    for (index, rule) in rules.iter().enumerate() {
        if position(&rules[..index], &rule.pattern).is_some() {
            return Err(RuleFault(format!(
                "two rules for the pattern \"{}\"; expected one",
                rule.pattern
            )));
        }
    }
    Ok(())
}

/// The change of a pool's rules, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleChange {
    /// None of the former rules stays.
    pub is_clear: bool,
    /// The rules for these patterns go.
    pub gone: Vec<String>,
    /// These are set: in place of the one for the same pattern, else behind all others.
    pub said: Vec<Rule>,
    /// The rules that are set, also those that were there, come in front of the rule for this
    /// pattern.
    pub before: Option<String>,
}

impl RuleChange {
    /// The rules that there are then.
    pub fn of(&self, rules: &[Rule]) -> Result<Vec<Rule>, RuleFault> {
        check_rules(&self.said)?;
        let mut rules = match self.is_clear {
            true => Vec::new(),
            false => rules.to_vec(),
        };
        for pattern in &self.gone {
            let index = require_rule(&rules, pattern)?;
            rules.remove(index);
        }
        if let Some(before) = &self.before {
            if position(&self.said, before).is_some() {
                return Err(RuleFault(format!(
                    "the rule \"{before}\" is one of those that are to come before it; expected the pattern of another one, that the pool has already"
                )));
            }
            require_rule(&rules, before)?;
            rules.retain(|rule| position(&self.said, &rule.pattern).is_none());
            let index = require_rule(&rules, before)?;
            rules.splice(index..index, self.said.iter().cloned());
        } else {
            for rule in &self.said {
                match position(&rules, &rule.pattern) {
                    Some(index) => rules[index] = rule.clone(),
                    None => rules.push(rule.clone()),
                }
            }
        }
        check_rules(&rules)?;
        Ok(rules)
    }
}

fn position(rules: &[Rule], pattern: &str) -> Option<usize> {
    rules.iter().position(|rule| rule.pattern == pattern)
}

fn require_rule(rules: &[Rule], pattern: &str) -> Result<usize, RuleFault> {
    position(rules, pattern).ok_or_else(|| {
        let known: Vec<String> = rules
            .iter()
            .map(|rule| format!("\"{}\"", rule.pattern))
            .collect();
        let known = match known.as_slice() {
            [] => "it has none".to_string(),
            known => format!("expected one of {}", known.join(", ")),
        };
        RuleFault(format!(
            "the pool has no rule for the pattern \"{pattern}\"; {known}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Rule {
        let (pattern, words) = text.split_once(' ').unwrap_or((text, ""));
        Rule::of(pattern, words).expect("a rule")
    }

    fn rules(texts: &[&str]) -> Vec<Rule> {
        texts.iter().map(|text| rule(text)).collect()
    }

    fn texts(rules: &[Rule]) -> Vec<String> {
        let text = |rule: &Rule| format!("{} {}", rule.pattern, rule.wish);
        rules
            .iter()
            .map(|rule| text(rule).trim().to_owned())
            .collect()
    }

    #[test]
    fn a_rule_is_a_pattern_below_the_root_and_words() {
        for (pattern, words) in [
            ("conform/**/*.exr", "striped=2 class=ssd"),
            ("**/*.{mov,mxf}", "single"),
            ("scratch/**", ""),
            ("**", "choose=per_user"),
            ("a..b/.hidden/...", "single"),
            ("Schnitt 3/Müller=neu [1]", "class=raid"),
        ] {
            let rule = Rule::of(pattern, words).expect(pattern);
            assert_eq!(rule.pattern(), pattern);
            assert_eq!(rule.wish().to_string(), words);
        }
        assert!(Rule::of(&"x".repeat(PATTERN_BYTES_MAX), "single").is_ok());
    }

    #[test]
    fn what_is_no_rule_says_what_was_read_and_expected() {
        let check = |pattern: &str, words: &str, expect: &str| {
            let fault = Rule::of(pattern, words).expect_err(pattern).to_string();
            assert!(fault.contains(expect), "{pattern}: {fault}");
        };
        check("", "single", "is empty");
        check("/conform/**", "single", "without / at its beginning");
        check("./conform/**", "single", "below the root");
        check("a//b", "single", "without //");
        check("a/../b", "single", "and ..");
        check("conform/", "single", "expected \"conform/**\"");
        check("a\nb", "single", "cannot be shown");
        check(&"ü".repeat(128), "single", "has 256 bytes; expected 255");
        check("**", "fast", "the rule \"**\": \"fast\": expected single");
        check("**", &"single ".repeat(30), "expected 128 at most");
    }

    #[test]
    fn rules_are_said_replaced_moved_and_taken_away() {
        let now = rules(&["a class=ssd", "b", "c striped"]);
        let check = |change: &RuleChange, expect: Result<&[&str], &str>| {
            let found = change.of(&now);
            match expect {
                Ok(expect) => assert_eq!(texts(&found.expect("rules")), expect, "{change:?}"),
                Err(said) => {
                    let fault = found.expect_err(said).to_string();
                    assert!(fault.contains(said), "{change:?}: {fault}");
                }
            }
        };
        let none = RuleChange::default;
        let said = |texts: &[&str], before: Option<&str>| RuleChange {
            said: rules(texts),
            before: before.map(ToString::to_string),
            ..none()
        };
        let gone = |patterns: &[&str]| RuleChange {
            gone: patterns.iter().map(ToString::to_string).collect(),
            ..none()
        };
        check(&none(), Ok(&["a class=ssd", "b", "c striped"]));
        check(
            &said(&["d single", "b single"], None),
            Ok(&["a class=ssd", "b single", "c striped", "d single"]),
        );
        check(
            &said(&["d single", "c single"], Some("b")),
            Ok(&["a class=ssd", "d single", "c single", "b"]),
        );
        check(&gone(&["c", "a"]), Ok(&["b"]));
        let both = RuleChange {
            is_clear: true,
            ..said(&["d", "a single"], None)
        };
        check(&both, Ok(&["d", "a single"]));
        let instead = RuleChange {
            gone: ["b".to_string()].into(),
            ..said(&["b"], None)
        };
        check(&instead, Ok(&["a class=ssd", "c striped", "b"]));
        check(&gone(&["d"]), Err("expected one of \"a\", \"b\", \"c\""));
        check(&gone(&["a", "a"]), Err("no rule for the pattern \"a\""));
        check(
            &said(&["d"], Some("e")),
            Err("no rule for the pattern \"e\""),
        );
        check(&said(&["b"], Some("b")), Err("that the pool has already"));
        check(&said(&["d", "e"], Some("e")), Err("is one of those"));
        check(&said(&["d", "d single"], None), Err("two rules for"));
        let nothing = RuleChange {
            is_clear: true,
            ..gone(&["a"])
        };
        check(&nothing, Err("it has none"));
    }

    #[test]
    fn a_pool_has_so_many_rules_and_no_more() {
        let many = |count: usize| -> Vec<Rule> {
            (0..count)
                .map(|number| rule(&format!("folder{number}/** single")))
                .collect()
        };
        assert_eq!(check_rules(&many(RULE_COUNT_MAX)), Ok(()));
        let change = RuleChange {
            said: rules(&["one/more"]),
            ..RuleChange::default()
        };
        let fault = change.of(&many(RULE_COUNT_MAX)).expect_err("65");
        assert_eq!(fault.to_string(), "65 rules; expected 64 at most");
        let twice = [many(2), many(1)].concat();
        assert!(check_rules(&twice).is_err());
    }
}
