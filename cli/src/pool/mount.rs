// SPDX-License-Identifier: Apache-2.0
//! `rushes pool mount`: serves a pool on a folder until it is unmounted; with a keeper, in a
//! process that the keeper replaces when it dies.

use super::error::CommandError;
use super::opening::serve;
use super::words::{shown, told};
use crate::args::PoolMountArgs;
use crate::ask::{runtime_dir, say};
use rushes_fuse::{DaemonPlace, Ended, HURRIED, Handover, Mounted, Replacing, Stop, keep};
use rushes_pool::Pool;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::fmt::Display;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

/// A mount, for `--json`.
#[derive(Debug, Serialize)]
struct MountReport {
    catalogue: String,
    folder: String,
    is_kept: bool,
}

/// For the serving process, when its keeper has told it to hurry.
const HURRY_PATIENCE: Duration = Duration::from_secs(6);

/// The running program, also if another one was installed in its place.
const RUNNING: &str = "/proc/self/exe";

pub(crate) fn mount(args: &PoolMountArgs) -> Result<ExitCode, String> {
    crate::serve::log_to_stderr("info")?;
    if args.kept {
        serve_kept(args)
    } else if args.keeper {
        serve_by_others(args)
    } else {
        serve_alone(args)
    }
}

/// Before the mount. A folder that cannot be protected is no reason to do without the pool.
fn protect(args: &PoolMountArgs) {
    if args.protect
        && let Err(sentence) = rushes_fuse::protect(&args.folder)
    {
        tracing::warn!("{sentence}");
    }
}

/// Only root may mount, on an existing folder.
fn check_mount(user: u32, args: &PoolMountArgs) -> Result<(), String> {
    let folder = args.folder.display();
    if user != 0 {
        return Err(format!(
            "user {user} asks for a mount of the pool {} on {folder}; expected root, since only \
             root may mount it and reach the files on its members: sudo rushes pool mount {} \
             {folder}",
            args.catalogue.display(),
            args.catalogue.display()
        ));
    }
    match args.folder.metadata() {
        Ok(found) if !found.is_dir() => Err(format!(
            "{folder} is not a folder; expected an empty folder, on which the pool is then mounted"
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(format!(
            "{folder} is not there; expected an empty folder, on which the pool is then mounted: mkdir -p {folder}"
        )),
        // A dead mount cannot be looked at; the next mount removes it.
        _ => Ok(()),
    }
}

/// Opens the pool if no process has it and it may be mounted there. Call it before any change of
/// the folder.
fn pool_for(args: &PoolMountArgs) -> Result<Pool, String> {
    check_mount(rustix::process::geteuid().as_raw(), args)?;
    let pool = serve(&args.catalogue).map_err(told)?;
    rushes_pool::check_mountpoint(&pool, &args.folder).map_err(told)?;
    Ok(pool)
}

fn daemon(args: &PoolMountArgs) -> Result<DaemonPlace, String> {
    Ok(DaemonPlace {
        runtime_dir: runtime_dir(&args.daemon)?,
        recover: args.recover.clone(),
        recover_after: args.recover_after,
    })
}

/// The process that gets the signals, and the object on which it acts.
#[derive(Clone)]
enum Ear {
    /// Serves the mount; its keeper, if it has one, tells it to hurry.
    Server,
    Keeper(Arc<Replacing>),
}

/// Handles signals until the mount ends, in a thread of its own: the first one to end it, the
/// second one, and the one for another process.
fn hear(args: &PoolMountArgs, ear: Ear) -> Result<Arc<Stop>, String> {
    let (more, keeper) = match &ear {
        Ear::Server => (SIGUSR2, None),
        Ear::Keeper(replacing) => (SIGUSR1, Some(Arc::clone(replacing))),
    };
    let stop = Stop::new(&args.catalogue, &args.folder, keeper);
    let stop = stop.map_err(|error| CommandError::at(&args.folder, error))?;
    let signals = Signals::new([SIGINT, SIGTERM, more]);
    let mut signals = signals.map_err(|error| CommandError::at(&args.folder, error))?;
    let heard = Arc::clone(&stop);
    std::thread::spawn(move || {
        for signal in signals.forever() {
            match &ear {
                Ear::Keeper(replacing) if signal == SIGUSR1 => replacing.replace(),
                _ if signal != SIGUSR2 && heard.ask() => {}
                Ear::Server => {
                    heard.hurry();
                    std::process::exit(i32::from(HURRIED));
                }
                Ear::Keeper(replacing) => {
                    replacing.hurry();
                    // Then this process ends as well. A serving process that does not end is left
                    // behind: it dies with this one.
                    std::thread::sleep(HURRY_PATIENCE);
                    std::process::exit(i32::from(HURRIED));
                }
            }
        }
    });
    Ok(stop)
}

fn report(args: &PoolMountArgs, is_kept: bool) -> Result<(), String> {
    let report = MountReport {
        catalogue: shown(&args.catalogue),
        folder: shown(&args.folder),
        is_kept,
    };
    if args.json {
        let line = serde_json::to_string(&report)
            .map_err(|error| CommandError::at(&args.folder, error))?;
        say(&format!("{line}\n"))
    } else {
        say(&format!(
            "pool {} is mounted on {}\n",
            report.catalogue, report.folder
        ))
    }
}

fn until_unmounted(
    args: &PoolMountArgs,
    mounted: Mounted,
    stop: &Stop,
) -> Result<ExitCode, String> {
    let ended = mounted.wait();
    if stop.is_hurried() {
        return Ok(ExitCode::from(HURRIED));
    }
    ended.map_err(|error| CommandError::at(&args.folder, error))?;
    Ok(ExitCode::SUCCESS)
}

fn serve_alone(args: &PoolMountArgs) -> Result<ExitCode, String> {
    let pool = pool_for(args)?;
    protect(args);
    let stop = hear(args, Ear::Server)?;
    let mounted = rushes_fuse::mount(pool, Some(&daemon(args)?), args.tidy_after, &args.folder);
    let mounted = mounted.map_err(|error| CommandError::at(&args.folder, error))?;
    stop.set_mounted(&mounted);
    report(args, false)?;
    until_unmounted(args, mounted, &stop)
}

/// The keeper's part.
fn serve_by_others(args: &PoolMountArgs) -> Result<ExitCode, String> {
    // Report anything wrong with the pool here, once.
    let pool = pool_for(args)?;
    let folder = args.folder.as_path();
    let lock = pool
        .catalogue()
        .lock()
        .map(|lock| lock.try_clone_to_owned());
    let lock = lock.expect("a pool that is served is locked");
    let lock = lock.map_err(|error| CommandError::at(folder, error))?;
    drop(pool);
    protect(args);
    let replacing = Arc::new(Replacing::default());
    hear(args, Ear::Keeper(Arc::clone(&replacing)))?;
    // Each serving process uses the same daemon, even if the configuration changes.
    let runtime_dir = runtime_dir(&args.daemon)?;
    let installed = installed();
    let program = |is_installed: bool| {
        let program = installed.as_deref().filter(|_| is_installed);
        let mut command = Command::new(program.unwrap_or(Path::new(RUNNING)));
        command.args(std::env::args_os().skip(1)).arg("--kept");
        command.env("RUSHES_RUNTIME_DIR", &runtime_dir);
        command
    };
    match keep(lock, program, &replacing).map_err(|error| CommandError::at(folder, error))? {
        Ended::Unmounted => Ok(ExitCode::SUCCESS),
        Ended::Hurried => Ok(ExitCode::from(HURRIED)),
        Ended::NeverMounted(status) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            code.map(ExitCode::from).ok_or_else(|| {
                let fault = format!("the process that was to mount it has ended ({status})");
                CommandError::at(folder, fault).into()
            })
        }
        Ended::NotKept(status) => {
            let fault = format!(
                "the process that served the mount has ended ({status}), and this kernel cannot go \
                 on with another one; expected Linux 6.9 or later for that. Programs on it get \
                 errors now. Mount the pool again"
            );
            Err(CommandError::at(folder, fault).into())
        }
        Ended::GivenUp(status) => {
            let fault = format!(
                "the processes that serve the mount die as soon as they begin (the last: {status}; \
                 the log says more), so it is given up; expected one to live. Programs on it get \
                 errors now. Mount the pool again"
            );
            Err(CommandError::at(folder, fault).into())
        }
    }
}

/// The path of the running program, or of one that was installed in its place.
fn installed() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?;
    let text = path.to_str()?;
    Some(PathBuf::from(
        text.strip_suffix(" (deleted)").unwrap_or(text),
    ))
}

