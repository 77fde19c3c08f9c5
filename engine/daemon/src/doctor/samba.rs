// SPDX-License-Identifier: Apache-2.0
//! Samba: is it installed, does it have the module, does smb.conf name it where it should.

use super::{Finding, Level};
use crate::config::{Config, ShareConfig};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const AREA: &str = "samba";
/// In the module, before the version of the Samba whose headers it was compiled with.
const BUILT_FOR: &[u8] = b"rushes built for Samba ";

/// A section of smb.conf: parameters in lower case without spaces, as testparm prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Section {
    pub(super) name: String,
    parameters: BTreeMap<String, String>,
}

impl Section {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }

    /// True: testparm printed "yes". `by_itself`: Samba's default for a parameter that is absent.
    pub(super) fn is(&self, name: &str, by_itself: bool) -> bool {
        self.get(name)
            .map_or(by_itself, |value| value.eq_ignore_ascii_case("yes"))
    }

    /// Names of the VFS modules, in order.
    fn modules(&self) -> Vec<&str> {
        self.get("vfsobjects")
            .unwrap_or("")
            .split([' ', ','])
            .filter(|word| !word.is_empty())
            .collect()
    }

    fn has_module(&self) -> bool {
        self.modules().contains(&"rushes")
    }
}

/// The facts that are compared with smb.conf.
pub(super) struct Shown<'a> {
    /// None: it cannot be read; another finding says so.
    pub(super) config: Option<&'a Config>,
    /// Folders at which pools are mounted.
    pub(super) pools: &'a [PathBuf],
    /// Folders of pools' members, as catalogues name them.
    pub(super) members: &'a [PathBuf],
    /// Folders that an NFS server exports.
    pub(super) exported: &'a [PathBuf],
}

pub(super) fn examine(shown: &Shown<'_>, smb_conf: Option<&Path>, findings: &mut Vec<Finding>) {
    let Some(smbd) = find("smbd") else {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            "smbd was not found: no client can connect by SMB",
            "apt-get install samba samba-vfs-modules",
        ));
        return;
    };
    let version = output(Command::new(&smbd).arg("--version"))
        .map(|text| text.trim().trim_start_matches("Version ").to_string())
        .unwrap_or_else(|| String::from("unknown"));
    if shown
        .config
        .is_some_and(|config| needs_module(config, shown.members))
    {
        module(&smbd, &version, findings);
    }
    if find("testparm").is_none() {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            "testparm was not found: smb.conf is not checked",
            "apt-get install samba-common-bin; testparm has to be in PATH",
        ));
        return;
    }
    let Some(text) = testparm(smb_conf) else {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            match smb_conf {
                Some(file) => format!("{} cannot be read by testparm", file.display()),
                None => String::from("smb.conf cannot be read by testparm"),
            },
            match smb_conf {
                Some(file) => format!(
                    "run `testparm -s {}` and correct the lines that it names",
                    file.display()
                ),
                None => String::from("run `testparm -s` and correct the lines that it names"),
            },
        ));
        return;
    };
    let inherited = inherited(&parse(&text));
    if let Some(config) = shown.config {
        sections(config, shown.members, &inherited, &has_daemon, findings);
    }
    for pool in shown.pools {
        super::pools::examine(pool, shown.exported, &inherited, findings);
    }
}

/// Searches PATH and the folders of daemons, which a user's PATH may lack.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([
            PathBuf::from("/usr/sbin"),
            PathBuf::from("/usr/local/samba/sbin"),
        ])
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

