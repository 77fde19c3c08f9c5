// SPDX-License-Identifier: Apache-2.0
//! Shares of Samba that show a pool's mount. There smbd is one door of several, and the oplocks,
//! leases, locks and share modes of its clients have to count at other doors as well.

use super::samba::{Section, real};
use super::{Finding, Level};
use crate::config::ShareConfig;
use std::path::{Path, PathBuf};

/// The file that marks a pool's catalogue or member (engine/pool).
const FORMAT_FILE: &str = "rushes-pool";
/// The folder that a member has beside it.
const OBJECTS: &str = "objects";

/// Samba's parameters as testparm prints them, with their defaults.
const OPLOCKS: (&str, bool) = ("oplocks", true);
const FAKE_OPLOCKS: (&str, bool) = ("fakeoplocks", false);
const KERNEL_OPLOCKS: (&str, bool) = ("kerneloplocks", false);
const LOCKING: (&str, bool) = ("locking", true);
const POSIX_LOCKING: (&str, bool) = ("posixlocking", true);
const KERNEL_SHARE_MODES: (&str, bool) = ("kernelsharemodes", false);

pub(super) fn examine(
    pool: &Path,
    exported: &[PathBuf],
    sections: &[Section],
    findings: &mut Vec<Finding>,
) {
    let area = format!("pool {}", pool.display());
    let overlaps = |folder: &Path| folder.starts_with(pool) || pool.starts_with(folder);
    let by_nfs = exported.iter().any(|folder| overlaps(&real(folder)));
    let shows = |section: &&Section| {
        let path = section.get("path").filter(|path| !path.contains('%'));
        path.is_some_and(|path| overlaps(&real(Path::new(path))))
    };
    for section in sections.iter().filter(shows) {
        let before = findings.len();
        what_clients_keep(&area, section, by_nfs, findings);
        locks(&area, section, findings);
        share_modes(&area, section, findings);
        if findings.len() == before {
            findings.push(Finding::ok(
                &area,
                format!(
                    "clients of [{}] in smb.conf cache nothing that another door may change, and \
                     locks count at every door",
                    section.name
                ),
            ));
        }
    }
}

/// The folder is a pool's member: the daemon serves it to the mount, never by SMB.
fn is_member(folder: &Path) -> bool {
    folder.join(FORMAT_FILE).is_file() && folder.join(OBJECTS).is_dir()
}

/// Folders searched for members in a served one; a disk's root with a member in it has fewer.
const FOLDERS_LOOKED_AT: usize = 256;

/// The members of pools that a served folder is, holds or lies in: members found there, and those
/// that catalogues name there.
pub(super) fn members_of(folder: &Path, known: &[PathBuf]) -> Vec<PathBuf> {
    let folder = real(folder);
    let mut all = members_in(&folder);
    all.extend(
        folder
            .ancestors()
            .skip(1)
            .filter(|outer| is_member(outer))
            .map(Path::to_path_buf),
    );
    let known = known.iter().map(|member| real(member));
    all.extend(known.filter(|member| member.starts_with(&folder) || folder.starts_with(member)));
    all.sort();
    all.dedup();
    all
}

/// The folder itself if it is a member, else the members right below it.
pub(super) fn members_in(folder: &Path) -> Vec<PathBuf> {
    if is_member(folder) {
        return vec![real(folder)];
    }
    let below = std::fs::read_dir(folder).into_iter().flatten().flatten();
    below
        .take(FOLDERS_LOOKED_AT)
        .map(|entry| entry.path())
        .filter(|path| is_member(path))
        .map(|path| real(&path))
        .collect()
}

