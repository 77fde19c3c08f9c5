// SPDX-License-Identifier: Apache-2.0
//! The policy for the bytes of a file: how they are spread, over which members, and how those are
//! chosen.
//!
//! It is text that any user may read and set, in `user.rushes.policy` of a file or folder; a pool
//! has one, too. It has words, in any order.
//!
//! | word | meaning |
//! |---|---|
//! | `single` | all bytes in one object, until its member is full |
//! | `striped`, `striped=4` | unit by unit over all members, or over so many |
//! | `striped=2x4` | in two stages: over two groups, and each group's bytes over its four members |
//! | `unit=1MiB` | of a stripe; a power of two from 4 KiB to 1 GiB |
//! | `group_unit=16MiB` | of the stripe over groups; not smaller than `unit` |
//! | `choose=round_robin` | which member is asked first: see [`Policy`] |
//! | `class=ssd` | only members of this class |

use super::layout::UNIT_LOG2;
use super::place::Policy;
use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

/// The attribute of files and folders that has a wish.
pub const WISH_ATTRIBUTE: &str = "user.rushes.policy";
/// Longest text. Units: bytes.
pub const WISH_BYTES_MAX: usize = 128;
/// Longest name of a class. Units: bytes.
const CLASS_BYTES_MAX: usize = 16;
/// Unit of a stripe whose policy names none, as logarithm: 1 MiB, a frame or two.
const UNIT_DEFAULT_LOG2: u8 = 20;
/// Most objects of a stripe.
pub(super) const STRIPE_MAX: u8 = 64;

/// How bytes are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// In one object.
    Single,
    /// Over the members of one stage.
    Striped {
        /// How many; None: all there are.
        members: Option<u8>,
    },
    /// Over groups, then over the members of each.
    StripedTwice {
        /// Groups; 2 at least.
        groups: u8,
        /// Members of each; 2 at least.
        members: u8,
    },
}

/// A kind of members, as an operator calls it: `raid`, `ssd`, `archive`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class(String);

impl Class {
    /// None: it is empty, too long, or has other than small letters, digits, `-` and `_`.
    pub fn of(name: &str) -> Option<Class> {
        let is_sound = (1..=CLASS_BYTES_MAX).contains(&name.len())
            && name
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'));
        is_sound.then(|| Class(name.to_owned()))
    }

    /// As it is written.
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// A policy. A missing word comes from the next policy: the folder's, then the pool's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// How bytes are spread.
    pub spread: Option<Spread>,
    /// Unit of a stripe, as logarithm.
    pub unit_log2: Option<u8>,
    /// Unit of the stripe over groups, as logarithm.
    pub group_unit_log2: Option<u8>,
    /// Which member is asked first.
    pub choose: Option<Policy>,
    /// Only members of this class.
    pub class: Option<Class>,
}

/// Why a text is no wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WishFault(String);

impl fmt::Display for WishFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Wish {
    /// Read one. An empty text is a policy without words.
    pub fn of(text: &str) -> Result<Wish, WishFault> {
        if text.len() > WISH_BYTES_MAX {
            return Err(WishFault(format!(
                "{} bytes; expected {WISH_BYTES_MAX} at most",
                text.len()
            )));
        }
        let mut wish = Wish::default();
        for word in text.split_ascii_whitespace() {
            wish.take(word)?;
        }
        if let (Some(unit), Some(group)) = (wish.unit_log2, wish.group_unit_log2)
            && group < unit
        {
            return Err(WishFault(format!(
                "group_unit={} is smaller than unit={}",
                size_text(group),
                size_text(unit)
            )));
        }
        Ok(wish)
    }