fn output(command: &mut Command) -> Option<String> {
    let output = command
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn module(smbd: &Path, version: &str, findings: &mut Vec<Finding>) {
    let build = output(Command::new(smbd).arg("-b")).unwrap_or_default();
    let Some(folder) = build
        .lines()
        .find_map(|line| line.trim().strip_prefix("MODULESDIR:"))
    else {
        return;
    };
    let module = Path::new(folder.trim()).join("vfs/rushes.so");
    let install = "make server && sudo make install, or reinstall the package";
    let Ok(bytes) = std::fs::read(&module) else {
        findings.push(Finding::of(
            Level::Error,
            AREA,
            format!(
                "Samba {version} is installed, but the module {} is not",
                module.display()
            ),
            install,
        ));
        return;
    };
    match built_for(&bytes) {
        Some(built) if built != version => findings.push(Finding::of(
            Level::Error,
            AREA,
            format!(
                "the module was built for Samba {built}, but {version} is installed: it may not \
                 load"
            ),
            install,
        )),
        Some(_) => findings.push(Finding::ok(
            AREA,
            format!("Samba {version} and the module that was built for it"),
        )),
        None if is_newer(smbd, &module) => findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!("Samba {version} was updated after the module was built: it may not load"),
            install,
        )),
        None => findings.push(Finding::ok(
            AREA,
            format!("Samba {version} and a module not older than it"),
        )),
    }
}

fn built_for(module: &[u8]) -> Option<String> {
    let start = module
        .windows(BUILT_FOR.len())
        .position(|window| window == BUILT_FOR)?
        + BUILT_FOR.len();
    let rest = &module[start..];
    let end = rest.iter().position(|byte| *byte == 0 || *byte == b'\n')?;
    String::from_utf8(rest[..end].to_vec()).ok()
}

fn is_newer(one: &Path, other: &Path) -> bool {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|found| found.modified());
    match (changed(one), changed(other)) {
        (Ok(one), Ok(other)) => one > other,
        _ => false,
    }
}

/// smb.conf as Samba itself reads it, with includes, copies and synonyms resolved.
fn testparm(smb_conf: Option<&Path>) -> Option<String> {
    let mut command = Command::new("testparm");
    command.args(["-s", "--suppress-prompt"]);
    command.args(smb_conf);
    output(&mut command)
}

pub(super) fn parse(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            sections.push(Section {
                name: name.to_string(),
                ..Section::default()
            });
        } else if let Some((key, value)) = line.split_once('=')
            && !line.starts_with(['#', ';'])
            && let Some(section) = sections.last_mut()
        {
            let key = key.to_lowercase().replace(' ', "");
            section.parameters.insert(key, value.trim().to_string());
        }
    }
    sections
}

/// Shares, each with the parameters of [global] that it does not set itself.
pub(super) fn inherited(sections: &[Section]) -> Vec<Section> {
    let global = sections
        .iter()
        .find(|s| s.name.eq_ignore_ascii_case("global"));
    sections
        .iter()
        .filter(|section| !section.name.eq_ignore_ascii_case("global"))
        .map(|section| inherit(section, global))
        .collect()
}

/// True: some share is one of Samba's, and does not only serve a pool's mount.
fn needs_module(config: &Config, known: &[PathBuf]) -> bool {
    let mut shares = config.shares.iter();
    config.shares.is_empty()
        || shares.any(|share| super::pools::members_of(&share.path, known).is_empty())
}

fn named<'a>(share: &'a ShareConfig, sections: &'a [Section]) -> impl Iterator<Item = &'a Section> {
    sections.iter().filter(|section| {
        let name = section.get("rushes:share").unwrap_or(&section.name);
        name.eq_ignore_ascii_case(&share.name)
    })
}

/// `known`: members of pools, as catalogues name them. `has_daemon`: whether a daemon answers in
/// this folder.
fn sections(
    config: &Config,
    known: &[PathBuf],
    inherited: &[Section],
    has_daemon: &dyn Fn(&Path) -> bool,
    findings: &mut Vec<Finding>,
) {
    for share in &config.shares {
        let members = super::pools::members_of(&share.path, known);
        if !members.is_empty() {
            super::pools::member(share, &members, inherited, findings);
        }
        // A disk's root may be shared for other folders beside a member.
        let share_path = real(&share.path);
        let is_inside = members.iter().any(|member| share_path.starts_with(member));
        let is_root = || !is_inside && named(share, inherited).next().is_some();
        if !members.is_empty() && !is_root() {
            continue;
        }
        share_section(config, share, inherited, findings);
        others_on_it(share, inherited, findings);
    }
    for section in inherited.iter().filter(|section| section.has_module()) {
        let name = section.get("rushes:share").unwrap_or(&section.name);
        let socket = socket_of(section);
        if socket != config.runtime_dir.join("session.sock") {
            socket_elsewhere(config, section, &socket, has_daemon, findings);
        } else if config.share(name).is_none() {
            findings.push(Finding::of(
                Level::Warning,
                AREA,
                format!("[{}] names the module, but rushes.toml has no share {name:?}: it does plain I/O", section.name),
                format!("add [[share]] with name = {name:?} to rushes.toml, or set rushes:share in smb.conf"),
            ));
        }
    }
}