/// The serving process's part.
fn serve_kept(args: &PoolMountArgs) -> Result<ExitCode, String> {
    let failed = |error: &dyn Display| CommandError::at(&args.folder, error);
    let (handover, lock) = Handover::receive(std::io::stdin()).map_err(|error| failed(&error))?;
    let goes_on = handover.goes_on();
    let pool = Pool::serve_on(&args.catalogue, lock).map_err(told)?;
    let stop = hear(args, Ear::Server)?;
    let mounted = handover.mount(pool, Some(&daemon(args)?), args.tidy_after, &args.folder);
    let mounted = mounted.map_err(|error| failed(&error))?;
    stop.set_mounted(&mounted);
    if goes_on {
        tracing::info!("{}: the mount goes on", args.folder.display());
    } else {
        report(args, true)?;
    }
    until_unmounted(args, mounted, &stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command as Asked, PoolCommand};
    use clap::Parser;

    fn args(folder: &Path) -> PoolMountArgs {
        let folder = folder.to_str().unwrap();
        match Cli::parse_from(["rushes", "pool", "mount", "/mnt/catalogue", folder]).command {
            Asked::Pool {
                command: PoolCommand::Mount(args),
            } => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_mount_that_cannot_be_is_refused_with_what_it_needs() {
        let folder = std::env::temp_dir().join(format!("rushes-mount-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (file, gone) = (folder.join("file"), folder.join("gone"));
        std::fs::write(&file, "").unwrap();
        assert_eq!(check_mount(0, &args(&folder)), Ok(()));
        let of_user = check_mount(1000, &args(&folder)).unwrap_err();
        let sudo = format!("sudo rushes pool mount /mnt/catalogue {}", folder.display());
        assert!(
            of_user.contains("user 1000") && of_user.ends_with(&sudo),
            "{of_user}"
        );
        let of_gone = check_mount(0, &args(&gone)).unwrap_err();
        let mkdir = format!("mkdir -p {}", gone.display());
        assert!(
            of_gone.contains("is not there") && of_gone.ends_with(&mkdir),
            "{of_gone}"
        );
        let of_file = check_mount(0, &args(&file)).unwrap_err();
        assert!(of_file.contains("is not a folder"), "{of_file}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
