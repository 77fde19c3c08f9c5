// SPDX-License-Identifier: Apache-2.0
//! The file `rushes-pool` that makes a folder the catalogue or a member of a pool.
//!
//! It is JSON for the person at the rack, and strict: an unknown name is damage, and the reader
//! checks for a newer version before anything else.

use crate::error::PoolError;
use crate::member::random;
use crate::rules::Rules;
use rushes_core::pool::tidy::Schedule;
use rushes_core::pool::{Class, MemberNumber, Policy, PoolId, Rule, Wish};
use rustix::fs::{AtFlags, Mode, OFlags, fsync, openat, renameat, unlinkat};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Its name.
pub const FORMAT_FILE: &str = "rushes-pool";
/// Version of both kinds.
pub const FORMAT_VERSION: u32 = 2;
/// A file names the lowest version that has all its fields: 2 has `catalogue_number` and
/// `catalogue_id`.
fn version_of(catalogue: CatalogueIdentity) -> u32 {
    match catalogue.number {
        0 => 1,
        _ => FORMAT_VERSION,
    }
}
/// A longer file is no format file. Units: bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The least that a device writes whole or not at all. Units: bytes.
const SECTOR_BYTES: usize = 512;

/// Of one member, and of no other: 128 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberId(pub u128);

/// Tells apart the catalogues that a pool has had: each rescue makes one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CatalogueIdentity {
    /// 0; a rescue gives one more than any that it has found. Members know the highest one, and
    /// belong to no other.
    pub(crate) number: u32,
    /// 128 random bits of the rescue: two rescues of different members may give the same number. 0
    /// with the number 0.
    pub(crate) id: u128,
}

/// The catalogue that a member names as its own, seen from a catalogue of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CatalogueOrder {
    /// This one.
    Same,
    /// One before it, of which it takes members over.
    Earlier,
    /// One that a rescue has made since.
    Later,
    /// One of the same number, which another rescue has made.
    Beside,
}

impl CatalogueIdentity {
    /// One that follows none yet.
    pub(crate) fn draw() -> Result<CatalogueIdentity, PoolError> {
        let id = u128::from(random()?) << 64 | u128::from(random()?);
        Ok(CatalogueIdentity { number: 0, id })
    }

    /// The same, which follows that one, too.
    pub(crate) fn following(self, before: CatalogueIdentity) -> CatalogueIdentity {
        CatalogueIdentity {
            number: self.number.max(before.number.saturating_add(1)),
            ..self
        }
    }

    /// Whether the catalogue of a member came before this one or after it.
    pub(crate) fn order_of(self, of_member: CatalogueIdentity) -> CatalogueOrder {
        match of_member.number.cmp(&self.number) {
            Ordering::Less => CatalogueOrder::Earlier,
            Ordering::Greater => CatalogueOrder::Later,
            Ordering::Equal if of_member.id == self.id => CatalogueOrder::Same,
            Ordering::Equal => CatalogueOrder::Beside,
        }
    }

    fn of(number: u32, id: Option<&str>) -> Result<CatalogueIdentity, String> {
        match (number, id) {
            (0, None) => Ok(CatalogueIdentity::default()),
            (0, Some(_)) => Err(String::from("it has catalogue_id without catalogue_number")),
            (_, None) => Err(String::from("it has catalogue_number without catalogue_id")),
            (number, Some(id)) => {
                let id = id_of(id)?;
                Ok(CatalogueIdentity { number, id })
            }
        }
    }

    /// As it is written.
    fn id_text(self) -> Option<String> {
        (self.number > 0).then(|| hex(self.id))
    }
}

impl std::fmt::Display for CatalogueIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "number {}, id {}", self.number, hex(self.id))
    }
}

/// The content that makes a folder a catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CatalogueFormat {
    pub(crate) pool: PoolId,
    pub(crate) catalogue: CatalogueIdentity,
    pub(crate) policy: Policy,
    /// Policy of files without one of their own.
    pub(crate) wish: Wish,
    /// Policies of new files with names of a pattern.
    pub(crate) rules: Rules,
    /// When it may tidy itself.
    pub(crate) tidy: Schedule,
    pub(crate) members: Vec<MemberEntry>,
    /// A number above every member's, also of removed ones: the pool gives no number twice.
    pub(crate) members_given: u32,
    /// Members that were given up with their bytes: layouts may still name them.
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