/// testparm prints a parameter in [global] alone if a share does not set it.
fn inherit(section: &Section, global: Option<&Section>) -> Section {
    let mut whole = section.clone();
    for (key, value) in global.into_iter().flat_map(|global| &global.parameters) {
        whole
            .parameters
            .entry(key.clone())
            .or_insert_with(|| value.clone());
    }
    whole
}

/// Sections that show a served folder, or part of it, without the module.
fn others_on_it(share: &ShareConfig, sections: &[Section], findings: &mut Vec<Finding>) {
    let served = real(&share.path);
    for section in sections {
        let name = section.get("rushes:share").unwrap_or(&section.name);
        let writable = section.get("readonly").is_some_and(|value| value == "No");
        if section.has_module() || !writable || name.eq_ignore_ascii_case(&share.name) {
            continue;
        }
        let Some(path) = section.get("path").filter(|path| !path.contains('%')) else {
            continue;
        };
        let shown = real(Path::new(path));
        if !shown.starts_with(&served) && !served.starts_with(&shown) {
            continue;
        }
        findings.push(Finding::of(
            Level::Warning,
            &format!("share {}", share.name),
            format!(
                "[{}] in smb.conf shares {path} without the module: writes through it are noticed \
                 late",
                section.name
            ),
            if shown == served {
                format!(
                    "in [{}]: vfs objects = rushes, rushes:share = {}",
                    section.name, share.name
                )
            } else {
                String::from("give it another path, or let its clients only read: read only = yes")
            },
        ));
    }
}

pub(super) fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf())
}

fn share_section(
    config: &Config,
    share: &ShareConfig,
    sections: &[Section],
    findings: &mut Vec<Finding>,
) {
    let area = format!("share {}", share.name);
    let mut all = named(share, sections).peekable();
    if all.peek().is_none() {
        let is_called_so = |section: &&Section| section.name.eq_ignore_ascii_case(&share.name);
        let other = sections.iter().find(is_called_so);
        let (finding, remedy) = match other.and_then(|section| section.get("rushes:share")) {
            Some(other) => (
                format!(
                    "[{}] in smb.conf has rushes:share = {other}: it is not a door of this share, \
                     and no client can connect by SMB",
                    share.name
                ),
                format!(
                    "in that section: rushes:share = {}, or take that line out",
                    share.name
                ),
            ),
            None => (
                String::from("smb.conf has no such share: no client can connect by SMB"),
                format!(
                    "if clients use SMB, add to smb.conf: [{0}] path = {1}, vfs objects = rushes; \
                     if not, take [[share]] {0} out of rushes.toml. Do not share the folder of a \
                     pool's member in smb.conf, nor that of a former member",
                    share.name,
                    share.path.display()
                ),
            ),
        };
        findings.push(Finding::of(Level::Warning, &area, finding, remedy));
    }
    for section in all {
        section_of(config, share, section, &area, findings);
    }
}

