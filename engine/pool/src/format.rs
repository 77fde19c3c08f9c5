// SPDX-License-Identifier: Apache-2.0
//! The file `rushes-pool` that makes a folder the catalogue or a member of a pool.
//!
//! It is JSON for the person at the rack, and strict: an unknown name is damage, a newer version is told apart before anything else is looked at.

use crate::error::PoolError;
use crate::rules::Rules;
use rushes_core::pool::tidy::Schedule;
use rushes_core::pool::{Class, MemberNumber, Policy, PoolId, Rule, Wish};
use rustix::fs::{Mode, OFlags, fsync, openat, renameat};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// Its name.
pub const FORMAT_FILE: &str = "rushes-pool";
/// Version of both kinds.
pub const FORMAT_VERSION: u32 = 1;
/// Longer is none. Units: bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Of one member, and of no other: 128 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberId(pub u128);

/// What makes a folder a catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CatalogueFormat {
    pub(crate) pool: PoolId,
    pub(crate) policy: Policy,
    /// Of files that say nothing themselves.
    pub(crate) wish: Wish,
    /// Of files that are made under names of a pattern.
    pub(crate) rules: Rules,
    /// When it may tidy itself.
    pub(crate) tidy: Schedule,
    pub(crate) members: Vec<MemberEntry>,
    /// A number that every member's is below, also those that were removed: numbers are not given twice.
    pub(crate) members_given: u32,
    /// Those of them that were given up with what they had: records may name them still.
    pub(crate) lost: BTreeSet<MemberNumber>,
}

/// A member, as the catalogue knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberEntry {
    pub(crate) number: MemberNumber,
    pub(crate) id: MemberId,
    pub(crate) path: PathBuf,
    pub(crate) duty: Duty,
    pub(crate) class: Option<Class>,
}

impl MemberEntry {
    /// One that takes bytes.
    pub(crate) fn new(number: MemberNumber, id: MemberId, path: PathBuf) -> MemberEntry {
        MemberEntry {
            number,
            id,
            path,
            duty: Duty::Full,
            class: None,
        }
    }
}

/// What a member is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Duty {
    /// Everything.
    #[default]
    Full,
    /// It keeps what it has and takes nothing new: it is to be empty.
    Draining,
    /// It has nothing, and is being removed.
    Leaving,
}

impl Duty {
    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Duty::Full => "full",
            Duty::Draining => "draining",
            Duty::Leaving => "leaving",
        }
    }

    fn of(name: Option<&str>) -> Option<Duty> {
        let all = [Duty::Full, Duty::Draining, Duty::Leaving];
        name.map_or(Some(Duty::Full), |name| {
            all.into_iter().find(|duty| duty.name() == name)
        })
    }
}

/// What makes a folder a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberFormat {
    pub(crate) pool: PoolId,
    pub(crate) number: MemberNumber,
    pub(crate) id: MemberId,
}