    fn take(&mut self, word: &str) -> Result<(), WishFault> {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (word, None),
        };
        let wrong = |expected: &str| Err(WishFault(format!("\"{word}\": expected {expected}")));
        let twice = match (key, value) {
            ("single", None) => self.spread.replace(Spread::Single).is_some(),
            ("striped", value) => {
                let Some(spread) = spread_of(value) else {
                    return wrong("striped, striped=N or striped=GxN, with 2 to 64 members in all");
                };
                self.spread.replace(spread).is_some()
            }
            ("unit", Some(value)) => {
                let Some(unit) = size_of(value) else {
                    return wrong("a power of two from 4KiB to 1GiB");
                };
                self.unit_log2.replace(unit).is_some()
            }
            ("group_unit", Some(value)) => {
                let Some(unit) = size_of(value) else {
                    return wrong("a power of two from 4KiB to 1GiB");
                };
                self.group_unit_log2.replace(unit).is_some()
            }
            ("choose", Some(value)) => {
                let Some(policy) = Policy::of(value) else {
                    let names = Policy::ALL.map(Policy::name).join(", ");
                    return wrong(&format!("one of {names}"));
                };
                self.choose.replace(policy).is_some()
            }
            ("class", Some(value)) => {
                let Some(class) = Class::of(value) else {
                    return wrong("a name of 1 to 16 small letters, digits, - or _");
                };
                self.class.replace(class).is_some()
            }
            _ => {
                return wrong(
                    "single, striped, striped=N, striped=GxN, unit=, group_unit=, choose= or class=",
                );
            }
        };
        match twice {
            true => Err(WishFault(format!("\"{word}\": that was said before"))),
            false => Ok(()),
        }
    }

    /// Take missing words from `other`. Of units that do not go together the outer one becomes as
    /// large as the inner one, so that the result is a policy, too, and reads back.
    pub fn or(self, other: &Wish) -> Wish {
        let unit_log2 = self.unit_log2.or(other.unit_log2);
        let group_unit_log2 = self.group_unit_log2.or(other.group_unit_log2);
        Wish {
            spread: self.spread.or(other.spread),
            unit_log2,
            group_unit_log2: group_unit_log2.map(|group| group.max(unit_log2.unwrap_or(group))),
            choose: self.choose.or(other.choose),
            class: self.class.or_else(|| other.class.clone()),
        }
    }

    /// Units of both stages, as logarithms; of two, the outer one is not smaller.
    pub fn units_log2(&self) -> (u8, u8) {
        let unit = self.unit_log2.unwrap_or(UNIT_DEFAULT_LOG2);
        let group = self.group_unit_log2.unwrap_or(unit + 3);
        (unit, group.clamp(unit, *UNIT_LOG2.end()))
    }
}

/// As [`Wish::of`] reads it.
impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words: Vec<String> = Vec::new();
        match self.spread {
            None => {}
            Some(Spread::Single) => words.push("single".to_string()),
            Some(Spread::Striped { members: None }) => words.push("striped".to_string()),
            Some(Spread::Striped {
                members: Some(count),
            }) => words.push(format!("striped={count}")),
            Some(Spread::StripedTwice { groups, members }) => {
                words.push(format!("striped={groups}x{members}"));
            }
        }
        if let Some(unit) = self.unit_log2 {
            words.push(format!("unit={}", size_text(unit)));
        }
        if let Some(unit) = self.group_unit_log2 {
            words.push(format!("group_unit={}", size_text(unit)));
        }
        if let Some(policy) = self.choose {
            words.push(format!("choose={}", policy.name()));
        }
        if let Some(class) = &self.class {
            words.push(format!("class={}", class.name()));
        }
        f.write_str(&words.join(" "))
    }
}

fn spread_of(value: Option<&str>) -> Option<Spread> {
    let Some(value) = value else {
        return Some(Spread::Striped { members: None });
    };
    let count = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let count: u8 = is_number.then(|| text.parse().ok())??;
        (2..=STRIPE_MAX).contains(&count).then_some(count)
    };
    match value.split_once('x') {
        None => Some(Spread::Striped {
            members: Some(count(value)?),
        }),
        Some((groups, members)) => {
            let (groups, members) = (count(groups)?, count(members)?);
            let all = u16::from(groups) * u16::from(members);
            (all <= u16::from(STRIPE_MAX)).then_some(Spread::StripedTwice { groups, members })
        }
    }
}