/// A share that has members.
pub(super) fn member(
    share: &ShareConfig,
    members: &[PathBuf],
    sections: &[Section],
    findings: &mut Vec<Finding>,
) {
    let area = format!("share {}", share.name);
    let shows = |section: &&Section| {
        let path = section.get("path").filter(|path| !path.contains('%'));
        path.is_some_and(|path| {
            let shown = real(Path::new(path));
            members.iter().any(|member| shown.starts_with(member))
        })
    };
    let before = findings.len();
    for section in sections.iter().filter(shows) {
        findings.push(Finding::of(
            Level::Error,
            &area,
            format!(
                "[{}] in smb.conf shares a member of a pool; its files are parts of the pool's \
                 files, and no client may change them",
                section.name
            ),
            format!(
                "in [{}]: set path to the folder where the pool is mounted, or take that share out",
                section.name
            ),
        ));
    }
    let is_away = |member: &&PathBuf| {
        let found = member.join(FORMAT_FILE).metadata();
        found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    };
    let away: Vec<String> = members
        .iter()
        .filter(is_away)
        .map(|member| member.display().to_string())
        .collect();
    if !away.is_empty() {
        findings.push(Finding::of(
            Level::Warning,
            &area,
            format!(
                "{} is the folder of a pool's member, which is missing: files with bytes on it \
                 cannot be read",
                away.join(", ")
            ),
            "mount its disk there. Do not share a member in smb.conf: clients use the pool's mount",
        ));
    } else if findings.len() == before {
        findings.push(Finding::ok(
            &area,
            "it is, contains or lies in a member of a pool: clients use the pool's mount, and no \
             share in smb.conf needs the member",
        ));
    }
}

fn is(section: &Section, (name, by_itself): (&str, bool)) -> bool {
    section.is(name, by_itself)
}

fn what_clients_keep(area: &str, section: &Section, by_nfs: bool, findings: &mut Vec<Finding>) {
    let broken_by_others = !is(section, OPLOCKS) || is(section, KERNEL_OPLOCKS);
    if broken_by_others && !is(section, FAKE_OPLOCKS) {
        return;
    }
    let others = if by_nfs {
        "NFS clients and programs on this machine"
    } else {
        "programs on this machine"
    };
    let name = &section.name;
    findings.push(Finding::of(
        Level::Warning,
        area,
        format!(
            "[{name}] in smb.conf lets clients cache reads and writes (oplocks and leases), and \
             {others} do not break these: both may see old bytes"
        ),
        format!(
            "in [{name}]: oplocks = no, and no fake oplocks; then smbcontrol all reload-config"
        ),
    ));
}

fn locks(area: &str, section: &Section, findings: &mut Vec<Finding>) {
    if is(section, LOCKING) && is(section, POSIX_LOCKING) {
        return;
    }
    findings.push(Finding::of(
        Level::Warning,
        area,
        format!(
            "[{}] in smb.conf has locking or posix locking off: locks of its clients do not count \
             at any other door",
            section.name
        ),
        "take these lines out: both are on by default",
    ));
}

fn share_modes(area: &str, section: &Section, findings: &mut Vec<Finding>) {
    if !is(section, KERNEL_SHARE_MODES) {
        return;
    }
    findings.push(Finding::of(
        Level::Error,
        area,
        format!(
            "[{}] in smb.conf has kernel share modes = yes, which a pool's mount does not support: \
             no file can be opened",
            section.name
        ),
        "take that line out: it is off by default",
    ));
}

#[cfg(test)]
mod tests {
    use super::super::samba::{inherited, parse};
    use super::*;

    fn check(smb_conf: &str, exported: &[&str], expect: &[(Level, &str)]) {
        let exported: Vec<PathBuf> = exported.iter().map(PathBuf::from).collect();
        let mut findings = Vec::new();
        let sections = inherited(&parse(smb_conf));
        examine(Path::new("/srv/pool"), &exported, &sections, &mut findings);
        assert_eq!(findings.len(), expect.len(), "{smb_conf}: {findings:#?}");
        for (finding, (level, words)) in findings.iter().zip(expect) {
            let is_it = finding.level == *level && finding.finding.contains(words);
            assert!(is_it, "{smb_conf}: {finding:?}, expected {words:?}");
            assert_eq!(finding.remedy.is_some(), *level != Level::Ok);
            assert_eq!(finding.area, "pool /srv/pool");
        }
    }