/// The purpose of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Duty {
    /// It takes new bytes.
    #[default]
    Full,
    /// It takes no new bytes, and a drain moves its own away.
    Draining,
    /// It has no bytes, and is being removed.
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

/// The content that makes a folder a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberFormat {
    pub(crate) pool: PoolId,
    /// The one to which it belongs.
    pub(crate) catalogue: CatalogueIdentity,
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
    /// Only after a rescue.
    #[serde(default, skip_serializing_if = "is_zero")]
    catalogue_number: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    catalogue_id: Option<String>,
    policy: String,
    /// Only where the pool has a policy for files.
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
    /// Only where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    class: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    pattern: String,
    wish: String,
}

/// As text where it is UTF-8, else as hexadecimal digits of its bytes.
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
    /// As the catalogue's.
    #[serde(default, skip_serializing_if = "is_zero")]
    catalogue_number: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    catalogue_id: Option<String>,
    number: u16,
    member_id: String,
}

/// The fields to look at before anything else.
#[derive(Deserialize)]
struct Head {
    rushes_pool: String,
    format_version: u32,
}

/// serde gives a reference.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn is_zero(number: &u32) -> bool {
    *number == 0
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
                format_version: version_of(format.catalogue),
                pool_id: hex(format.pool.0),
                catalogue_number: format.catalogue.number,
                catalogue_id: format.catalogue.id_text(),
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
                format_version: version_of(format.catalogue),
                pool_id: hex(format.pool.0),
                catalogue_number: format.catalogue.number,
                catalogue_id: format.catalogue.id_text(),
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
                    catalogue: CatalogueIdentity::of(
                        text.catalogue_number,
                        text.catalogue_id.as_deref(),
                    )
                    .map_err(said)?,
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
                    catalogue: CatalogueIdentity::of(
                        text.catalogue_number,
                        text.catalogue_id.as_deref(),
                    )
                    .map_err(said)?,
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
    Rules::of(rules.map_err(|fault| fault.to_string())?).map_err(|fault| fault.to_string())
}

/// One more than the highest number.
fn most(members: &[MemberEntry]) -> u32 {
    let numbers = members.iter().map(|member| u32::from(member.number.0) + 1);
    numbers.max().unwrap_or(0)
}

/// The fault of a format file, apart from its not being there.
#[derive(Debug)]
pub enum FormatFault {
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
    // A power cut in `replace_in_place` may leave zero bytes behind the text.
    let text = text.trim_end_matches(['\0', ' ', '\n']);
    Format::of(text).map(Some).map_err(FormatFault::Wrong)
}

/// Write a format file, durably: after a crash it has the old text or the new one. On a full file
/// system this writes a member's in place.
pub(crate) fn write(
    folder: BorrowedFd<'_>,
    path: &Path,
    name: &str,
    format: &Format,
) -> Result<(), PoolError> {
    let text = format.text().map_err(|error| {
        PoolError::system("write the format file", path.display().to_string(), error)
    })?;
    let replaced = replace_file(folder, path, name, text.as_bytes());
    match format {
        Format::Catalogue(_) => replaced,
        Format::Member(_) => or_in_place(replaced, folder, path, name, text.as_bytes()),
    }
}

/// The outcome of [`replace_file`]; where that found no room, of a replacement that takes no inode
/// and no block.
fn or_in_place(
    replaced: Result<(), PoolError>,
    folder: BorrowedFd<'_>,
    path: &Path,
    name: &str,
    text: &[u8],
) -> Result<(), PoolError> {
    match replaced {
        Err(error) if error.is_full() => match replace_in_place(folder, name, text) {
            Ok(true) => Ok(()),
            Ok(false) => Err(error),
            Err(failed) => {
                let about = path.join(name).display().to_string();
                Err(PoolError::system("write in place", about, failed))
            }
        },
        replaced => replaced,
    }
}

