// SPDX-License-Identifier: Apache-2.0
//! The configuration, `rushes.toml`: read, checked against itself, and explained.
//!
//! Nothing here opens a share or a device: `rushes check` and the daemon's start compare the
//! configuration with the machine. Every problem names the line, the key, the value that was read
//! and the expected one; all problems are reported at once.

pub mod amount;
mod reader;

pub use reader::Problem;

use globset::{GlobBuilder, GlobMatcher};
use reader::{Found, Place, Reader, Section, nearest, thousandths};
use rushes_core::format;
use rushes_core::server::{Policy, RateHint, RateSource};
use rushes_core::units::{BytesPerSecond, Duration};
use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use toml::de::{DeTable, DeValue};
use unicode_normalization::{UnicodeNormalization, is_nfc};

/// Default path of the configuration.
pub const DEFAULT_CONFIG: &str = "/etc/rushes/rushes.toml";
/// Default folder of sockets.
pub const DEFAULT_RUNTIME_DIR: &str = "/run/rushes";
/// Default folder of calibrations.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/rushes";

/// Fewest buffers that a cache makes sense with: four streams, each with a request in flight and
/// one being played.
pub const BUFFER_COUNT_MIN: u64 = 64;
/// Longest pattern of a rule; the same as for a pool's placement rules.
const PATTERN_BYTES_MAX: usize = 255;
const BUFFER_BYTES_MIN: u64 = 64 << 10;
const BUFFER_BYTES_MAX: u64 = 1 << 20;
/// The cache table counts buffers in 32 bits; a cache of a tebibyte is also surely a typing error.
const CACHE_BYTES_MAX: u64 = 1 << 40;
/// Eight writers of the longest write each.
const WRITE_BUFFER_MIN: u64 = 64 << 20;
const WRITE_AGE_MIN_NS: u64 = 500_000_000;
const WRITE_AGE_MAX_NS: u64 = 60_000_000_000;
const PREROLL_MIN_NS: u64 = 100_000_000;
const PREROLL_MAX_NS: u64 = 60_000_000_000;
const PAUSE_MAX_NS: u64 = 3_600_000_000_000;
const MARGIN_MAX_PERMILLE: u64 = 500;
const FRAMES_MAX_THOUSANDTHS: u64 = 1_000_000;
/// A file with more shares or rules than this was generated wrongly.
const SHARE_COUNT_MAX: usize = 256;
const RULE_COUNT_MAX: usize = 4096;

/// All of `rushes.toml`, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it was read from.
    pub file: PathBuf,
    /// `cache.bytes`: size of the cache segment.
    pub cache_bytes: u64,
    /// `cache.buffer_bytes`: size of one buffer; a power of two.
    pub buffer_bytes: u32,
    /// `write.buffer_bytes`: size of the write buffer; 0: doors write past the daemon.
    pub write_buffer_bytes: u64,
    /// `server.runtime_dir`: sockets and the lock.
    pub runtime_dir: PathBuf,
    /// `server.state_dir`: calibrations, and the runs that rehearsal remembers.
    pub state_dir: PathBuf,
    /// `server.preroll`, `pause`, `margin`, `analyser`, `contracts_from_cadence`,
    /// `contracts_from_header`, `coalesce`, `rehearsal`; `write.age`.
    pub policy: Policy,
    /// `server.warm_metadata`: read names and extents while disks are idle.
    pub warm_metadata: bool,
    /// `server.control_group`: the group that may ask for status besides root.
    pub control_group: Option<String>,
    /// `server.metrics_listen`: metrics over TCP as well.
    pub metrics_listen: Option<SocketAddr>,
    /// `[[share]]`.
    pub shares: Vec<ShareConfig>,
    /// `[[rule]]`, in order; the first that matches counts.
    pub rules: Vec<RuleConfig>,
}

/// A share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareConfig {
    /// The door's name for it.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Only our doors write to its files.
    pub exclusive: bool,
}

/// Which files are read at which rate.
#[derive(Clone, Debug)]
pub struct RuleConfig {
    /// As written.
    pub pattern: String,
    /// Only in this share.
    pub share: Option<String>,
    /// Files that match are read at this.
    pub hint: RateHint,
    matcher: GlobMatcher,
}