/// The logarithm of a power of two that a stripe's unit can be.
fn size_of(text: &str) -> Option<u8> {
    let (digits, shift) = [("KiB", 10), ("MiB", 20), ("GiB", 30)]
        .into_iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = is_number.then(|| digits.parse().ok())??;
    let bytes = number.checked_shl(shift).filter(|_| number < 1 << 30)?;
    let log2 = u8::try_from(bytes.checked_ilog2()?).ok()?;
    (bytes.is_power_of_two() && UNIT_LOG2.contains(&log2)).then_some(log2)
}

fn size_text(log2: u8) -> String {
    match log2 {
        0..20 => format!("{}KiB", 1u64 << log2.saturating_sub(10)),
        20..30 => format!("{}MiB", 1u64 << (log2 - 20)),
        _ => format!("{}GiB", 1u64 << (log2 - 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_read_back() {
        for text in [
            "",
            "single",
            "striped",
            "striped=4 unit=64KiB choose=round_robin class=raid",
            "striped=2x4 unit=1MiB group_unit=16MiB",
            "unit=1GiB",
            "class=ssd-2_b",
        ] {
            assert_eq!(
                Wish::of(text).map(|wish| wish.to_string()),
                Ok(text.to_string())
            );
        }
        assert_eq!(
            Wish::of(" class=ssd   single\t").map(|wish| wish.to_string()),
            Ok("single class=ssd".to_string())
        );
    }

    #[test]
    fn what_is_none_says_what_was_expected() {
        for (text, said) in [
            ("striped=1", "2 to 64"),
            ("striped=9x9", "2 to 64"),
            ("striped=+4", "2 to 64"),
            ("striped=4x", "2 to 64"),
            ("unit=3MiB", "power of two"),
            ("unit=2KiB", "power of two"),
            ("unit=2GiB", "power of two"),
            ("unit=99999999999999999999GiB", "power of two"),
            ("unit=1", "power of two"),
            ("unit", "expected single"),
            ("choose=best", "round_robin"),
            ("class=SSD", "small letters"),
            ("class=", "small letters"),
            ("single striped", "before"),
            ("unit=8MiB group_unit=4MiB", "smaller"),
            ("fast", "expected single"),
        ] {
            let fault = Wish::of(text).expect_err(text).to_string();
            assert!(fault.contains(said), "{text}: {fault}");
        }
        assert!(Wish::of(&"single ".repeat(30)).is_err());
    }

    /// A policy put together of two is written into an attribute.
    #[test]
    fn the_longest_wish_fits() {
        let all = "striped=16x4 unit=512KiB group_unit=512MiB choose=most_free_space class=0123456789-abcde";
        let wish = Wish::of(all).expect("a wish");
        assert_eq!(wish.to_string(), all);
        assert!(all.len() <= WISH_BYTES_MAX, "{}", all.len());
    }

    #[test]
    fn what_a_file_does_not_say_its_pool_says() {
        let file = Wish::of("striped=4").expect("a wish");
        let pool = Wish::of("single unit=64KiB choose=round_robin").expect("a wish");
        let both = file.or(&pool);
        assert_eq!(both.to_string(), "striped=4 unit=64KiB choose=round_robin");
        assert_eq!(both.units_log2(), (16, 19));
        for (file, pool, expect) in [
            ("group_unit=1MiB", "unit=4MiB", "unit=4MiB group_unit=4MiB"),
            ("unit=4MiB", "group_unit=1MiB", "unit=4MiB group_unit=4MiB"),
            ("unit=1MiB", "group_unit=4MiB", "unit=1MiB group_unit=4MiB"),
            ("", "group_unit=64KiB", "group_unit=64KiB"),
        ] {
            let both = [file, pool].map(|words| Wish::of(words).expect("a wish"));
            let [file, pool] = both;
            let both = file.or(&pool);
            assert_eq!(both.to_string(), expect);
            assert_eq!(Wish::of(expect), Ok(both));
        }
        let large = Wish::of("unit=1GiB").expect("a wish");
        assert_eq!(large.units_log2(), (30, 30));
    }
}
