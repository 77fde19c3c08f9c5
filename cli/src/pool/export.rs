// SPDX-License-Identifier: Apache-2.0
//! `rushes pool export`: NFS and iSCSI from the mount of a pool, by the distribution's servers.
//! Does not ask the daemon.

use super::error::CommandError;
use crate::ask::say;
use crate::export_args::{ExportCommand, ExportIscsiArgs, ExportNfsArgs, SquashArg};
use rushes_export::{
    DiskExport, ExportError, Initiator, Mount, NfsExport, NfsServer, Server, Squash, Told, keep,
};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The state of an export, for `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct ExportReport {
    pub(crate) protocol: &'static str,
    pub(crate) state: &'static str,
    pub(crate) path: String,
    pub(crate) address: String,
    pub(crate) export: String,
    pub(crate) bytes: Option<u64>,
}

pub(crate) fn run(command: &ExportCommand) -> Result<ExitCode, String> {
    let done = match command {
        ExportCommand::Nfs(args) => nfs(args),
        ExportCommand::Iscsi(args) => iscsi(args),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn told(error: ExportError) -> String {
    error.to_string()
}

fn real(path: &Path) -> Result<PathBuf, CommandError> {
    path.canonicalize()
        .map_err(|error| CommandError::at(path, error))
}

/// The named clients; without names, on a loopback address, this machine.
fn clients(named: &[String], listen: IpAddr) -> Vec<String> {
    if named.is_empty() && listen.is_loopback() {
        return vec![listen.to_string()];
    }
    named.to_vec()
}

/// The last part of a path, as part of other names.
fn plain_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| match c {
        'a'..='z' | '0'..='9' | '.' | '-' => c,
        'A'..='Z' => c.to_ascii_lowercase(),
        _ => '-',
    };
    name.chars().map(plain).collect()
}

fn nfs(args: &ExportNfsArgs) -> Result<(), String> {
    let folder = real(&args.folder)?;
    let mount = Mount::of(&folder).map_err(told)?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => format!(
            "/{}",
            folder.file_name().unwrap_or_default().to_string_lossy()
        ),
    };
    // One server keeps its folders for itself: the exported folder is part of their names.
    let label = format!(
        "nfs-{}-{}",
        plain_name(Path::new(&name)),
        mount.label(&folder)
    );
    let or = |given: &Option<PathBuf>, above: &str| {
        given
            .clone()
            .unwrap_or_else(|| Path::new(above).join(&label))
    };
    let export = NfsExport {
        listen: SocketAddr::new(args.listen, args.port),
        clients: clients(&args.clients, args.listen),
        read_only: args.read_only,
        any_port: args.any_port,
        squash: match args.squash {
            SquashArg::Root => Squash::Root,
            SquashArg::All => Squash::All,
            SquashArg::None => Squash::None,
        },
        anonymous: args.anonymous,
        v3_mount_port: args.v3.then_some(args.mount_port),
        grace_s: args.grace,
        runtime: or(&args.runtime_dir, "/run/rushes"),
        state: or(&args.state_dir, "/var/lib/rushes"),
        folder,
        name,
    };
    if args.print {
        let configuration = export.configuration(&mount).map_err(told)?;
        return say(&format!("# {}\n{configuration}", export.command_line()));
    }
    let report = ExportReport {
        protocol: "nfs",
        state: "",
        path: export.folder.to_string_lossy().into_owned(),
        address: export.listen.to_string(),
        export: export.name.clone(),
        bytes: None,
    };
    let mut server = NfsServer::new(export, &mount).map_err(told)?;
    serve(&mount, &mut server, args.json, report)
}

fn iscsi(args: &ExportIscsiArgs) -> Result<(), String> {
    let folder = match args.file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let file = match real(&args.file) {
        Ok(file) => file,
        Err(error) => real(folder)?.join(args.file.file_name().ok_or(error)?),
    };
    let mount = Mount::of(if file.exists() { &file } else { folder }).map_err(told)?;
    let label = plain_name(&file);
    // No client by default, not even on loopback: a disk knows no users, and a client that has it
    // has all of it.
    let initiators = args
        .clients
        .iter()
        .cloned()
        .map(Initiator::Address)
        .chain(args.initiators.iter().cloned().map(Initiator::Name))
        .collect();
    let export = DiskExport {
        target: args
            .target
            .clone()
            .unwrap_or_else(|| format!("iqn.2026-01.local.rushes:{label}")),
        listen: SocketAddr::new(args.listen, args.port),
        initiators,
        read_only: args.read_only,
        runtime: args.runtime_dir.clone().unwrap_or_else(|| {
            Path::new("/run/rushes").join(format!("iscsi-{label}-{}", mount.label(&file)))
        }),
        file,
    };
    if args.print {
        return say(&export.command_lines(&mount).map_err(told)?);
    }
    let (file, target, listen) = (
        export.file.clone(),
        export.target.clone(),
        export.listen.to_string(),
    );
    // Refuse all that can be refused before making a file.
    let mut server = export.server(&mount).map_err(told)?;
    let bytes = DiskExport::prepare(&file, args.size, args.sparse).map_err(told)?;
    let report = ExportReport {
        protocol: "iscsi",
        state: "",
        path: file.to_string_lossy().into_owned(),
        address: listen,
        export: target,
        bytes: Some(bytes),
    };
    serve(&mount, &mut server, args.json, report)
}

fn serve(
    mount: &Mount,
    server: &mut dyn Server,
    json: bool,
    mut report: ExportReport,
) -> Result<(), String> {
    crate::serve::log_to_stderr("info")?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(CommandError::Signals)?;
    }
    let mut said = Ok(());
    let kept = keep(mount, server, &stop, |now| {
        report.state = match now {
            Told::Serving => "serving",
            Told::Waiting => "waiting",
        };
        said = if json {
            serde_json::to_string(&report)
                .map_err(|error| error.to_string())
                .and_then(|line| say(&format!("{line}\n")))
        } else {
            say(&sentence(&report))
        };
    });
    kept.map_err(told)?;
    said
}

fn sentence(report: &ExportReport) -> String {
    match (report.state, report.protocol) {
        ("serving", "nfs") => format!(
            "{} is served by NFS on {} as {}\n",
            report.path, report.address, report.export
        ),
        ("serving", _) => format!(
            "{} is served by iSCSI on {} as {}\n",
            report.path, report.address, report.export
        ),
        _ => format!(
            "{} is away: its mount does not answer. Clients wait until it is back.\n",
            report.path
        ),
    }
}