/// Either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Catalogue(CatalogueFormat),
    Member(MemberFormat),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CatalogueText {
    rushes_pool: String,
    format_version: u32,
    pool_id: String,
    policy: String,
    /// Only where something is wished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wish: Option<String>,
    /// Only where there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rules: Option<Vec<RuleText>>,
    /// Only where it tidies itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tidy: Option<String>,
    /// Only where a member was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    members_given: Option<u32>,
    /// Only where a member was given up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lost: Vec<u16>,
    members: Vec<MemberText>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemberText {
    number: u16,
    member_id: String,
    /// A path need not be text.
    path: PathText,
    /// Only where it is not full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    duty: Option<String>,
    /// Only where it is of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    class: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    pattern: String,
    wish: String,
}

/// As text where it is some, else as hexadecimal digits of its bytes.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum PathText {
    Text(String),
    Bytes { hex: String },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnText {
    rushes_pool: String,
    format_version: u32,
    pool_id: String,
    number: u16,
    member_id: String,
}

/// What to look at before anything else.
#[derive(Deserialize)]
struct Head {
    rushes_pool: String,
    format_version: u32,
}

pub(crate) fn hex(id: u128) -> String {
    format!("{id:032x}")
}

fn id_of(text: &str) -> Result<u128, String> {
    if text.len() != 32 {
        return Err(format!("{text:?} is no id of 32 hexadecimal digits"));
    }
    u128::from_str_radix(text, 16)
        .map_err(|_| format!("{text:?} is no id of 32 hexadecimal digits"))
}

impl PathText {
    fn of(path: &Path) -> PathText {
        use std::os::unix::ffi::OsStrExt;
        match path.to_str() {
            Some(text) => PathText::Text(text.to_owned()),
            None => PathText::Bytes {
                hex: path
                    .as_os_str()
                    .as_bytes()
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect(),
            },
        }
    }

    fn path(self) -> Result<PathBuf, String> {
        use std::os::unix::ffi::OsStringExt;
        let path = match self {
            PathText::Text(text) => PathBuf::from(text),
            PathText::Bytes { hex } => {
                let digits: Option<Vec<u8>> = hex
                    .as_bytes()
                    .chunks(2)
                    .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
                    .collect();
                let bytes = digits.ok_or_else(|| format!("{hex:?} is no path"))?;
                PathBuf::from(std::ffi::OsString::from_vec(bytes))
            }
        };
        if path.is_absolute() {
            Ok(path)
        } else {
            Err(format!("{} is no absolute path", path.display()))
        }
    }
}

impl Format {
    pub(crate) fn text(&self) -> Result<String, serde_json::Error> {
        let text = match self {
            Format::Catalogue(format) => serde_json::to_string_pretty(&CatalogueText {
                rushes_pool: String::from("catalogue"),
                format_version: FORMAT_VERSION,
                pool_id: hex(format.pool.0),
                policy: format.policy.name().to_owned(),
                wish: (format.wish != Wish::default()).then(|| format.wish.to_string()),
                rules: (!format.rules.is_empty()).then(|| {
                    let rules = format.rules.iter();
                    let text = |rule: &Rule| RuleText {
                        pattern: rule.pattern().to_owned(),
                        wish: rule.wish().to_string(),
                    };
                    rules.map(text).collect()
                }),
                tidy: (format.tidy != Schedule::Off).then(|| format.tidy.to_string()),
                members_given: (format.members_given > most(&format.members))
                    .then_some(format.members_given),
                lost: format.lost.iter().map(|number| number.0).collect(),
                members: format
                    .members
                    .iter()
                    .map(|member| MemberText {
                        number: member.number.0,
                        member_id: hex(member.id.0),
                        path: PathText::of(&member.path),
                        duty: (member.duty != Duty::Full).then(|| member.duty.name().to_owned()),
                        class: member.class.as_ref().map(|class| class.name().to_owned()),
                    })
                    .collect(),
            }),
            Format::Member(format) => serde_json::to_string_pretty(&OwnText {
                rushes_pool: String::from("member"),
                format_version: FORMAT_VERSION,
                pool_id: hex(format.pool.0),
                number: format.number.0,
                member_id: hex(format.id.0),
            }),
        }?;
        Ok(text + "\n")
    }

    /// Errors   a clause about the file
    pub(crate) fn of(text: &str) -> Result<Format, String> {
        let damaged = |error: serde_json::Error| format!("cannot be understood ({error})");
        let head: Head = serde_json::from_str(text).map_err(damaged)?;
        if head.format_version > FORMAT_VERSION {
            return Err(format!(
                "is of format version {}, this Rushes knows versions up to {FORMAT_VERSION}; use a newer Rushes",
                head.format_version
            ));
        }
        if head.format_version == 0 {
            return Err(String::from("is of format version 0, which there is not"));
        }
        let said = |clause: String| format!("cannot be understood ({clause})");
        match head.rushes_pool.as_str() {
            "catalogue" => {
                let text: CatalogueText = serde_json::from_str(text).map_err(damaged)?;
                let policy = Policy::of(&text.policy)
                    .ok_or_else(|| said(format!("{:?} is no policy", text.policy)))?;
                let wish = Wish::of(text.wish.as_deref().unwrap_or_default())
                    .map_err(|fault| said(fault.to_string()))?;
                let rules = rules_of(text.rules).map_err(said)?;
                let tidy = Schedule::of(text.tidy.as_deref().unwrap_or("off"))
                    .ok_or_else(|| said(format!("{:?} is no schedule", text.tidy)))?;
                let members: Result<Vec<MemberEntry>, String> = text
                    .members
                    .into_iter()
                    .map(|member| {
                        Ok(MemberEntry {
                            number: MemberNumber(member.number),
                            id: MemberId(id_of(&member.member_id)?),
                            path: member.path.path()?,
                            duty: Duty::of(member.duty.as_deref())
                                .ok_or_else(|| format!("{:?} is no duty", member.duty))?,
                            class: class_of(member.class)?,
                        })
                    })
                    .collect();
                let members = members.map_err(said)?;
                let mut numbers: Vec<u16> = members.iter().map(|member| member.number.0).collect();
                numbers.sort_unstable();
                numbers.dedup();
                if numbers.len() != members.len() || members.is_empty() {
                    return Err(said(String::from(
                        "it has no members, or two of one number",
                    )));
                }
                let lost: BTreeSet<MemberNumber> =
                    text.lost.into_iter().map(MemberNumber).collect();
                if let Some(both) = members.iter().find(|one| lost.contains(&one.number)) {
                    let number = both.number.0;
                    return Err(said(format!("member {number} is there and given up")));
                }
                let behind_lost = lost.last().map_or(0, |number| u32::from(number.0) + 1);
                let given = text.members_given.unwrap_or(0).max(behind_lost);
                Ok(Format::Catalogue(CatalogueFormat {
                    pool: PoolId(id_of(&text.pool_id).map_err(said)?),
                    policy,
                    wish,
                    rules,
                    tidy,
                    members_given: given.max(most(&members)),
                    members,
                    lost,
                }))
            }
            "member" => {
                let text: OwnText = serde_json::from_str(text).map_err(damaged)?;
                Ok(Format::Member(MemberFormat {
                    pool: PoolId(id_of(&text.pool_id).map_err(said)?),
                    number: MemberNumber(text.number),
                    id: MemberId(id_of(&text.member_id).map_err(said)?),
                }))
            }
            other => Err(said(format!("{other:?} is neither catalogue nor member"))),
        }
    }
}

fn class_of(name: Option<String>) -> Result<Option<Class>, String> {
    name.map(|name| Class::of(&name).ok_or_else(|| format!("{name:?} is no class")))
        .transpose()
}

fn rules_of(rules: Option<Vec<RuleText>>) -> Result<Rules, String> {
    let rules = rules.unwrap_or_default().into_iter();
    let rule = |text: RuleText| Rule::of(&text.pattern, &text.wish);
    let rules: Result<Vec<Rule>, _> = rules.map(rule).collect();
    Rules::of(rules.map_err(|fault| fault.to_string())?)
}

/// One more than the highest number.
fn most(members: &[MemberEntry]) -> u32 {
    let numbers = members.iter().map(|member| u32::from(member.number.0) + 1);
    numbers.max().unwrap_or(0)
}

/// What is wrong with a format file, apart from its not being there.
#[derive(Debug)]
pub(crate) enum FormatFault {
    /// It cannot be read.
    Failed(std::io::Error),
    /// A clause: "is of format version 7, …".
    Wrong(String),
}

impl std::fmt::Display for FormatFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FormatFault::Failed(error) => write!(f, "cannot be read: {error}"),
            FormatFault::Wrong(clause) => write!(f, "{clause}"),
        }
    }
}

