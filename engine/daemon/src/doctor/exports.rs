// SPDX-License-Identifier: Apache-2.0
//! The folders of this machine that NFS servers export: the kernel's server by its tables, Ganesha
//! by the configuration of each running process.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Tables of the kernel's server: a folder at the start of a line.
const TABLES: [&str; 2] = ["/etc/exports", "/var/lib/nfs/etab"];
/// The file that Ganesha reads by default.
const GANESHA_CONF: &str = "/etc/ganesha/ganesha.conf";

/// All of them, as they are written there. Files that this process may not read are left out.
pub(super) fn folders() -> Vec<PathBuf> {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let tables = TABLES
        .iter()
        .flat_map(|table| of_table(&read(Path::new(table))));
    let ganeshas = ganeshas()
        .into_iter()
        .flat_map(|conf| of_ganesha(&read(&conf)));
    let mut all: Vec<PathBuf> = tables.chain(ganeshas).collect();
    all.sort();
    all.dedup();
    all
}

fn of_table(text: &str) -> Vec<PathBuf> {
    text.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|path| path.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

/// Configurations of the Ganeshas that run.
fn ganeshas() -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .filter_map(|line| conf_of(&line))
        .collect()
}

/// The configuration in a command line whose words end with NUL. None: it is not Ganesha's.
fn conf_of(line: &[u8]) -> Option<PathBuf> {
    let mut words = line
        .split(|&byte| byte == 0)
        .map(std::ffi::OsStr::from_bytes);
    let program = Path::new(words.next()?);
    if program.file_name()? != "ganesha.nfsd" {
        return None;
    }
    let told = words.skip_while(|word| *word != "-f").nth(1);
    Some(told.map_or_else(|| PathBuf::from(GANESHA_CONF), PathBuf::from))
}

/// Values of `Path` in a configuration of Ganesha, in quotes or without.
fn of_ganesha(text: &str) -> Vec<PathBuf> {
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or(""));
    lines
        .flat_map(|line| line.split([';', '{', '}']))
        .filter_map(|statement| statement.split_once('='))
        .filter(|(key, _)| key.trim().eq_ignore_ascii_case("path"))
        .map(|(_, value)| PathBuf::from(value.trim().trim_matches('"')))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_read_from_tables_and_from_what_a_ganesha_was_told() {
        let table = "# none\n/srv/media 10.0.0.0/8(rw)\n\n/srv/more *(ro)\n";
        assert_eq!(
            of_table(table),
            [Path::new("/srv/media"), Path::new("/srv/more")]
        );
        let conf = "NFS_CORE_PARAM { mount_path_pseudo = true; }\n# Path = /no;\n\
                    EXPORT {\n    Export_Id = 1; Path = \"/srv/a b\"; Pseudo = \"/media\";\n}\nEXPORT { PATH=/srv/c; }\n";
        assert_eq!(
            of_ganesha(conf),
            [Path::new("/srv/a b"), Path::new("/srv/c")]
        );
    }

    #[test]
    fn a_ganesha_is_known_by_its_command_line() {
        let check = |line: &str, expect: Option<&str>| {
            let line = line.replace(' ', "\0");
            assert_eq!(
                conf_of(line.as_bytes()),
                expect.map(PathBuf::from),
                "{line}"
            );
        };
        check(
            "/usr/bin/ganesha.nfsd -F -f /run/x.conf",
            Some("/run/x.conf"),
        );
        check("ganesha.nfsd -L /var/log/x", Some(GANESHA_CONF));
        check("vi ganesha.nfsd -f /run/x.conf", None);
        check("", None);
    }
}