/// One section of the share's.
fn section_of(
    config: &Config,
    share: &ShareConfig,
    section: &Section,
    area: &str,
    findings: &mut Vec<Finding>,
) {
    let before = findings.len();
    let modules = section.modules();
    if !section.has_module() {
        let mut list: Vec<&str> = modules.clone();
        list.push("rushes");
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!(
                "[{}] in smb.conf does not name the module: clients do plain I/O",
                section.name
            ),
            format!(
                "in that section: vfs objects = {}; then smbcontrol all reload-config",
                list.join(" ")
            ),
        ));
    } else if modules.last() != Some(&"rushes") {
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!(
                "rushes is not the last of vfs objects = {}",
                modules.join(" ")
            ),
            match modules.iter().any(|word| word.starts_with(['#', ';'])) {
                true => {
                    "smb.conf has no comments behind a value: put that one in a line of its own"
                }
                false => "put it last: it stands right before the disk",
            },
        ));
    }
    if let Some(path) = section.get("path")
        && !path.contains('%')
        && real(Path::new(path)) != real(&share.path)
    {
        findings.push(Finding::of(
            Level::Error,
            area,
            format!(
                "[{}] in smb.conf has path = {path}, rushes.toml has {}",
                section.name,
                share.path.display()
            ),
            "name the same folder in both: paths of rules and frame sequences are below it",
        ));
    }
    what_closes(config, section, area, findings);
    let is_ours = socket_of(section) == config.runtime_dir.join("session.sock");
    if section.has_module() && section.is("kerneloplocks", false) && config.warm_metadata {
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!(
                "[{}] has kernel oplocks = yes: an oplock is then a lease that every other open of the file takes away, and the daemon opens files, too",
                section.name
            ),
            "kernel oplocks = no (Samba's default), or warm_metadata = false in rushes.toml",
        ));
    }
    if section.has_module() && !is_ours {
        // `socket_elsewhere` reports it, with all others.
        return;
    }
    if findings.len() == before {
        findings.push(Finding::ok(
            area,
            format!("[{}] in smb.conf goes through the module", section.name),
        ));
    }
}

/// Where the module of a section looks for the daemon.
fn socket_of(section: &Section) -> PathBuf {
    section.get("rushes:socket").map_or_else(
        || Path::new(crate::config::DEFAULT_RUNTIME_DIR).join("session.sock"),
        PathBuf::from,
    )
}

/// A daemon that has its sockets in this folder answers.
fn has_daemon(folder: &Path) -> bool {
    let socket = folder.join("control.sock");
    rushes_control::Client::connect(&socket, std::time::Duration::from_secs(2)).is_ok()
}

/// A section with the module that looks for another daemon than the one of this configuration.
fn socket_elsewhere(
    config: &Config,
    section: &Section,
    socket: &Path,
    has_daemon: &dyn Fn(&Path) -> bool,
    findings: &mut Vec<Finding>,
) {
    let name = section.get("rushes:share").unwrap_or(&section.name);
    let ours = config.runtime_dir.join("session.sock");
    let is_there = has_daemon(socket.parent().unwrap_or(Path::new("/")));
    let what = if is_there {
        ""
    } else {
        ", where no daemon runs: its clients do plain I/O"
    };
    if let Some(share) = config.share(name) {
        findings.push(Finding::of(
            Level::Error,
            &format!("share {}", share.name),
            format!(
                "the module looks for the daemon at {}{what}; the daemon of this configuration is \
                 at {}",
                socket.display(),
                ours.display()
            ),
            format!("in [{}]: rushes:socket = {}", section.name, ours.display()),
        ));
    } else if !is_there {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!(
                "[{}] names the module, which looks for the daemon at {}{what}",
                section.name,
                socket.display()
            ),
            format!(
                "start that daemon, or in [{}]: rushes:socket = {}, and a [[share]] with name = \
                 {name:?} in rushes.toml",
                section.name,
                ours.display()
            ),
        ));
    }
}

