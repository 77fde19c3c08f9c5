// SPDX-License-Identifier: Apache-2.0
//! Every word that `rushes` understands. Help, man pages and completions are made from this table.

use crate::export_args::ExportCommand;
use clap::{Args, Parser, Subcommand, ValueHint};
use rushes_daemon::config::{DEFAULT_CONFIG, amount};
use rushes_pool::{Class, MemberNumber, Policy, Rule, RuleChange, Schedule, Wish};
use std::ffi::OsString;
use std::path::PathBuf;

/// A real-time media file server: every video stream gets a contract, and keeps it.
#[derive(Debug, Parser)]
#[command(name = "rushes", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon, in the foreground
    #[command(after_help = "\
Signals: SIGHUP reads the configuration again (rules, policy, new shares), SIGTERM and SIGINT stop \
cleanly. systemd is told when the daemon is ready, reloads and stops.")]
    Serve(ServeArgs),
    /// Write what a daemon that ended has left, when no other comes to do it
    #[command(after_help = "\
A daemon that starts does this by itself. Doors start it when none has come for a while. Exit code: 0 nothing is left, 1 what \
could be written is written and something is left (it says what, why, and what to do), 2 it could not be done, or a daemon is there.")]
    Recover(RecoverArgs),
    /// Examine configuration and machine; each finding comes with its remedy
    #[command(
        after_help = "Exit code: 0 nothing in the way, 1 something is wrong, 2 it could not be examined."
    )]
    Check(CheckArgs),
    /// Streams, their contracts and lateness; devices, cache, sessions
    Status(StatusArgs),
    /// The same, live
    Top(TopArgs),
    /// Could more streams be promised? Yes or no, why, and how much is left
    #[command(after_help = "Exit code: 0 yes, 1 no, 2 the question could not be put.")]
    Admit(AdmitArgs),
    /// Measure the device under a folder, so that promises rest on it
    Calibrate(CalibrateArgs),
    /// One directory tree over many file systems
    Pool {
        /// What to do.
        #[command(subcommand)]
        command: PoolCommand,
    },
    /// Measure playback honestly: `rushes lab help`
    #[command(disable_help_flag = true)]
    Lab {
        /// Handed to `rushes-lab` as they are.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARGS"
        )]
        args: Vec<OsString>,
    },
    /// Print completions for a shell
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
    /// Print the man page, or write all of them into a folder
    Man {
        /// Folder for one page a command; made if need be.
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Make a pool of empty folders on file systems that are mounted
    #[command(after_help = "\
Nothing is formatted and nothing is deleted. A create that was interrupted is finished by repeating it. Exit code: 0 the \
pool is there, 2 it could not be made.")]
    Create(PoolCreateArgs),
    /// Members of a pool: where they are, whether they can be used, how full they are
    #[command(after_help = "\
Exit code: 0 every member can be used, 1 one is missing or read-only, 2 the pool could not be looked at.")]
    Ls(PoolLsArgs),
    /// On which members the bytes of a file are
    #[command(after_help = "\
Exit code: 0 all of them are there, 1 some are on a member that is missing, 2 it could not be found out.")]
    Where(PoolWhereArgs),
    /// Mount a pool as one directory tree, until it is unmounted
    #[command(after_help = "\
Stays in the foreground and ends with `umount FOLDER`, SIGTERM or SIGINT: who has files open keeps them, and it ends with the last. A second SIGTERM or SIGINT \
waits for nobody: programs with open files get errors, what they stored through mappings gets three seconds to be written, and it says what it leaves. Nothing that \
was acknowledged is lost. A folder that is, contains or lies inside the catalogue or a member is refused. Exit code: 0 it was unmounted, 1 it was told to end twice, 2 it could not be mounted, or was given up because those who served it died again and again. What a \
mount that was killed leaves on the folder is taken away first.")]
    Mount(PoolMountArgs),
    /// Undo `create`: a pool that is not mounted is none any more, and its folders are empty again
    #[command(after_help = "\
Without --yes nothing is changed. What is in the folders and is not the pool's stays. A pool with files is refused without --with-files; one of which a member is missing, \
always. A destroy that was interrupted is finished by repeating it. Exit code: 0 the pool is gone (or, without --yes, could be), 2 it was refused, or could not \
be done.")]
    Destroy(PoolDestroyArgs),
    /// Look through a pool that is not mounted for what does not fit, and mend it
    #[command(after_help = "\
Nothing is changed without --repair; with it nothing is removed that is not also where a file's record says, but for what is left of files that were being removed. Bytes that no file \
names get a name in `lost+found`. It may be interrupted at any time and repeated. Exit code: 0 nothing is wrong, or all of it was mended; 1 something \
is left, or a member is missing, which was not looked at; 2 it could not be looked through.")]
    Fsck(PoolFsckArgs),
    /// Make a lost catalogue anew, from what the members know
    #[command(after_help = "\
Give an empty folder, and the folders of all members that are left. Members are not changed until all names are back. A rescue that was interrupted \
is done again by repeating it. What no name is known for is in `lost+found`, under its number. Exit code: 0 all of it is back, 1 something is \
not as it should be (it is said what), 2 it could not be done.")]
    Rescue(PoolRescueArgs),
    /// Take further folders in as members of a pool, mounted or not
    #[command(after_help = "\
Nothing is formatted and nothing is deleted. An add that was interrupted is finished by repeating it. Exit code: 0 they are members, 2 they could \
not be taken.")]
    Add(PoolAddArgs),
    /// Move everything off a member of a pool, mounted or not
    #[command(after_help = "\
The member takes nothing new from then on, also when this is interrupted; the same command again goes on. --cancel lets it take new bytes again. \
A mounted pool's files are moved by the mount, behind everybody else's reads and writes, as long as this command runs; the file that was on its way when \
The last member that takes bytes is refused, and nothing is changed then. Where the others lack room a file may be left in two pieces, with all its bytes. \
it is interrupted may be in two pieces until it goes on. A member that is missing is refused. Exit code: 0 the member is empty, 1 files are left on it (the first few are named, with the reason), 2 it could not be done.")]
    Drain(PoolDrainArgs),
    /// Move files from full members to emptier ones, after one was added; the pool may be mounted
    #[command(after_help = "\
Whole files move until each member is as full as all together, within one part in a hundred; files for which a class \
of members was wished stay on members of that class. What is striped over fewer members than its policy allows by now is striped anew over more, if there is room. \
What stays on a member that is fuller, and why, is said at the end, and which members were left out. \
A file that cannot be read or moved keeps nobody from the others; the first few are named at the end, and how many. \
One that was interrupted goes on when it is repeated. Exit code: 0 done, 1 there are such files, 2 it could not be begun or \
went wrong.")]
    Rebalance(PoolCatalogueArgs),
    /// Bring files together that are in more pieces than need be; the pool may be mounted
    #[command(after_help = "\
What is in several places though one member has room for the whole comes to one; what is scattered over its disk, with more than one extent for each 64 MiB and one more, is \
written anew beside it if that has at most half as many. Striped files are as wide as they can be by `rebalance`. A file that cannot be read or moved keeps nobody from the others; the \
first few are named at the end, and how many. One that was interrupted goes on when it is repeated. Exit \
code: 0 done, 1 there are such files, 2 it could not be begun or went wrong.")]
    Defrag(PoolDefragArgs),
    /// Let a member go that has no bytes, or whose disk is dead; the pool may be mounted
    #[command(after_help = "\
Refused while a file has bytes on it, and of the last member that takes bytes. One that is missing may go if nothing was on it, while the pool is not mounted, or with --lost: then files that had bytes on it stay in the tree, \
what was there gives an input/output error, `rushes pool fsck` names them, and they can be written anew or removed. A remove that was interrupted is finished by repeating \
it. Exit code: 0 it is gone, 2 it is not.")]
    Remove(PoolRemoveArgs),
    /// How a pool is: members, their room, what they are for, how many objects they have, who has the names
    #[command(after_help = "\
Looks through the folders of all members. Exit code: 0 every member can be used, 1 one is missing, read-only or failing, or there are names and no member has \
them, 2 it could not be looked at.")]
    Status(PoolLsArgs),
    /// Where files of a pool go: show it, or say it for the pool, names of a pattern, a folder or a file
    #[command(after_help = "\
WORDS, in any order: `single`, `striped`, `striped=N`, `striped=GxN`, `unit=SIZE`, `group_unit=SIZE`, `choose=POLICY`, `class=CLASS`. A file that is made says \
what its folder does, and where that says nothing what the first rule does whose pattern its name is of; what it does not say its pool says. Nothing is moved: files that have bytes stay where they are. For the pool \
itself give its catalogue; but for --tidy it must not be mounted then, though it may be looked at. Exit code: 0 it is shown, or said from now on, 2 it could not be done.")]
    Policy(PoolPolicyArgs),
    /// Serve a mounted pool to other machines: by NFS, or a file of it as a disk
    Export {
        /// By which protocol.
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
    /// Of the daemon that the pool went by: what it has in memory has to be written first
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Print JSON; the names of its fields are promised
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
    /// Of which class they are, for `class=` of a policy
    #[arg(long, value_name = "CLASS", value_parser = parse_class_name)]
    pub(crate) class: Option<Class>,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDestroyArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Also when there are files in it: they are lost
    #[arg(long)]
    pub(crate) with_files: bool,
    /// Do it; otherwise it is only said what would go
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDrainArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Its number, or its folder
    #[arg(value_name = "MEMBER")]
    pub(crate) member: PathBuf,
    /// It takes new bytes again
    #[arg(long)]
    pub(crate) cancel: bool,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolCatalogueArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolDefragArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Files and folders of the pool, below its mount (or, if it is not mounted, in its catalogue's `tree`); otherwise all
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolRemoveArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Its number, or its folder
    #[arg(value_name = "MEMBER")]
    pub(crate) member: PathBuf,
    /// Its disk is dead: give up what it has, for good. Refused if it is there
    #[arg(long)]
    pub(crate) lost: bool,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolPolicyArgs {
    /// The pool's catalogue; or a file or folder of a pool that is mounted (or, if it is not, in its catalogue's `tree`)
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// What is wished from now on, instead of all that was: `class=ssd`, `striped=4 unit=1MiB choose=round_robin`
    #[arg(long, value_name = "WORDS", value_parser = parse_wish)]
    pub(crate) set: Option<Wish>,
    /// Nothing is wished from now on; of a pool: neither it nor a rule of it says anything, but for those that this command says
    #[arg(long, conflicts_with = "set")]
    pub(crate) clear: bool,
    /// What is wished from now on for files that are made under names of this pattern, below the root of the pool's tree: `'conform/**/*.exr' 'class=ssd striped=2'`. `*`
    /// stays within a folder, `**` crosses them. In place of what the rule for this pattern said, else as the last rule; the first that matches counts. More than once
    #[arg(long, num_args = 2, value_names = ["PATTERN", "WORDS"])]
    pub(crate) rule: Vec<String>,
    /// The rules that this command says come before the one for this pattern, also those that are there already
    #[arg(long, value_name = "PATTERN", requires = "rule")]
    pub(crate) before: Option<String>,
    /// The rule for this pattern goes. More than once
    #[arg(long, value_name = "PATTERN")]
    pub(crate) no_rule: Vec<String>,
    /// All rules go, but for those that this command says
    #[arg(long, conflicts_with_all = ["no_rule", "before"])]
    pub(crate) no_rules: bool,
    /// Of which class a member is, for `class=`; `NUMBER=`: of none any more. More than once, or with commas. The pool may be mounted
    #[arg(long, value_name = "NUMBER=CLASS", value_parser = parse_class, value_delimiter = ',')]
    pub(crate) class: Vec<(MemberNumber, Option<Class>)>,
    /// When the mount of the pool tidies it (`rebalance`, then `defrag`) by itself, while nobody asks for bytes and nothing is promised: `off`, `idle` (at any time of
    /// day), or a time of day such as `02:00-06:00`; or `always`, also beside those who play and record. The pool may be mounted
    #[arg(long, value_name = "WHEN", value_parser = parse_schedule)]
    pub(crate) tidy: Option<Schedule>,
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

impl PoolPolicyArgs {
    /// What is to be wished. None: it is only to be shown.
    pub(crate) fn wish(&self) -> Option<Wish> {
        if self.clear {
            Some(Wish::default())
        } else {
            self.set.clone()
        }
    }

    /// What is to become of the pool's rules.
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

    /// One of the words that are about rules was given.
    pub(crate) fn is_about_rules(&self) -> bool {
        !self.rule.is_empty() || !self.no_rule.is_empty() || self.no_rules
    }
}

#[derive(Debug, Args)]
pub(crate) struct PoolFsckArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Mend what can be mended without losing a byte
    #[arg(long)]
    pub(crate) repair: bool,
    /// Print JSON; the names of its fields are promised
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
    /// Which member takes a new file: `most_free_space`, `round_robin` (one after the other), `per_user` (one for each user) or `least_loaded` (where
    /// least bandwidth is promised)
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
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolMountArgs {
    /// The pool's catalogue
    #[arg(value_name = "CATALOGUE", value_hint = ValueHint::DirPath)]
    pub(crate) catalogue: PathBuf,
    /// Where its tree is to be
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) folder: PathBuf,
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Shell command that writes what a daemon left that died, when none comes back
    #[arg(long, value_name = "COMMAND", default_value = "rushes recover", value_hint = ValueHint::CommandString)]
    pub(crate) recover: String,
    /// So long after its death; a bare number is seconds
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    pub(crate) recover_after: std::time::Duration,
    /// The pool is idle, and may tidy itself where `rushes pool policy --tidy` says so, when nobody has asked for bytes for so long; a bare number is seconds
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = parse_time)]
    pub(crate) tidy_after: std::time::Duration,
    /// Serve it by a process of its own, and start another one when that dies: who works on the mount waits meanwhile. Not with it: the kernel reading files
    /// by itself
    #[arg(long)]
    pub(crate) keeper: bool,
    /// Make the folder immutable, as `chattr +i` does, so that nobody writes to it while the pool is not mounted there. It stays so until `chattr -i`
    #[arg(long)]
    pub(crate) protect: bool,
    /// Serve it for the keeper at standard input
    #[arg(long, hide = true)]
    pub(crate) kept: bool,
    /// Print JSON, one line, when it is mounted
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PoolWhereArgs {
    /// Files of a pool that is mounted (or, if it is not, in its catalogue's `tree`)
    #[arg(value_name = "FILE", required = true, value_hint = ValueHint::FilePath)]
    pub(crate) files: Vec<PathBuf>,
    /// Print JSON; the names of its fields are promised
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
    /// What to log: error, warn, info, debug, trace, or a filter such as `info,rushes_daemon=debug`
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
    /// Say what is left, and write nothing; the exit code is 1 when something is left
    #[arg(long, conflicts_with = "give_up")]
    pub(crate) list: bool,
    /// Show what is left in this lane; with --yes delete it: bytes that clients were told are safe are lost
    #[arg(long, value_name = "LANE")]
    pub(crate) give_up: Option<u32>,
    /// With --give-up: do it
    #[arg(long, requires = "give_up")]
    pub(crate) yes: bool,
    /// With --list: print JSON
    #[arg(long, requires = "list")]
    pub(crate) json: bool,
    /// End a daemon that holds everything and has given no answer for so long
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    pub(crate) hung_after: std::time::Duration,
    /// What to log: error, warn, info, debug, trace, or a filter such as `info,rushes_daemon=debug`
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
    /// The configuration
    #[arg(short, long, env = "RUSHES_CONFIG", default_value = DEFAULT_CONFIG, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: PathBuf,
}

/// Which daemon is asked.
#[derive(Debug, Args)]
pub(crate) struct DaemonArg {
    /// Folder with the daemon's sockets; otherwise what the configuration says
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
    /// Print JSON; the names of its fields are promised
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Time between two pictures
    #[arg(long, default_value = "1s", value_parser = parse_period, value_name = "TIME")]
    pub(crate) interval: std::time::Duration,
    /// Print one picture and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Width of that one picture in columns
    #[arg(long, default_value_t = 120, value_name = "COLUMNS", requires = "once")]
    pub(crate) width: u16,
    /// Print one JSON object a picture instead
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AdmitArgs {
    #[command(flatten)]
    pub(crate) daemon: DaemonArg,
    /// Of one stream: 100M, 1.5G, 48k (bits a second)
    #[arg(long, value_parser = parse_bitrate, value_name = "RATE")]
    pub(crate) bitrate: u64,
    /// How many more streams
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) count: u32,
    /// A file or folder on the device that is meant; otherwise every device of a share is asked
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
    /// Measure reads only; writes are then concluded from them
    #[arg(long)]
    pub(crate) no_writes: bool,
    /// Where calibrations are kept; otherwise what the configuration says
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

/// The same, of what is done again and again.
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
    use clap::CommandFactory;

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
