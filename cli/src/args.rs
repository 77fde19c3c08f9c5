// SPDX-License-Identifier: Apache-2.0
//! Every word that `rushes` understands. Help, man pages and completions are made from this table.

use crate::export_args::ExportCommand;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use rushes_daemon::config::{DEFAULT_CONFIG, amount};
use rushes_pool::{Class, MemberNumber, Policy, Rule, RuleChange, Schedule, Wish};
use std::ffi::OsString;
use std::path::PathBuf;

/// A real-time media file server: every video stream gets a contract, and keeps it.
#[derive(Debug, Parser)]
#[command(name = "rushes", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The table, with the usage line of each command as in its help.
///
/// clap makes the usage of an error from the options that are set, also by the environment: with
/// RUSHES_CONFIG set it would read as if --config were required.
pub(crate) fn with_whole_usage() -> clap::Command {
    fn fix(command: &mut clap::Command) {
        for inner in command.get_subcommands_mut() {
            fix(inner);
        }
        let usage = command.render_usage().to_string();
        let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).to_owned();
        *command = std::mem::take(command).override_usage(usage);
    }
    let mut command = Cli::command();
    command.build();
    fix(&mut command);
    command
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon, in the foreground
    #[command(after_help = "\
Signals: SIGHUP reads the configuration again (rules, policy, new shares), SIGTERM and SIGINT stop \
cleanly. systemd is told when the daemon is ready, reloads and stops. Exit code: 0 stopped by a signal, 2 the daemon could not start or go on.")]
    Serve(ServeArgs),
    /// Write acknowledged data that an ended daemon left in the runtime folder; for a machine where
    /// no new daemon starts
    #[command(after_help = "\