/// Read the file of this name in a folder. None: it is not there.
pub(crate) fn read(folder: BorrowedFd<'_>, name: &str) -> Result<Option<Format>, FormatFault> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match openat(folder, name, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(FormatFault::Failed(error.into())),
    };
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX)
        .read_to_end(&mut text)
        .map_err(FormatFault::Failed)?;
    let text = String::from_utf8(text)
        .map_err(|_| FormatFault::Wrong(String::from("cannot be understood (it is no text)")))?;
    Format::of(&text).map(Some).map_err(FormatFault::Wrong)
}

/// Write a format file, durably: whole under its name, or not there.
pub(crate) fn write(
    folder: BorrowedFd<'_>,
    path: &Path,
    name: &str,
    format: &Format,
) -> Result<(), PoolError> {
    let text = format.text().map_err(|error| {
        PoolError::system("write the format file", path.display().to_string(), error)
    })?;
    replace_file(folder, path, name, text.as_bytes())
}

/// Replace a small file, durably: it has the old bytes or the new ones, whatever happens meanwhile.
pub(crate) fn replace_file(
    folder: BorrowedFd<'_>,
    path: &Path,
    name: &str,
    bytes: &[u8],
) -> Result<(), PoolError> {
    let failed = |error: std::io::Error| {
        PoolError::system("write", path.join(name).display().to_string(), error)
    };
    let temporary = format!("{name}.tmp");
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = openat(folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR)
        .map_err(|error| failed(error.into()))?;
    let mut file = File::from(fd);
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .map_err(failed)?;
    renameat(folder, temporary.as_str(), folder, name).map_err(|error| failed(error.into()))?;
    fsync(folder).map_err(|error| failed(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As versions wrote it that knew neither classes nor wishes.
    const OLD: &str = r#"{
  "rushes_pool": "catalogue",
  "format_version": 1,
  "pool_id": "000102030405060708090a0b0c0d0e0f",
  "policy": "round_robin",
  "members": [
    {
      "number": 0,
      "member_id": "101112131415161718191a1b1c1d1e1f",
      "path": "/mnt/a"
    },
    {
      "number": 1,
      "member_id": "202122232425262728292a2b2c2d2e2f",
      "path": "/mnt/b"
    }
  ]
}
"#;

    fn catalogue(text: &str) -> Result<CatalogueFormat, String> {
        Format::of(text).map(|format| match format {
            Format::Catalogue(format) => format,
            Format::Member(_) => panic!("{text}"),
        })
    }

    #[test]
    fn what_says_nothing_of_places_is_written_as_it_always_was() {
        let format = catalogue(OLD).unwrap();
        assert_eq!(format.wish, Wish::default());
        assert_eq!(format.rules, Rules::default());
        assert_eq!(format.tidy, Schedule::Off);
        assert!(format.members.iter().all(|member| member.class.is_none()));
        assert_eq!(Format::Catalogue(format).text().unwrap(), OLD);
    }

    #[test]
    fn wish_rules_and_classes_read_back() {
        let mut format = catalogue(OLD).unwrap();
        format.wish = Wish::of("striped=2 class=raid").unwrap();
        let rules = [
            ("conform/**/*.exr", "class=raid"),
            ("**/\"M\u{fc}ller\" \\[1\\]", ""),
        ];
        let rules = rules.map(|(pattern, words)| Rule::of(pattern, words).unwrap());
        format.rules = Rules::of(rules.to_vec()).unwrap();
        format.tidy = Schedule::of("22:00-06:30").unwrap();
        format.members[1].class = Class::of("raid");
        let text = Format::Catalogue(format.clone()).text().unwrap();
        assert!(
            text.contains("\"wish\": \"striped=2 class=raid\""),
            "{text}"
        );
        assert_eq!(text.matches("\"class\": \"raid\"").count(), 1, "{text}");
        assert!(text.contains("\"tidy\": \"22:00-06:30\""), "{text}");
        assert!(text.contains("\"pattern\": \"conform/**/*.exr\""), "{text}");
        assert_eq!(catalogue(&text), Ok(format));
    }

    #[test]
    fn words_that_nobody_knows_are_damage() {
        let policy = "\"policy\": \"round_robin\"";
        let rule = |rule: &str| format!("{policy}, \"rules\": [{rule}]");
        let many: Vec<String> = (0..65)
            .map(|number| format!(r#"{{"pattern": "{number}", "wish": ""}}"#))
            .collect();
        for (was, now, said) in [
            (policy, &*rule("\"**\""), "invalid type"),
            (
                policy,
                &rule(r#"{"pattern": "**"}"#),
                "missing field `wish`",
            ),
            (
                policy,
                &rule(r#"{"pattern": "**", "wish": "single", "but": "*.mov"}"#),
                "unknown field `but`",
            ),
            (
                policy,
                &rule(r#"{"pattern": "a/**", "wish": "fast"}"#),
                "the rule \"a/**\": \"fast\": expected single",
            ),
            (
                policy,
                &rule(r#"{"pattern": "/a/**", "wish": "single"}"#),
                "without / at its beginning",
            ),
            (
                policy,
                &rule(r#"{"pattern": "{mov", "wish": "single"}"#),
                "\"{mov\" is no pattern",
            ),
            (
                policy,
                &rule(r#"{"pattern": "a", "wish": ""}, {"pattern": "a", "wish": "single"}"#),
                "two rules for the pattern \"a\"",
            ),
            (policy, &rule(&many.join(",")), "65 rules; expected 64"),
            (
                "\"policy\": \"round_robin\"",
                "\"policy\": \"round_robin\", \"wish\": \"fast\"",
                "fast",
            ),
            (
                "\"policy\": \"round_robin\"",
                "\"policy\": \"round_robin\", \"tidy\": \"at noon\"",
                "is no schedule",
            ),
            (
                "\"path\": \"/mnt/a\"",
                "\"path\": \"/mnt/a\", \"class\": \"The SSDs\"",
                "is no class",
            ),
        ] {
            let fault = catalogue(&OLD.replace(was, now)).unwrap_err();
            assert!(fault.contains("cannot be understood"), "{fault}");
            assert!(fault.contains(said), "{fault}");
        }
    }
}