    #[test]
    fn a_member_is_no_share_of_samba() {
        let folder =
            std::env::temp_dir().join(format!("rushes-doctor-member-{}", std::process::id()));
        std::fs::create_dir_all(folder.join(OBJECTS)).unwrap();
        assert!(!is_member(&folder));
        std::fs::write(folder.join(FORMAT_FILE), "{}").unwrap();
        assert!(is_member(&folder));
        let text = format!("[[share]]\nname = \"a\"\npath = {folder:?}\n");
        let config = crate::config::Config::parse(Path::new("x"), &text, |_| true).unwrap();
        let said = |smb_conf: &str| {
            let mut findings = Vec::new();
            member(
                &config.shares[0],
                &members_in(&folder),
                &inherited(&parse(smb_conf)),
                &mut findings,
            );
            assert_eq!(findings.len(), 1, "{findings:#?}");
            findings.remove(0)
        };
        assert_eq!(said("[media]\npath = /srv/pool\n").level, Level::Ok);
        let shown = said(&format!("[a]\npath = {}/objects\n", folder.display()));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(shown.level, Level::Error);
        assert!(shown.remedy.is_some() && shown.finding.contains("[a]"));
    }

    #[test]
    fn a_disk_with_a_member_right_below_its_root_has_it() {
        let root = std::env::temp_dir().join(format!("rushes-doctor-root-{}", std::process::id()));
        std::fs::create_dir_all(root.join("pool").join(OBJECTS)).unwrap();
        std::fs::create_dir_all(root.join("else")).unwrap();
        assert_eq!(members_in(&root), Vec::<PathBuf>::new());
        std::fs::write(root.join("pool").join(FORMAT_FILE), "{}").unwrap();
        assert_eq!(members_in(&root), [real(&root.join("pool"))]);
        assert_eq!(members_in(&root.join("pool")), [real(&root.join("pool"))]);
        assert_eq!(members_in(&root.join("else")), Vec::<PathBuf>::new());
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn leases_of_a_pools_share_are_said() {
        let on = [(Level::Warning, "and programs on this machine do not break")];
        check("[media]\npath = /srv/pool\n", &[], &on);
        check("[media]\npath = /srv/pool/reel\n", &["/srv/other"], &on);
        check("[all]\npath = /srv\noplocks = Yes\n", &[], &on);
        let by_nfs = [(Level::Warning, "NFS clients and programs")];
        check("[media]\npath = /srv/pool\n", &["/srv/pool"], &by_nfs);
        check("[media]\npath = /srv/pool\n", &["/srv/pool/reel"], &by_nfs);
        check("[media]\npath = /srv/pool\n", &["/srv"], &by_nfs);
        check(
            "[media]\npath = /srv/pool\nkernel oplocks = Yes\nfake oplocks = Yes\n",
            &[],
            &on,
        );
    }

    #[test]
    fn leases_that_are_off_or_the_kernels_are_as_they_should_be() {
        let good = [(Level::Ok, "[media] in smb.conf cache nothing")];
        for line in ["oplocks = No", "kernel oplocks = Yes"] {
            let share = format!("[media]\npath = /srv/pool\n{line}\n");
            check(&share, &["/srv/pool"], &good);
            let global = format!("[global]\n{line}\n[media]\npath = /srv/pool\n");
            check(&global, &["/srv/pool"], &good);
        }
        check("[elsewhere]\npath = /srv/media\n", &["/srv/pool"], &[]);
        check("[homes]\npath = /srv/pool/%U\n", &[], &[]);
    }

    #[test]
    fn locks_and_share_modes_that_do_not_hold_are_said() {
        check(
            "[media]\npath = /srv/pool\noplocks = No\nposix locking = No\n",
            &[],
            &[(Level::Warning, "do not count at any other door")],
        );
        check(
            "[media]\npath = /srv/pool\noplocks = No\nkernel share modes = Yes\n",
            &[],
            &[(Level::Error, "no file can be opened")],
        );
    }
}