/// Modules of Samba that read a file, or sync it, when its client closes it: at that moment bytes
/// in the write buffer are not in the file yet.
fn what_closes(config: &Config, section: &Section, area: &str, findings: &mut Vec<Finding>) {
    if config.write_buffer_bytes == 0 || !section.has_module() {
        return;
    }
    let modules = section.modules();
    let has = |name| modules.contains(&name);
    let found = [
        (
            "syncops",
            has("syncops") && section.is("syncops:onclose", true),
        ),
        ("commit", has("commit")),
        (
            "virusfilter",
            has("virusfilter") && section.is("virusfilter:scanonclose", false),
        ),
    ];
    for (name, _) in found.into_iter().filter(|(_, is_there)| *is_there) {
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!(
                "{name} is in vfs objects of [{}]: at a client's close this module finds only the \
                 bytes that are on the disk by then, perhaps none, since the daemon writes them up \
                 to write.age later",
                section.name
            ),
            "take it out, or set write.buffer_bytes = 0. A client's flush, and each write with \
             sync always = yes, is answered only when its bytes are on the disk",
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(smb_conf: &str, expect: &[(Level, &str)]) {
        let text = "[write]\nbuffer_bytes = \"64MiB\"\n[[share]]\nname = \"media\"\npath = \"/srv/media\"\n";
        let config = Config::parse(Path::new("x"), text, |_| true).unwrap();
        let mut findings = Vec::new();
        let has_daemon = |folder: &Path| folder == Path::new("/run/there");
        let inherited = inherited(&parse(smb_conf));
        sections(&config, &[], &inherited, &has_daemon, &mut findings);
        assert_eq!(findings.len(), expect.len(), "{smb_conf}: {findings:#?}");
        for (finding, (level, word)) in findings.iter().zip(expect) {
            assert!(
                finding.level == *level && finding.finding.contains(word),
                "{smb_conf}: {finding:?}, expected {word:?}"
            );
        }
    }

    #[test]
    fn smb_conf_is_compared_with_ours() {
        let good = "[global]\n\tworkgroup = X\n[Media]\n\tpath = /srv/media\n\tvfs objects = fruit streams_xattr rushes\n";
        check(good, &[(Level::Ok, "goes through")]);
        check("[global]\n", &[(Level::Warning, "no such share")]);
        check(
            "[media]\npath = /srv/media\n",
            &[(Level::Warning, "does not name the module")],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes fruit\n",
            &[(Level::Warning, "not the last")],
        );
        check(
            "[media]\npath = /srv/other\nvfs objects = rushes\n",
            &[(Level::Error, "path = /srv/other")],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\nrushes:share = mdia\n",
            &[
                (
                    Level::Warning,
                    "[media] in smb.conf has rushes:share = mdia",
                ),
                (Level::Warning, "mdia"),
            ],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\nrushes:socket = /run/x/session.sock\n",
            &[(Level::Error, "/run/x/session.sock, where no daemon runs")],
        );
        // Each section of a share, not the first alone.
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\n\
             [second]\npath = /srv/media\nvfs objects = rushes catia\nrushes:share = media\n\
             [third]\npath = /srv/other\nvfs objects = rushes\nrushes:share = media\n",
            &[
                (Level::Ok, "[media] in smb.conf goes through"),
                (Level::Warning, "not the last of vfs objects = rushes catia"),
                (Level::Error, "[third] in smb.conf has path = /srv/other"),
            ],
        );
        // Any section with the module, also the second one of a share, and one of another daemon.
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\n\
             [again]\npath = /srv/media\nvfs objects = rushes\nrushes:share = media\nrushes:socket = /run/there/session.sock\n\
             [b]\npath = /b\nvfs objects = rushes\nrushes:socket = /run/there/session.sock\n\
             [c]\npath = /c\nvfs objects = rushes\nrushes:socket = /run/gone/session.sock\n",
            &[
                (Level::Ok, "goes through"),
                (Level::Error, "this configuration is at"),
                (Level::Warning, "[c] names the module"),
            ],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\nkernel oplocks = Yes\n",
            &[(Level::Warning, "kernel oplocks = yes")],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = virusfilter commit syncops rushes\nvirusfilter:scan on close = yes\n",
            &[
                (Level::Warning, "syncops"),
                (Level::Warning, "commit"),
                (Level::Warning, "virusfilter"),
            ],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = virusfilter syncops rushes\nsyncops:onclose = no\n",
            &[(Level::Ok, "goes through")],
        );
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\n[all]\npath = /srv\nread only = No\n",
            &[
                (Level::Ok, "goes through"),
                (
                    Level::Warning,
                    "[all] in smb.conf shares /srv without the module",
                ),
            ],
        );
        // Reading beside the module does no harm.
        check(
            "[media]\npath = /srv/media\nvfs objects = rushes\n[look]\npath = /srv/media\n",
            &[(Level::Ok, "goes through")],
        );
        // Modules may be named for all shares at once; a share may have another name in smb.conf.
        check(
            "[global]\nvfs objects = rushes\n[m]\npath = /srv/media\nrushes:share = media\n[b]\npath = /b\n",
            &[(Level::Ok, "[m]"), (Level::Warning, "[b] names the module")],
        );
    }

    #[test]
    fn a_member_of_a_pool_needs_no_share_and_no_module() {
        let disk = std::env::temp_dir().join(format!("rushes-samba-{}", std::process::id()));
        std::fs::create_dir_all(disk.join("pool/objects")).unwrap();
        std::fs::write(disk.join("pool/rushes-pool"), "{}").unwrap();
        for share in [disk.clone(), disk.join("pool")] {
            let text = format!("[[share]]\nname = \"a\"\npath = {share:?}\n");
            let config = Config::parse(Path::new("x"), &text, |_| true).unwrap();
            assert!(!needs_module(&config, &[]));
            let said = |smb_conf: &str| {
                let mut findings = Vec::new();
                let inherited = inherited(&parse(smb_conf));
                sections(&config, &[], &inherited, &|_| true, &mut findings);
                findings.iter().map(|one| one.level).collect::<Vec<_>>()
            };
            assert_eq!(said("[global]\n"), [Level::Ok], "{share:?}");
        }
        std::fs::remove_dir_all(&disk).unwrap();
    }

    /// The finding about a share of this folder that smb.conf lacks.
    fn said_of(folder: &Path, known: &[PathBuf]) -> Finding {
        let text = format!("[[share]]\nname = \"disk\"\npath = {folder:?}\n");
        let config = Config::parse(Path::new("x"), &text, |_| true).unwrap();
        let mut findings = Vec::new();
        sections(&config, known, &[], &|_| true, &mut findings);
        let [found] = <[Finding; 1]>::try_from(findings).unwrap();
        found
    }

    #[test]
    fn the_folder_of_a_member_is_never_to_be_added_to_smb_conf() {
        let disk = std::env::temp_dir().join(format!("rushes-member-{}", std::process::id()));
        let inside = disk.join("pool/objects");
        std::fs::create_dir_all(&inside).unwrap();
        // Neither the member nor its disk is there: only its catalogue names it.
        let away = [disk.join("pool")];
        for share in [disk.clone(), disk.join("pool"), inside.clone()] {
            let found = said_of(&share, &away);
            assert_eq!(found.level, Level::Warning, "{found:?}");
            assert!(found.finding.contains("is missing"), "{found:?}");
            let remedy = found.remedy.unwrap();
            assert!(remedy.contains("Do not share a member"), "{remedy}");
            assert!(!remedy.contains("path ="), "{remedy}");
        }
        std::fs::write(disk.join("pool/rushes-pool"), "{}").unwrap();
        for share in [disk.clone(), disk.join("pool"), inside.clone()] {
            assert_eq!(said_of(&share, &[]).level, Level::Ok, "{share:?}");
        }
        // A member that was removed from its pool has no mark any more and looks like a folder of
        // media.
        std::fs::remove_file(disk.join("pool/rushes-pool")).unwrap();
        let found = said_of(&disk, &[]);
        let remedy = found.remedy.unwrap();
        assert_eq!(found.level, Level::Warning);
        assert!(
            remedy.contains("take [[share]] disk out of rushes.toml"),
            "{remedy}"
        );
        std::fs::remove_dir_all(&disk).unwrap();
    }

    #[test]
    fn a_module_tells_for_which_samba_it_was_built() {
        assert_eq!(
            built_for(b"\x7fELF..rushes built for Samba 4.17.12-Debian\0.."),
            Some(String::from("4.17.12-Debian"))
        );
        assert_eq!(built_for(b"\x7fELF"), None);
    }
}