impl RuleConfig {
    /// Whether the rule is for this file. `path`: below the share's root.
    pub fn matches(&self, share: &str, path: &str) -> bool {
        self.share
            .as_ref()
            .is_none_or(|wanted| wanted.eq_ignore_ascii_case(share))
            && self.matcher.is_match(Path::new(&*composed(path)))
    }
}

/// The name in NFC: an `ü` of one code point and a `u` with a combining diaeresis look the same,
/// and clients differ in the one that they write, as a Mac's Finder and cameras do.
fn composed(name: &str) -> Cow<'_, str> {
    match is_nfc(name) {
        true => Cow::Borrowed(name),
        false => Cow::Owned(name.nfc().collect()),
    }
}

/// Why there is no configuration.
#[derive(Debug)]
pub enum ConfigError {
    /// The file could not be read.
    Read {
        /// Which.
        file: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// It was read and has problems; never empty, in order of lines.
    Wrong {
        /// Which.
        file: PathBuf,
        /// The problems.
        problems: Vec<Problem>,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Read { file, source } => write!(
                f,
                "the configuration {} cannot be read: {source}; name another with --config, or \
                 begin with the sample, /usr/share/doc/rushes/examples/rushes.toml",
                file.display()
            ),
            ConfigError::Wrong { file, problems } => {
                for (index, problem) in problems.iter().enumerate() {
                    if index > 0 {
                        writeln!(f)?;
                    }
                    write!(f, "{}: {problem}", file.display())?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ConfigError::Read { source, .. } => Some(source),
            ConfigError::Wrong { .. } => None,
        }
    }
}

impl Config {
    /// Memory of the machine that the daemon takes for bytes of files. Units: bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.cache_bytes.saturating_add(self.write_buffer_bytes)
    }

    /// Read and check a file, and whether its control group exists.
    pub fn load(file: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(file).map_err(|source| ConfigError::Read {
            file: file.to_path_buf(),
            source,
        })?;
        Config::parse(file, &text, |group| group_id(group).is_some())
    }

    /// The runtime folder that a file names, also one with mistakes in other places; the default if
    /// it names none. None: it cannot be read, or that key is one of the mistakes.
    pub fn runtime_dir_of(file: &Path) -> Option<PathBuf> {
        let text = std::fs::read_to_string(file).ok()?;
        let (document, faults) = DeTable::parse_recoverable(&text);
        let server = document.get_ref().get("server");
        let Some(named) = server.and_then(|server| server.get_ref().get("runtime_dir")) else {
            // A part that could not be parsed may have it.
            return faults
                .is_empty()
                .then(|| PathBuf::from(DEFAULT_RUNTIME_DIR));
        };
        let named = Path::new(named.get_ref().as_str()?);
        named.is_absolute().then(|| named.components().collect())
    }

    /// Check a text. `group_exists`: whether the machine has a group of that name.
    pub fn parse(
        file: &Path,
        text: &str,
        group_exists: impl Fn(&str) -> bool,
    ) -> Result<Config, ConfigError> {
        let mut reader = Reader::new(text);
        let config = match DeTable::parse(text) {
            Ok(document) => Some(read_document(
                &mut reader,
                file,
                document.get_ref(),
                group_exists,
            )),
            Err(error) => {
                reader.syntax(&error);
                None
            }
        };
        let mut problems = reader.problems;
        problems.sort();
        match config {
            Some(config) if problems.is_empty() => Ok(config),
            _ => Err(ConfigError::Wrong {
                file: file.to_path_buf(),
                problems,
            }),
        }
    }

    /// The share that a door calls `name`; Samba's share names do not know case.
    pub fn share(&self, name: &str) -> Option<&ShareConfig> {
        self.shares
            .iter()
            .find(|share| share.name.eq_ignore_ascii_case(name))
    }

    /// The rate that the rules give a file; the first that matches counts.
    pub fn rule_for(&self, share: &str, path: &str) -> Option<RateHint> {
        self.rules
            .iter()
            .find(|rule| rule.matches(share, path))
            .map(|rule| rule.hint)
    }
}

/// The number of a group.
pub fn group_id(name: &str) -> Option<u32> {
    nix::unistd::Group::from_name(name)
        .ok()
        .flatten()
        .map(|group| group.gid.as_raw())
}

fn read_document(
    reader: &mut Reader<'_>,
    file: &Path,
    document: &DeTable<'_>,
    group_exists: impl Fn(&str) -> bool,
) -> Config {
    let mut root = Section::new("", None, Some(document));
    let cache = table(reader, &mut root, "cache");
    let cache = read_cache(reader, cache);
    let write = table(reader, &mut root, "write");
    let (write_buffer_bytes, write_age) = read_write(reader, write);
    let server = table(reader, &mut root, "server");
    let mut server = read_server(reader, server, group_exists);
    server.write_buffer_bytes = write_buffer_bytes;
    server.policy.write_age = write_age;
    let shares = tables(reader, &mut root, "share");
    let shares = read_shares(reader, shares);
    if !root.has("share") {
        let whole = Place {
            key: String::from("share"),
            span: None,
            is_table: true,
        };
        reader.wrong_with_remedy(
            &whole,
            "nothing is served; expected at least one [[share]] with name and path",
            "add three lines for each share: [[share]], then name = \"media\", as smb.conf calls it, then path = \"/srv/media\", its folder",
        );
    }
    let rules = tables(reader, &mut root, "rule");
    let rules = read_rules(reader, rules, &shares);
    root.finish(reader);
    server.file = file.to_path_buf();
    (server.cache_bytes, server.buffer_bytes) = cache;
    server.shares = shares.into_iter().map(|found| found.value).collect();
    server.rules = rules;
    server
}

/// The table `[name]`, empty when absent.
fn table<'a, 'i>(
    reader: &mut Reader<'_>,
    root: &mut Section<'a, 'i>,
    name: &'static str,
) -> Section<'a, 'i> {
    let Some(found) = root.get(name) else {
        return Section::new(name, None, None);
    };
    let table = found.value.as_table();
    if table.is_none() {
        reader.wrong(&found.place, format!("expected a section [{name}]"));
    }
    Section::new(name, found.place.span, table)
}

/// The tables `[[name]]`.
fn tables<'a, 'i>(
    reader: &mut Reader<'_>,
    root: &mut Section<'a, 'i>,
    name: &'static str,
) -> Vec<Section<'a, 'i>> {
    let Some(found) = root.get(name) else {
        return Vec::new();
    };
    let Some(array) = found.value.as_array() else {
        let place = Place {
            is_table: found.value.is_table(),
            ..found.place
        };
        reader.wrong(
            &place,
            format!("expected [[{name}]] with two brackets, once for each {name}"),
        );
        return Vec::new();
    };
    let mut sections = Vec::new();
    for (index, item) in array.iter().enumerate() {
        let key = format!("{name}[{}]", index + 1);
        match item.get_ref() {
            DeValue::Table(table) => {
                sections.push(Section::new(&key, Some(item.span()), Some(table)));
            }
            _ => {
                let place = Place {
                    key,
                    span: Some(item.span()),
                    is_table: false,
                };
                reader.wrong(&place, format!("expected a section [[{name}]]"));
            }
        }
    }
    sections
}

/// `[write]`: size and age of the write buffer.
fn read_write(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> (u64, Duration) {
    let buffer = section.size(reader, "buffer_bytes");
    let age = section.duration(reader, "age");
    section.finish(reader);
    let bytes = buffer.as_ref().map_or(0, |buffer| buffer.value);
    if let Some(buffer) = &buffer
        && bytes != 0
        && !(WRITE_BUFFER_MIN..=CACHE_BYTES_MAX).contains(&bytes)
    {
        reader.wrong(
            &buffer.place,
            "expected at least \"64MiB\", or 0: then every write goes to the disk at once",
        );
    }
    if let Some(age) = &age
        && !(WRITE_AGE_MIN_NS..=WRITE_AGE_MAX_NS).contains(&age.value)
    {
        reader.wrong(&age.place, "expected \"500ms\" to \"60s\"");
    }
    let default = Policy::default().write_age;
    (bytes, age.map_or(default, |age| Duration(age.value)))
}

/// `[cache]`: its size, and that of a buffer.
fn read_cache(reader: &mut Reader<'_>, mut section: Section<'_, '_>) -> (u64, u32) {
    let cache = section.size(reader, "bytes");
    let buffer = section.size(reader, "buffer_bytes");
    section.finish(reader);

    let buffer_bytes = buffer.as_ref().map_or(BUFFER_BYTES_MAX, |b| b.value);
    let cache_bytes = cache.as_ref().map_or(1 << 30, |c| c.value);
    let buffer_ok = (BUFFER_BYTES_MIN..=BUFFER_BYTES_MAX).contains(&buffer_bytes)
        && buffer_bytes.is_power_of_two();
    if let (Some(buffer), false) = (&buffer, buffer_ok) {
        reader.wrong(
            &buffer.place,
            "expected a power of two from \"64KiB\" to \"1MiB\"",
        );
        return (cache_bytes, BUFFER_BYTES_MAX as u32);
    }
    if let Some(cache) = &cache {
        let least = BUFFER_COUNT_MIN * buffer_bytes;
        if cache_bytes < least {
            reader.wrong(
                &cache.place,
                format!(
                    "expected at least {} ({BUFFER_COUNT_MIN} buffers of {})",
                    amount::show_size(least),
                    amount::show_size(buffer_bytes)
                ),
            );
        } else if cache_bytes > CACHE_BYTES_MAX {
            reader.wrong(&cache.place, "expected at most \"1TiB\"");
        }
    }
    (cache_bytes, buffer_bytes as u32)
}

/// `[server]`: everything else that is about the daemon.
fn read_server(
    reader: &mut Reader<'_>,
    mut section: Section<'_, '_>,
    group_exists: impl Fn(&str) -> bool,
) -> Config {
    let runtime_dir = absolute(reader, &mut section, "runtime_dir", DEFAULT_RUNTIME_DIR);
    let state_dir = absolute(reader, &mut section, "state_dir", DEFAULT_STATE_DIR);
    let policy = read_policy(reader, &mut section);
    let group = section.string(reader, "control_group", "the name of a group");
    if let Some(group) = &group
        && !group_exists(&group.value)
    {
        reader.wrong_with_remedy(
            &group.place,
            format!(
                "there is no such group on this machine; create it (`groupadd --system {}`) or \
                 leave the key out",
                group.value
            ),
            format!(
                "groupadd --system {}; or leave the key out: then only root may ask the daemon",
                group.value
            ),
        );
    }
    let metrics_listen = section.value(
        reader,
        "metrics_listen",
        "an address and a port, such as \"127.0.0.1:9464\"",
        |value| value.as_str()?.parse().ok(),
    );
    let warm_metadata = section.boolean(reader, "warm_metadata");
    section.finish(reader);
    Config {
        file: PathBuf::new(),
        cache_bytes: 0,
        buffer_bytes: 0,
        write_buffer_bytes: 0,
        runtime_dir,
        state_dir,
        policy,
        warm_metadata: warm_metadata.is_none_or(|flag| flag.value),
        control_group: group.map(|group| group.value),
        metrics_listen: metrics_listen.map(|address| address.value),
        shares: Vec::new(),
        rules: Vec::new(),
    }
}

fn read_policy(reader: &mut Reader<'_>, section: &mut Section<'_, '_>) -> Policy {
    let default = Policy::default();
    let preroll = section.duration(reader, "preroll");
    if let Some(preroll) = &preroll
        && !(PREROLL_MIN_NS..=PREROLL_MAX_NS).contains(&preroll.value)
    {
        reader.wrong(
            &preroll.place,
            "expected at least \"100ms\", since a disk may take that long to answer, and at most \
             \"60s\"",
        );
    }
    let pause = section.duration(reader, "pause");
    if let Some(pause) = &pause
        && pause.value > PAUSE_MAX_NS
    {
        reader.wrong(
            &pause.place,
            "expected at most \"1h\": no other client gets the bandwidth until then",
        );
    }
    let margin = section.value(
        reader,
        "margin",
        "a share of the device in per cent, such as \"2%\"",
        |value| match value {
            DeValue::String(text) => amount_permille(text.trim().strip_suffix('%')?.trim()),
            _ => None,
        },
    );
    if let Some(margin) = &margin
        && margin.value > MARGIN_MAX_PERMILLE
    {
        reader.wrong(
            &margin.place,
            "expected at most \"50%\": contracts never use this part of a device",
        );
    }
    let analyser = section.boolean(reader, "analyser");
    let cadence = section.boolean(reader, "contracts_from_cadence");
    let header = section.boolean(reader, "contracts_from_header");
    let coalesce = section.boolean(reader, "coalesce");
    let rehearsal = section.boolean(reader, "rehearsal");
    if let Some(analyser) = &analyser
        && !analyser.value
    {
        for other in [&cadence, &header].into_iter().flatten() {
            if other.value {
                let line = reader.line_of(&analyser.place);
                reader.wrong_with_remedy(
                    &other.place,
                    format!(
                        "contradicts server.analyser = false in line {line}: without the analyser no \
                         contract is made; leave one of the two out"
                    ),
                    format!("take this line out, or line {line} if there are to be contracts"),
                );
            }
        }
    }
    Policy {
        preroll: preroll.map_or(default.preroll, |preroll| Duration(preroll.value)),
        pause: pause.map_or(default.pause, |pause| Duration(pause.value)),
        margin_permille: margin.map_or(default.margin_permille, |margin| {
            margin.value.min(MARGIN_MAX_PERMILLE) as u32
        }),
        analyser: analyser.map_or(default.analyser, |found| found.value),
        contracts_from_cadence: cadence.map_or(default.contracts_from_cadence, |f| f.value),
        contracts_from_header: header.map_or(default.contracts_from_header, |f| f.value),
        // `read_write` sets it.
        write_age: default.write_age,
        coalesce: coalesce.map_or(default.coalesce, |found| found.value),
        rehearsal: rehearsal.map_or(default.rehearsal, |found| found.value),
    }
}

/// "2" → 20, "2.5" → 25.
fn amount_permille(percent: &str) -> Option<u64> {
    let number: f64 = percent.parse().ok()?;
    (number.is_finite() && (0.0..=100.0).contains(&number)).then(|| (number * 10.0).round() as u64)
}

/// A folder by its full path.
fn absolute(
    reader: &mut Reader<'_>,
    section: &mut Section<'_, '_>,
    key: &'static str,
    default: &str,
) -> PathBuf {
    let expected = "the full path of a folder, beginning with / and without ..";
    let found = section.value(reader, key, expected, |value| {
        plain_absolute(value.as_str()?)
    });
    found.map_or_else(|| PathBuf::from(default), |found| found.value)
}

/// The path without doubled or trailing slashes; None when it is not absolute or climbs.
fn plain_absolute(text: &str) -> Option<PathBuf> {
    let path = Path::new(text);
    let climbs = path
        .components()
        .any(|part| matches!(part, Component::ParentDir));
    (path.is_absolute() && !climbs && !text.contains('\0')).then(|| path.components().collect())
}

fn read_shares(reader: &mut Reader<'_>, sections: Vec<Section<'_, '_>>) -> Vec<Found<ShareConfig>> {
    let mut shares: Vec<Found<ShareConfig>> = Vec::new();
    // Also of shares with other mistakes.
    let mut names: Vec<Found<String>> = Vec::new();
    if sections.len() > SHARE_COUNT_MAX {
        reader.wrong_with_remedy(
            &sections[SHARE_COUNT_MAX].place(),
            format!("expected at most {SHARE_COUNT_MAX} shares"),
            "take shares out; one [[share]] serves all folders below its own",
        );
    }
    for mut section in sections.into_iter().take(SHARE_COUNT_MAX) {
        let place = section.place();
        let name = section.string(reader, "name", "the share's name, as the door calls it");
        let path = section.value(
            reader,
            "path",
            "the full path of the share's folder, beginning with / and without ..",
            |value| plain_absolute(value.as_str()?),
        );
        let exclusive = section.boolean(reader, "exclusive");
        for key in ["name", "path"] {
            if !section.has(key) {
                reader.wrong_with_remedy(
                    &place,
                    format!("has no {key}; a share needs name and path"),
                    format!("add {key} = \"…\" below that [[share]]"),
                );
            }
        }
        section.finish(reader);
        if let Some(name) = &name {
            check_name(reader, &names, name);
            names.push(Found {
                value: name.value.clone(),
                place: place.clone(),
            });
        }
        let (Some(name), Some(path)) = (name, path) else {
            continue;
        };
        check_folder(reader, &shares, &path);
        shares.push(Found {
            value: ShareConfig {
                name: name.value,
                path: path.value,
                exclusive: exclusive.is_some_and(|found| found.value),
            },
            place,
        });
    }
    shares
}

fn check_name(reader: &mut Reader<'_>, earlier: &[Found<String>], name: &Found<String>) {
    if name.value.is_empty() || name.value.len() >= format::NAME_BYTES_MAX {
        reader.wrong(
            &name.place,
            format!("expected 1 to {} bytes", format::NAME_BYTES_MAX - 1),
        );
    }
    if name.value.chars().any(|c| c.is_control() || c == '/') {
        reader.wrong(
            &name.place,
            "expected a name without / and control characters",
        );
    }
    for other in earlier {
        if other.value.eq_ignore_ascii_case(&name.value) {
            let line = reader.line_of(&other.place);
            reader.wrong(
                &name.place,
                format!("the share of line {line} has this name already; expected another"),
            );
        }
    }
}

fn check_folder(reader: &mut Reader<'_>, earlier: &[Found<ShareConfig>], path: &Found<PathBuf>) {
    if path.value == Path::new("/") {
        reader.wrong(
            &path.place,
            "expected the folder of one share, not the root of the machine",
        );
        return;
    }
    for other in earlier {
        let line = reader.line_of(&other.place);
        if other.value.path == path.value {
            reader.wrong(
                &path.place,
                format!(
                    "share {:?} of line {line} has this folder already; expected one share a folder",
                    other.value.name
                ),
            );
        } else if path.value.starts_with(&other.value.path)
            || other.value.path.starts_with(&path.value)
        {
            reader.wrong(
                &path.place,
                format!(
                    "one of this folder and that of share {:?} (line {line}, {}) contains the \
                     other; expected separate folders",
                    other.value.name,
                    other.value.path.display()
                ),
            );
        }
    }
}

fn read_rules(
    reader: &mut Reader<'_>,
    sections: Vec<Section<'_, '_>>,
    shares: &[Found<ShareConfig>],
) -> Vec<RuleConfig> {
    if sections.len() > RULE_COUNT_MAX {
        reader.wrong_with_remedy(
            &sections[RULE_COUNT_MAX].place(),
            format!("expected at most {RULE_COUNT_MAX} rules"),
            "take rules out; one pattern with ** covers all folders below, and files whose header declares a rate need none",
        );
    }
    let mut rules: Vec<Found<RuleConfig>> = Vec::new();
    for section in sections.into_iter().take(RULE_COUNT_MAX) {
        if let Some(rule) = read_rule(reader, section, shares, &rules) {
            rules.push(rule);
        }
    }
    rules.into_iter().map(|found| found.value).collect()
}

fn read_rule(
    reader: &mut Reader<'_>,
    mut section: Section<'_, '_>,
    shares: &[Found<ShareConfig>],
    earlier: &[Found<RuleConfig>],
) -> Option<Found<RuleConfig>> {
    let place = section.place();
    let pattern = section.string(
        reader,
        "match",
        "a pattern of paths below the share's root, such as \"footage/**/*.mov\"",
    );
    let share = section.string(reader, "share", "the name of a share");
    let bitrate = section.bitrate(reader, "bitrate");
    let frames = section.value(
        reader,
        "frames_per_second",
        "frames a second, such as 24 or 23.976",
        thousandths,
    );
    let rate_key_count =
        usize::from(section.has("bitrate")) + usize::from(section.has("frames_per_second"));
    let match_absent = !section.has("match");
    section.finish(reader);

    if match_absent {
        reader.wrong_with_remedy(
            &place,
            "has no match; a rule needs a pattern of paths below the share's root, such as \
             match = \"footage/**/*.mov\"",
            "add match = \"…\" below that [[rule]]; \"**\" matches every file",
        );
    }
    if rate_key_count != 1 {
        let (read, remedy) = if rate_key_count == 0 {
            ("neither", "add one of the two below that [[rule]]")
        } else {
            ("both", "take one of the two out of that [[rule]]")
        };
        reader.wrong_with_remedy(
            &place,
            format!(
                "has {read} of bitrate and frames_per_second; expected one: bitrate = \"100M\" for \
                 files that are played, frames_per_second = 24 for sequences of one file a frame"
            ),
            remedy,
        );
    }
    if let Some(share) = &share {
        check_rule_share(reader, share, shares);
    }
    let hint = rule_hint(reader, bitrate, frames);
    let pattern = pattern?;
    let matcher = compile(reader, &pattern);
    let rule = RuleConfig {
        pattern: pattern.value.clone(),
        share: share.map(|share| share.value),
        hint: hint?,
        matcher: matcher?,
    };
    for other in earlier {
        let covers = other.value.share.is_none() || other.value.share == rule.share;
        if covers && composed(&other.value.pattern) == composed(&rule.pattern) {
            let line = reader.line_of(&other.place);
            reader.wrong_with_remedy(
                &pattern.place,
                format!(
                    "this rule never counts: line {line} has the same pattern and comes first"
                ),
                format!(
                    "take one of the two rules out, or give the one of line {line} a share of its own if it is for that share alone"
                ),
            );
        }
    }
    Some(Found { value: rule, place })
}

fn check_rule_share(reader: &mut Reader<'_>, share: &Found<String>, shares: &[Found<ShareConfig>]) {
    let names: Vec<&str> = shares.iter().map(|s| s.value.name.as_str()).collect();
    if names
        .iter()
        .any(|name| name.eq_ignore_ascii_case(&share.value))
    {
        return;
    }
    let meant = match nearest(&share.value, &names) {
        Some(near) => format!("did you mean {near:?}?"),
        None if names.is_empty() => String::from("no share is configured"),
        None => format!("known: {}", names.join(", ")),
    };
    reader.wrong(&share.place, format!("there is no such share; {meant}"));
}

fn rule_hint(
    reader: &mut Reader<'_>,
    bitrate: Option<Found<u64>>,
    frames: Option<Found<u64>>,
) -> Option<RateHint> {
    if let Some(bitrate) = bitrate {
        if !amount::BITRATES.contains(&bitrate.value) {
            reader.wrong(&bitrate.place, amount::BITRATES_EXPECTED);
            return None;
        }
        let rate = BytesPerSecond::from_bits(bitrate.value);
        return Some(RateHint::Rate(rate, RateSource::Rule));
    }
    let frames = frames?;
    if !(1..=FRAMES_MAX_THOUSANDTHS).contains(&frames.value) {
        reader.wrong(
            &frames.place,
            "expected more than 0 and at most 1000 frames a second",
        );
        return None;
    }
    Some(RateHint::FramesPerKilosecond(
        frames.value as u32,
        RateSource::Rule,
    ))
}

/// `*` stays within a folder, `**` crosses them.
fn compile(reader: &mut Reader<'_>, pattern: &Found<String>) -> Option<GlobMatcher> {
    if pattern.value.starts_with('/') || pattern.value.starts_with("./") {
        reader.wrong(
            &pattern.place,
            "expected a pattern below the share's root, without leading / or ./",
        );
        return None;
    }
    if pattern.value.is_empty() {
        reader.wrong(&pattern.place, "expected a pattern such as \"**/*.mov\"");
        return None;
    }
    // As for a pool's placement rules. The matcher fails on a pattern that is nested too deeply.
    if pattern.value.len() > PATTERN_BYTES_MAX {
        reader.wrong(
            &pattern.place,
            format!(
                "is a pattern of {} bytes; expected at most {PATTERN_BYTES_MAX}",
                pattern.value.len()
            ),
        );
        return None;
    }
    match GlobBuilder::new(&composed(&pattern.value))
        .literal_separator(true)
        .build()
    {
        Ok(glob) => Some(glob.compile_matcher()),
        Err(error) => {
            reader.wrong(
                &pattern.place,
                format!(
                    "is not a pattern ({}); expected one such as \"footage/**/*.mov\"",
                    error.kind()
                ),
            );
            None
        }
    }
}

#[cfg(test)]
mod tests;