A daemon does this by itself when it starts. The Samba module and a pool's mount start this command if no daemon has started for a while. A lane is the part of \
the write buffer that one of them has with the daemon: a file in the runtime folder. Exit code: 0 nothing is left; 1 some data \
could not be written, and the output names it, the reason and the remedy; 2 the command failed, or a daemon is running.")]
    Recover(RecoverArgs),
    /// Examine configuration and machine; each finding comes with its remedy
    #[command(
        after_help = "Exit code: 0 no fault found, 1 something is wrong, 2 the check failed."
    )]
    Check(CheckArgs),
    /// Streams, their contracts and lateness; devices, cache, sessions
    #[command(after_help = "Exit code: 0 shown, 2 the daemon could not be asked.")]
    Status(StatusArgs),
    /// Live view of streams, contracts, lateness, devices, cache and sessions
    #[command(
        after_help = "Exit code: 0 ended by q or after --once, 2 the daemon could not be asked."
    )]
    Top(TopArgs),
    /// Ask whether more streams can get contracts: yes or no, why, and how much bandwidth is left
    #[command(after_help = "Exit code: 0 yes, 1 no, 2 the daemon could not be asked.")]
    Admit(AdmitArgs),
    /// Measure the device under a folder; contracts rest on the result
    #[command(after_help = "Exit code: 0 measured, 2 it could not be measured or kept.")]
    Calibrate(CalibrateArgs),
    /// One directory tree over many file systems
    Pool {
        /// The command to run.
        #[command(subcommand)]
        command: PoolCommand,
    },
    /// Measure playback honestly: `rushes lab help`
    #[command(disable_help_flag = true)]
    Lab {
        /// Arguments, passed unchanged to `rushes-lab`.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARGS"
        )]
        args: Vec<OsString>,
    },
    /// Print completions for a shell
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the man page, or write all of them into a folder
    Man {
        /// Folder for one page per command; created if it does not exist.
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Create a pool from empty folders on mounted file systems
    #[command(after_help = "\
Nothing is formatted and nothing is deleted. Repeat an interrupted create to finish it. Exit code: 0 the \
pool exists, 2 it could not be created.")]
    Create(PoolCreateArgs),
    /// List the members of a pool: folder, state and fill
    #[command(after_help = "\
Exit code: 0 every member can be used, 1 a member is missing or read-only, 2 the pool could not be read.")]
    Ls(PoolLsArgs),
    /// Show which members hold the bytes of a file
    #[command(after_help = "\
Exit code: 0 all bytes are present, 1 some are on a missing member, 2 the command failed, for one of the
files at least; the others are shown.")]
    Where(PoolWhereArgs),
    /// Mount a pool as one directory tree, until it is unmounted
    #[command(after_help = "\
Runs in the foreground until `umount FOLDER`, SIGTERM or SIGINT. Programs with open files keep them, and the mount ends when the last file is closed. A second SIGTERM or \
SIGINT ends it at once: programs with open files get errors, data stored through mappings has three seconds to be written, and the output names what is left. No acknowledged \
write is lost. A folder that is, contains or lies inside the catalogue or a member is refused. A dead mount that a killed process left on the folder is removed first. \
Exit code: 0 unmounted; 1 stopped by a second signal; 2 the mount failed, or was given up because its serving process died repeatedly.")]
    Mount(PoolMountArgs),
    /// Undo `create`: delete a pool that is not mounted, and leave its folders empty
    #[command(after_help = "\
Without --yes nothing is changed. Files in the folders that are not the pool's stay. A pool with files is refused without --with-files; a pool with a missing member is \
always refused. Repeat an interrupted destroy to finish it. Exit code: 0 the pool is deleted, or without --yes can be deleted; 2 the command was refused or \
failed.")]
    Destroy(PoolDestroyArgs),
    /// Check a pool that is not mounted for inconsistencies, and repair them
    #[command(after_help = "\
Nothing is changed without --repair; with --repair only bytes that also lie where a file's layout says are deleted, and the remains of files whose deletion had begun. Bytes that no file \
names get a name in `lost+found`. The command may be interrupted at any time and repeated. Exit code: 0 nothing is wrong, or all of it was repaired; 1 a fault \
is left, or a missing member was not checked; 2 the check failed.")]
    Fsck(PoolFsckArgs),
    /// Rebuild a lost catalogue from the members
    #[command(after_help = "\
Give an empty folder, and the folders of all members that are left. Members are not changed until all names are back. Repeat an interrupted \
rescue to run it again. Files without a known name are in `lost+found`, under their number. Exit code: 0 everything is back; 1 something is \
not as it should be, and the output names it; 2 the rescue failed.")]
    Rescue(PoolRescueArgs),
    /// Add folders as members to a pool, mounted or not
    #[command(after_help = "\
Nothing is formatted and nothing is deleted. Repeat an interrupted add to finish it. Exit code: 0 the folders are members, 2 they could \
not be added.")]
    Add(PoolAddArgs),
    /// Move all bytes off a member of a pool, mounted or not
    #[command(after_help = "\
The member takes no new bytes from then on, also after an interrupt; repeat the command to continue. --cancel lets the member take new bytes again. \
In a mounted pool the mount moves the files, behind all other reads and writes, while this command runs. A file that is being moved at an interrupt may lie \
in two segments until the drain continues. Where the other members lack space a file may stay in two segments, with all its bytes. The command refuses, and changes nothing, if the member is \
missing or is the last one that takes bytes. Exit code: 0 the member is empty; 1 files are left on it, and the first few are named with the reason; 2 the drain failed.")]
    Drain(PoolDrainArgs),
    /// Move files from full members to emptier ones, after one was added; the pool may be mounted
    #[command(after_help = "\
Whole files move until each member is within 1 % of the pool's average fill; files whose policy names a class \
stay on members of that class. A file striped over fewer members than its policy now allows is striped again over more, if there is space. \
The end of the output names the files that stay on a fuller member, with the reason, and the members that were left out. \
A file that cannot be read or moved is skipped; the output names the first few and their number. \
Repeat an interrupted rebalance to continue it. Exit code: 0 done, 1 files were skipped, 2 the rebalance could not start or \
failed.")]
    Rebalance(PoolCatalogueArgs),
    /// Bring files into fewer segments and extents; the pool may be mounted
    #[command(after_help = "\
A file in several segments moves to one member that has space for all of it. A file with more than one extent for each 64 MiB and one more is rewritten on its member, \
if the copy has at most half as many. `rebalance` widens striped files. A file that cannot be read or moved is skipped; the output names the \
first few and their number. Repeat an interrupted defrag to continue it. Exit \
code: 0 done, 1 files were skipped, 2 the defrag could not start or failed.")]
    Defrag(PoolDefragArgs),
    /// Remove a member that has no bytes, or whose disk is dead; the pool may be mounted
    #[command(after_help = "\
Refused while a file has bytes on the member, and for the last member that takes bytes. A missing member may be removed while the pool is not mounted, if it had no bytes; or, at any time, with --lost. \
With --lost, files that had bytes on it stay in the tree, reads of the lost bytes get an input/output error, `rushes pool fsck` names the files, and they can be rewritten or deleted. \
Repeat an interrupted remove to finish it. Exit code: 0 the member is removed, 2 it is not.")]
    Remove(PoolRemoveArgs),
    /// State of a pool: members, free space, duties, number of objects, and the members with the
    /// log of names
    #[command(after_help = "\
Reads the folders of all members. Exit code: 0 every member can be used; 1 a member is missing, read-only or failing, or there are names and no member has \
them; 2 the pool could not be read.")]
    Status(PoolLsArgs),
    /// Show or set where files go: for the pool, a pattern of names, a folder or a file
    #[command(after_help = "\
WORDS, in any order: `single`, `striped`, `striped=N`, `striped=GxN`, `unit=SIZE`, `group_unit=SIZE`, `choose=POLICY`, `class=CLASS`. A new file takes \
its folder's policy; if the folder has none, that of the first placement rule whose pattern matches its name. A word that is missing there comes from the pool's policy. No bytes are moved: files that have bytes stay where they are. For the pool \
itself give its catalogue; to change its policy, except by --class or --tidy, unmount it first. To show it, the pool may be mounted. Exit code: 0 shown or set, 2 the command failed.")]
    Policy(PoolPolicyArgs),
    /// Serve a mounted pool to other machines: by NFS, or a file of it as a disk
    Export {
        /// The protocol.
        #[command(subcommand)]
        command: ExportCommand,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PoolRescueArgs {
    /// An empty folder for names, owners, rights and times
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// The folder of each member that is left
    #[arg(value_name = "MEMBER", required = true, value_hint = ValueHint::DirPath)]
    pub(crate) members: Vec<PathBuf>,
    /// Daemon that served the pool: the data in its memory has to be written first
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolAddArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// An empty folder on each file system that is to be a member
    #[arg(value_name = "MEMBER", required = true, value_hint = ValueHint::DirPath)]
    pub(crate) members: Vec<PathBuf>,
    /// Class of the new members, for `class=` of a policy
    #[arg(long, value_name = "CLASS", value_parser = parse_class_name)]
    pub(crate) class: Option<Class>,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDestroyArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Also delete a pool that has files: they are lost
    #[arg(long)]
    pub(crate) with_files: bool,
    /// Delete; without it the command only lists what would be deleted
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDrainArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Number or folder of the member
    #[arg(value_name = "MEMBER")]
    pub(crate) member: PathBuf,
    /// Let the member take new bytes again
    #[arg(long)]
    pub(crate) cancel: bool,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolCatalogueArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDefragArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Files and folders of the pool, below its mount (or, if it is not mounted, in its catalogue's
    /// `tree`); otherwise all
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolRemoveArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Number or folder of the member
    #[arg(value_name = "MEMBER")]
    pub(crate) member: PathBuf,
    /// Its disk is dead: give up its bytes, for good, with --yes. Refused if the member is present
    #[arg(long)]
    pub(crate) lost: bool,
    /// With --lost: give them up
    #[arg(long, requires = "lost")]
    pub(crate) yes: bool,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolPolicyArgs {
    /// The pool's catalogue; or a file or folder of a pool that is mounted (or, if it is not, in
    /// its catalogue's `tree`)
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// New policy, in place of the old one: `class=ssd`, `striped=4 unit=1MiB choose=round_robin`
    #[arg(long, value_name = "WORDS", value_parser = parse_wish)]
    pub(crate) set: Option<Wish>,
    /// Clear the policy; for a pool also its placement rules, except those that this command sets
    #[arg(long, conflicts_with = "set")]
    pub(crate) clear: bool,
    /// Policy for new files whose names match this pattern, below the root of the pool's tree:
    /// `'conform/**/*.exr' 'class=ssd striped=2'`. `*` stays within a folder, `**` crosses them.
    /// Replaces the rule for this pattern, else becomes the last rule; the first rule that matches
    /// counts. May be repeated
    #[arg(long, num_args = 2, value_names = ["PATTERN", "WORDS"])]
    pub(crate) rule: Vec<String>,
    /// Place the rules of this command before the rule for this pattern, also rules that exist
    /// already
    #[arg(long, value_name = "PATTERN", requires = "rule")]
    pub(crate) before: Option<String>,
    /// Delete the rule for this pattern. May be repeated
    #[arg(long, value_name = "PATTERN")]
    pub(crate) no_rule: Vec<String>,
    /// Delete all rules, except those that this command sets
    #[arg(long, conflicts_with_all = ["no_rule", "before"])]
    pub(crate) no_rules: bool,
    /// Class of a member, for `class=`; `NUMBER=` takes it away. May be repeated, or list several
    /// with commas. The pool may be mounted
    #[arg(long, value_name = "NUMBER=CLASS", value_parser = parse_class, value_delimiter = ',')]
    pub(crate) class: Vec<(MemberNumber, Option<Class>)>,
    /// When the mount of the pool tidies it (`rebalance`, then `defrag`) by itself: `off`; `idle`,
    /// whenever no program reads or writes and no contract exists; the same within hours such as
    /// `02:00-06:00`; or `always`, also beside players and recorders. The pool may be mounted
    #[arg(long, value_name = "WHEN", value_parser = parse_schedule)]
    pub(crate) tidy: Option<Schedule>,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

impl PoolPolicyArgs {
    /// The policy to set. None: the command only shows it.
    pub(crate) fn wish(&self) -> Option<Wish> {
        if self.clear {
            Some(Wish::default())
        } else {
            self.set.clone()
        }
    }

    /// The change of the pool's rules.
    pub(crate) fn rules(&self) -> Result<RuleChange, String> {
        let said = self
            .rule
            .chunks_exact(2)
            .map(|rule| Rule::of(&rule[0], &rule[1]).map_err(|fault| format!("--rule: {fault}")));
        Ok(RuleChange {
            is_clear: self.clear || self.no_rules,
            gone: self.no_rule.clone(),
            said: said.collect::<Result<_, String>>()?,
            before: self.before.clone(),
        })
    }

    /// Whether an option about rules was given.
    pub(crate) fn is_about_rules(&self) -> bool {
        !self.rule.is_empty() || !self.no_rule.is_empty() || self.no_rules
    }
}

#[derive(Debug, Args)]
pub(crate) struct PoolFsckArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Repair faults that can be repaired without losing a byte
    #[arg(long)]
    pub(crate) repair: bool,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolCreateArgs {
    /// A folder for names, owners, rights and times of all files; a small fast disk suits it best
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// A folder for the bytes of files on each file system that is to be a member
    #[arg(value_name = "MEMBER", required = true, value_hint = ValueHint::DirPath)]
    pub(crate) members: Vec<PathBuf>,
    /// Which member takes a new file: `most_free_space`, `round_robin` (one after the other),
    /// `per_user` (one for each user) or `least_loaded` (least promised bandwidth)
    #[arg(long, default_value = Policy::MostFreeSpace.name(), value_parser = parse_policy, value_name = "POLICY")]
    pub(crate) policy: Policy,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolLsArgs {
    /// A catalogue, or anything in a pool that is mounted; otherwise all pools that are mounted
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: Option<PathBuf>,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolMountArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Folder where the pool's tree appears
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) folder: PathBuf,
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Shell command that writes the data a dead daemon left, if no daemon starts again
    #[arg(long, value_name = "COMMAND", default_value = "rushes recover", value_hint = ValueHint::CommandString)]
    pub(crate) recover: String,
    /// Time from the daemon's death to --recover; a bare number is seconds
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    pub(crate) recover_after: std::time::Duration,
    /// Time without reads and writes after which the pool is idle and tidies itself, if `rushes
    /// pool policy --tidy` says so; a bare number is seconds
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = parse_time)]
    pub(crate) tidy_after: std::time::Duration,
    /// Serve the mount by a separate process, and start another when it dies; programs on the mount
    /// wait meanwhile. Turns off passthrough
    #[arg(long)]
    pub(crate) keeper: bool,
    /// Make the folder immutable, as `chattr +i` does, so that no program writes to it while the
    /// pool is not mounted there. It stays so until `chattr -i`
    #[arg(long)]
    pub(crate) protect: bool,
    /// Serve the mount for the keeper at standard input
    #[arg(long, hide = true)]
    pub(crate) kept: bool,
    /// Print one line of JSON when the pool is mounted
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolWhereArgs {
    /// Files of a pool that is mounted (or, if it is not, in its catalogue's `tree`)
    #[arg(value_name = "FILE", required = true, value_hint = ValueHint::FilePath)]
    pub(crate) files: Vec<PathBuf>,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_policy(text: &str) -> Result<Policy, String> {
    Policy::of(text).ok_or_else(|| {
        let names: Vec<&str> = Policy::ALL.iter().map(|policy| policy.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn parse_schedule(text: &str) -> Result<Schedule, String> {
    Schedule::of(text).ok_or_else(|| {
        String::from("expected off, idle, always or a time of day such as 02:00-06:00")
    })
}

fn parse_wish(text: &str) -> Result<Wish, String> {
    Wish::of(text).map_err(|fault| fault.to_string())
}

fn parse_class_name(text: &str) -> Result<Class, String> {
    Class::of(text)
        .ok_or_else(|| String::from("expected a name of 1 to 16 small letters, digits, - or _"))
}

fn parse_class(text: &str) -> Result<(MemberNumber, Option<Class>), String> {
    let expected =
        "expected NUMBER=CLASS, with a name of 1 to 16 small letters, digits, - or _; or NUMBER=";
    let read = text.split_once('=').and_then(|(number, class)| {
        let number = MemberNumber(number.parse().ok()?);
        if class.is_empty() {
            return Some((number, None));
        }
        Some((number, Some(Class::of(class)?)))
    });
    read.ok_or_else(|| expected.to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Log level: error, warn, info, debug, trace, or a filter such as `info,rushes_daemon=debug`
    #[arg(
        long,
        env = "RUSHES_LOG",
        default_value = "info",
        value_name = "FILTER"
    )]
    pub(crate) log: String,
}

#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// List the data that is left, and write nothing; exit code 1 if there is any
    #[arg(long, conflicts_with = "give_up")]
    pub(crate) list: bool,
    /// Show the data left in this lane; with --yes delete it: acknowledged bytes are lost
    #[arg(long, value_name = "LANE")]
    pub(crate) give_up: Option<u32>,
    /// With --give-up: delete the data
    #[arg(long, requires = "give_up")]
    pub(crate) yes: bool,
    /// With --list: print JSON
    #[arg(long, requires = "list")]
    pub(crate) json: bool,
    /// End a daemon that serves, holds the lanes and has not answered for this long; one that is
    /// still starting is left alone
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    pub(crate) hung_after: std::time::Duration,
    /// Log level: error, warn, info, debug, trace, or a filter such as `info,rushes_daemon=debug`
    #[arg(
        long,
        env = "RUSHES_LOG",
        default_value = "info",
        value_name = "FILTER"
    )]
    pub(crate) log: String,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArg {
    /// Configuration file
    #[arg(short, long, env = "RUSHES_CONFIG", default_value = DEFAULT_CONFIG, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: PathBuf,
}

/// The daemon that the command asks.
#[derive(Debug, Args)]
pub(crate) struct DaemonArg {
    /// Folder with the daemon's sockets; default: from the configuration
    #[arg(long, env = "RUSHES_RUNTIME_DIR", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) runtime_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) config: ConfigArg,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Samba's configuration, if not where `testparm` looks
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) smb_conf: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Print JSON; field names are stable
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Time between two updates
    #[arg(long, default_value = "1s", value_parser = parse_period, value_name = "TIME")]
    pub(crate) interval: std::time::Duration,
    /// Print one screen and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Width of that screen in columns; default: the terminal's. Where the output is no terminal
    /// the screen is as wide as its longest line, and 120 columns at least
    #[arg(long, value_name = "COLUMNS", requires = "once")]
    pub(crate) width: Option<u16>,
    /// Print one JSON object per update instead
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AdmitArgs {
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Rate of one stream: 100M, 1.5G, 48k (bits a second)
    #[arg(long, value_parser = parse_bitrate, value_name = "RATE")]
    pub(crate) bitrate: u64,
    /// Number of additional streams
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) count: u32,
    /// A file or folder on the device; without it every device of a share is asked about
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// A folder (or the share's root) on the device
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// Keep the result for the daemon, in the state folder of the configuration
    #[arg(long)]
    pub(crate) save: bool,
    /// Fewer requests of each size: about 8 s instead of a minute, and a rougher model
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure reads only; write speed is then estimated from them
    #[arg(long)]
    pub(crate) no_writes: bool,
    /// Folder of calibrations; default: from the configuration
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) state_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_bitrate(text: &str) -> Result<u64, String> {
    match amount::parse_bitrate(text) {
        Some(rate) if amount::BITRATES.contains(&rate) => Ok(rate),
        Some(_) => Err(String::from(amount::BITRATES_EXPECTED)),
        None => Err(format!("expected {}", amount::BITRATE_EXPECTED)),
    }
}

/// A time with its unit; a bare number is seconds.
fn parse_time(text: &str) -> Result<std::time::Duration, String> {
    let in_seconds = format!("{text}s");
    let ns = amount::parse_duration(text).or_else(|| amount::parse_duration(&in_seconds));
    ns.map(std::time::Duration::from_nanos).ok_or_else(|| {
        format!(
            "expected {}, or seconds without one",
            amount::DURATION_EXPECTED
        )
    })
}

/// The same, for an interval.
fn parse_period(text: &str) -> Result<std::time::Duration, String> {
    let period = parse_time(text)?;
    if period.as_millis() < 50 {
        return Err(String::from("expected at least 50ms"));
    }
    Ok(period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_time_takes_a_unit_or_is_seconds() {
        let mount = |after: &str| {
            let words = [
                "rushes",
                "pool",
                "mount",
                "/c",
                "/m",
                "--recover-after",
                after,
            ];
            match Cli::try_parse_from(words)?.command {
                Command::Pool {
                    command: PoolCommand::Mount(args),
                } => Ok::<_, clap::Error>((
                    args.recover_after.as_millis(),
                    args.tidy_after.as_secs(),
                )),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(mount("7").unwrap(), (7_000, 60));
        assert_eq!(mount("7s").unwrap(), (7_000, 60));
        assert_eq!(mount("1500ms").unwrap(), (1_500, 60));
        let refused = mount("soon").unwrap_err().to_string();
        assert!(refused.contains("seconds without one"), "{refused}");
        assert_eq!(parse_period("2").unwrap().as_secs(), 2);
        assert_eq!(parse_period("10ms").unwrap_err(), "expected at least 50ms");
    }

    #[test]
    fn a_policy_is_shown_set_or_cleared() {
        let parsed = |words: &[&str]| {
            let all = ["rushes", "pool", "policy", "/mnt/catalogue"];
            Cli::try_parse_from(all.iter().chain(words))
        };
        let args = |words: &[&str]| match parsed(words).unwrap().command {
            Command::Pool {
                command: PoolCommand::Policy(args),
            } => args,
            other => panic!("{other:?}"),
        };
        assert_eq!(args(&[]).wish(), None);
        assert_eq!(args(&["--clear"]).wish(), Some(Wish::default()));
        let wish = args(&["--set", "class=ssd  single"]).wish().unwrap();
        assert_eq!(wish.to_string(), "single class=ssd");
        let classes = args(&["--class", "0=ssd,1=", "--class", "12=raid"]).class;
        let of = |number, name| (MemberNumber(number), Class::of(name));
        assert_eq!(classes, [of(0, "ssd"), of(1, ""), of(12, "raid")]);
        for (words, said) in [
            (["--set", "fast"], "expected single"),
            (["--set", "striped=1"], "2 to 64"),
            (["--class", "ssd"], "NUMBER=CLASS"),
            (["--class", "0=The SSDs"], "small letters"),
        ] {
            let error = parsed(&words).unwrap_err().to_string();
            assert!(error.contains(said), "{words:?}: {error}");
        }
        assert!(parsed(&["--set", "single", "--clear"]).is_err());
    }

    #[test]
    fn rules_are_said_in_pairs() {
        let parsed = |words: &[&str]| {
            let all = ["rushes", "pool", "policy", "/mnt/catalogue"];
            Cli::try_parse_from(all.iter().chain(words))
        };
        let rules = |words: &[&str]| match parsed(words).unwrap().command {
            Command::Pool {
                command: PoolCommand::Policy(args),
            } => args.rules(),
            other => panic!("{other:?}"),
        };
        assert_eq!(rules(&[]), Ok(RuleChange::default()));
        let change = RuleChange {
            is_clear: false,
            gone: vec![String::from("c")],
            said: [("a/**", "class=ssd striped=2"), ("b=1", "")]
                .map(|(pattern, words)| Rule::of(pattern, words).unwrap())
                .to_vec(),
            before: Some(String::from("d")),
        };
        let words = [
            "--rule",
            "a/**",
            "striped=2 class=ssd",
            "--rule",
            "b=1",
            "",
            "--no-rule",
            "c",
            "--before",
            "d",
        ];
        assert_eq!(rules(&words), Ok(change));
        for words in [&["--clear"][..], &["--no-rules", "--set", "single"]] {
            assert!(rules(words).unwrap().is_clear, "{words:?}");
        }
        let fault = rules(&["--rule", "a/**", "fast"]).unwrap_err();
        assert!(fault.contains("expected single"), "{fault}");
        let fault = rules(&["--rule", "/a/**", "single"]).unwrap_err();
        assert!(fault.contains("below the root"), "{fault}");
        for (words, said) in [
            (&["--rule", "a/**=class=ssd"][..], "2 values required"),
            (&["--before", "a"], "--rule"),
            (&["--no-rules", "--no-rule", "a"], "cannot be used with"),
        ] {
            let error = parsed(words).unwrap_err().to_string();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn lab_takes_everything_after_it() {
        let cli = Cli::parse_from(["rushes", "lab", "play", "--json", "--help"]);
        let Command::Lab { args } = cli.command else {
            panic!("{cli:?}")
        };
        assert_eq!(args, ["play", "--json", "--help"]);
    }

    #[test]
    fn a_bitrate_is_bits_a_second_and_makes_sense() {
        let parsed = Cli::parse_from(["rushes", "admit", "--bitrate", "100M"]);
        let Command::Admit(admit) = parsed.command else {
            panic!("{parsed:?}")
        };
        assert_eq!((admit.bitrate, admit.count), (100_000_000, 1));
        for bad in ["0", "100", "100MB", "fast"] {
            let error = Cli::try_parse_from(["rushes", "admit", "--bitrate", bad]).unwrap_err();
            assert!(error.to_string().contains("bits a second"), "{error}");
        }
    }
}