/// Replace a text where it lies, durably, with spaces behind it up to the file's length: JSON
/// allows them. After a crash [`read`] returns the old text or the new one.
///
/// Assumes  a device writes a sector whole or not at all, and the file begins with one of a block
///          of its own, or in its inode, which the file system replaces whole
/// Returns  false: the file is not there, or the old text or the new one is longer than a sector
/// Errors   the file system writes each version of a block to a new place, as btrfs does, or the
///          disk fails; then the file has the old text, unless its disk keeps bytes that it did not
///          acknowledge
fn replace_in_place(folder: BorrowedFd<'_>, name: &str, text: &[u8]) -> std::io::Result<bool> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match openat(folder, name, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::NOENT) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    if length == 0 || length.max(text.len()) > SECTOR_BYTES {
        return Ok(false);
    }
    if let Some(more) = text.len().checked_sub(length).filter(|more| *more > 0) {
        // The old text stays. The length may come to the disk before the spaces: zero bytes then.
        file.write_all_at(&vec![b' '; more], length as u64)?;
        file.sync_all()?;
    }
    let mut padded = text.to_vec();
    padded.resize(length.max(text.len()), b' ');
    // One call, so that no part of it comes to the disk alone.
    if file.write_at(&padded, 0)? != padded.len() {
        return Err(std::io::ErrorKind::WriteZero.into());
    }
    file.sync_all()?;
    Ok(true)
}

