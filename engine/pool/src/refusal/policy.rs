// SPDX-License-Identifier: Apache-2.0
//! Why a pool does not take rules and policies. core says which ones there can be.

use rushes_core::pool::{Class, RuleFault};
use std::fmt;

/// Why a pool does not take rules and policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyRefusal {
    /// The rules cannot be a pool's.
    Rule(RuleFault),
    /// The pattern of a rule cannot be understood.
    Pattern {
        /// It.
        pattern: String,
        /// The fault of it.
        fault: globset::ErrorKind,
    },
    /// No member has a class that a policy asks for.
    Lacks(LackedClass),
}

/// A class that a pool's policy or a rule asks for, and that no member has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LackedClass {
    /// The class.
    pub class: Class,
    /// The classes of the members, each once.
    pub known: Vec<Class>,
    /// The pattern of the rule that asks for it. None: the pool's own policy does.
    pub rule: Option<String>,
}

impl fmt::Display for PolicyRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyRefusal::Rule(fault) => fault.fmt(f),
            PolicyRefusal::Pattern { pattern, fault } => write!(
                f,
                "\"{pattern}\" is no pattern ({fault}); expected one such as \"conform/**/*.exr\"; write the rule again"
            ),
            PolicyRefusal::Lacks(lacked) => lacked.fmt(f),
        }
    }
}

impl fmt::Display for LackedClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pattern) = &self.rule {
            write!(f, "the rule \"{pattern}\": ")?;
        }
        let class = self.class.name();
        write!(f, "no member is of the class {class} (")?;
        let known: Vec<&str> = self.known.iter().map(Class::name).collect();
        match known.as_slice() {
            [] => f.write_str("none is of a class yet"),
            known => write!(f, "they are of {}", known.join(", ")),
        }?;
        write!(
            f,
            "); expected one at least; give a member that class (`rushes pool policy CATALOGUE --class NUMBER={class}`)"
        )
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<PolicyRefusal> {
    let (ssd, raid) = (Class::of("ssd").unwrap(), Class::of("raid").unwrap());
    vec![
        PolicyRefusal::Rule(rushes_core::pool::Rule::of("", "single").unwrap_err()),
        PolicyRefusal::Pattern {
            pattern: String::from("{mov"),
            fault: globset::ErrorKind::UnclosedClass,
        },
        PolicyRefusal::Lacks(LackedClass {
            class: ssd.clone(),
            known: vec![raid],
            rule: Some(String::from("**/*.mov")),
        }),
        PolicyRefusal::Lacks(LackedClass {
            class: ssd,
            known: Vec::new(),
            rule: None,
        }),
    ]
}