/// Replace a small file, durably: after a crash it has the old bytes or the new ones. If the rename
/// fails, this deletes the temporary file.
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
    let made = openat(folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR)
        .map_err(std::io::Error::from)
        .and_then(|fd| {
            let mut file = File::from(fd);
            file.write_all(bytes)?;
            file.sync_all()?;
            Ok(renameat(folder, temporary.as_str(), folder, name)?)
        });
    if let Err(error) = made {
        let _ = unlinkat(folder, temporary.as_str(), AtFlags::empty());
        return Err(failed(error));
    }
    fsync(folder).map_err(|error| failed(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use std::fs;
    use std::os::fd::AsFd;

    /// As versions without classes and policies wrote it.
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

    const MEMBER: MemberFormat = MemberFormat {
        pool: PoolId(1),
        catalogue: CatalogueIdentity { number: 0, id: 0 },
        number: MemberNumber(7),
        id: MemberId(3),
    };

    /// A folder with a member's format file, for one test.
    struct Folder {
        path: PathBuf,
        fd: File,
    }

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("rushes-format.{}.{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir(&path).unwrap();
            let fd = File::open(&path).unwrap();
            write(fd.as_fd(), &path, FORMAT_FILE, &Format::Member(MEMBER)).unwrap();
            Folder { path, fd }
        }

        fn file(&self) -> PathBuf {
            self.path.join(FORMAT_FILE)
        }

        fn read(&self) -> Result<Option<Format>, String> {
            read(self.fd.as_fd(), FORMAT_FILE).map_err(|fault| fault.to_string())
        }

        /// As `write` does it after this error of the attempt to replace the file.
        fn write_after(&self, replaced: Errno, format: &Format) -> Result<(), PoolError> {
            let replaced = Err(PoolError::system("write", "", replaced));
            let text = format.text().unwrap();
            let folder = self.fd.as_fd();
            or_in_place(replaced, folder, &self.path, FORMAT_FILE, text.as_bytes())
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.path);
        }
    }

    #[test]
    fn number_and_id_of_a_catalogue_read_back_and_one_without_the_other_is_damage() {
        let rescued = CatalogueIdentity { number: 3, id: 9 };
        let mut of_pool = catalogue(OLD).unwrap();
        of_pool.catalogue = rescued;
        let member = MemberFormat {
            catalogue: rescued,
            ..MEMBER
        };
        let id = format!("  \"catalogue_id\": \"{}\",\n", hex(9));
        let number = "  \"catalogue_number\": 3,\n";
        for format in [Format::Catalogue(of_pool), Format::Member(member)] {
            let text = format.text().unwrap();
            assert!(text.contains("\"format_version\": 2"), "{text}");
            assert_eq!(Format::of(&text), Ok(format));
            let without_id = text.replace(&id, "");
            let fault = Format::of(&without_id).unwrap_err();
            assert!(fault.contains("catalogue_number without"), "{fault}");
            let fault = Format::of(&text.replace(number, "")).unwrap_err();
            assert!(fault.contains("catalogue_id without"), "{fault}");
            let before = Format::of(&without_id.replace(number, ""));
            assert!(before.is_ok(), "of before the first rescue");
        }
        let text = Format::Member(MEMBER).text().unwrap();
        assert!(!text.contains("catalogue_"), "{text}");
    }

    #[test]
    fn a_catalogue_follows_all_that_were_found_and_is_beside_others_of_its_number() {
        let of = |number, id| CatalogueIdentity { number, id };
        let made = of(0, 5)
            .following(of(0, 0))
            .following(of(3, 8))
            .following(of(1, 9));
        assert_eq!(made, of(4, 5));
        assert_eq!(made.order_of(made), CatalogueOrder::Same);
        assert_eq!(made.order_of(of(4, 6)), CatalogueOrder::Beside);
        assert_eq!(made.order_of(of(3, 5)), CatalogueOrder::Earlier);
        assert_eq!(made.order_of(of(5, 5)), CatalogueOrder::Later);
        let drawn = [(); 2].map(|()| CatalogueIdentity::draw().unwrap());
        assert_ne!(drawn[0], drawn[1]);
    }

    #[test]
    fn zero_bytes_and_spaces_behind_the_text_are_nothing() {
        let folder = Folder::new("behind");
        let text = fs::read_to_string(folder.file()).unwrap();
        for behind in ["\0\0\0", "   ", "\0\0  \0", " \n\0"] {
            fs::write(folder.file(), format!("{text}{behind}")).unwrap();
            assert_eq!(folder.read(), Ok(Some(Format::Member(MEMBER))));
        }
        for fault in [format!("\0{text}"), text.replace(',', "\0"), text + "x"] {
            fs::write(folder.file(), &fault).unwrap();
            assert!(folder.read().is_err(), "{fault:?}");
        }
    }

    #[test]
    fn a_full_file_system_has_a_longer_and_a_shorter_text_in_the_same_inode() {
        use std::os::unix::fs::MetadataExt;
        let folder = Folder::new("in-place");
        let inode = fs::metadata(folder.file()).unwrap().ino();
        let longest = MemberFormat {
            catalogue: CatalogueIdentity {
                number: u32::MAX,
                id: u128::MAX,
            },
            number: MemberNumber(u16::MAX),
            ..MEMBER
        };
        let mut length = 0;
        for format in [longest, MEMBER, longest].map(Format::Member) {
            for full in [Errno::NOSPC, Errno::DQUOT] {
                folder.write_after(full, &format).unwrap();
                assert_eq!(folder.read(), Ok(Some(format.clone())));
                let now = fs::metadata(folder.file()).unwrap();
                length = length.max(format.text().unwrap().len());
                assert_eq!((now.ino(), now.len()), (inode, length as u64));
            }
        }
        assert!(length <= SECTOR_BYTES);
        // With room in the file system the file has no spaces again.
        let format = Format::Member(MEMBER);
        write(folder.fd.as_fd(), &folder.path, FORMAT_FILE, &format).unwrap();
        let text = fs::read_to_string(folder.file()).unwrap();
        assert_eq!(text, format.text().unwrap());
    }

    #[test]
    fn only_what_fits_a_sector_is_written_in_place_and_only_where_there_is_no_room() {
        let folder = Folder::new("refused");
        let format = Format::Member(MemberFormat {
            number: MemberNumber(8),
            ..MEMBER
        });
        let before = fs::read(folder.file()).unwrap();
        let error = folder.write_after(Errno::IO, &format).unwrap_err();
        assert_eq!(error.errno(), Errno::IO);
        assert_eq!(fs::read(folder.file()).unwrap(), before);
        let long = [&before[..], &[b' '; SECTOR_BYTES]].concat();
        fs::write(folder.file(), &long).unwrap();
        let error = folder.write_after(Errno::NOSPC, &format).unwrap_err();
        assert_eq!(error.errno(), Errno::NOSPC);
        assert_eq!(fs::read(folder.file()).unwrap(), long);
        fs::remove_file(folder.file()).unwrap();
        let error = folder.write_after(Errno::NOSPC, &format).unwrap_err();
        assert_eq!(error.errno(), Errno::NOSPC);
        assert_eq!(folder.read(), Ok(None), "half a member is none");
    }

    #[test]
    fn no_half_file_is_left_of_one_that_could_not_be_replaced() {
        let folder = Folder::new("half");
        fs::create_dir(folder.path.join("taken")).unwrap();
        replace_file(folder.fd.as_fd(), &folder.path, "taken", b"text").unwrap_err();
        assert!(!folder.path.join("taken.tmp").exists());
    }
}
