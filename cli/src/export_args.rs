// SPDX-License-Identifier: Apache-2.0
//! The words of `rushes pool export`: part of the table in `args.rs`.

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use rushes_daemon::config::amount;
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Serve a mounted pool, or a folder in it, by NFS (NFS-Ganesha)
    #[command(after_help = "\
Stays in the foreground and ends with SIGTERM or SIGINT. It is stopped while the pool's mount is away and started again with it: clients \
wait. Clients mount it by `mount -t nfs -o vers=4.2,proto=tcp,port=PORT SERVER:NAME /mnt`. Exit code: 0 it was told to end, 2 it could not \
be served, or ganesha.nfsd ended.

Without --listen and --client it is for this machine alone. NFS trusts the user ids that a client sends, so clients have to use ports that \
only root may use: Linux does, macOS with its mount option resvport; --any-port accepts any. Needs the Debian packages nfs-ganesha and \
nfs-ganesha-vfs.")]
    Nfs(ExportNfsArgs),
    /// Serve a file in a mounted pool as a disk, by iSCSI (tgt)
    #[command(after_help = "\
Stays in the foreground and ends with SIGTERM or SIGINT. It is stopped while the pool's mount is away and started again with it: \
initiators log in again by themselves. Exit code: 0 it was told to end, 2 it could not be served, or tgtd ended.

--client or --initiator has to be given. There are no passwords: whoever can log in reads and writes the whole disk, whatever its file system says of \
users. With --client 127.0.0.1 that is each user of this machine. Without --listen nobody else can. A disk has one client at a time unless its file system is made for \
more. Needs the Debian package tgt.")]
    Iscsi(ExportIscsiArgs),
}

/// The rights that the users of NFS clients have.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SquashArg {
    /// Users keep the ids that the client sends; root becomes nobody
    Root,
    /// All users become the user of --anonymous
    All,
    /// Users keep the ids that the client sends, root too
    None,
}

#[derive(Debug, Args)]
pub(crate) struct ExportNfsArgs {
    /// Where the pool is mounted, or a folder in it
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) folder: PathBuf,
    /// Clients that may mount it: an address, a network such as 192.168.7.0/24, or a host's name;
    /// may be repeated
    #[arg(long = "client", value_name = "CLIENT")]
    pub(crate) clients: Vec<String>,
    /// The address of this machine to listen on
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub(crate) listen: IpAddr,
    /// TCP port
    #[arg(long, default_value_t = 2049, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// The name that clients mount; otherwise the folder's own name
    #[arg(long, value_name = "/NAME")]
    pub(crate) name: Option<String>,
    /// Clients may only read
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Accept clients from any port: then any user of a client, or here on loopback, can claim to
    /// be another user
    #[arg(long)]
    pub(crate) any_port: bool,
    /// The rights that users have
    #[arg(long, value_enum, default_value = "root", value_name = "WHO")]
    pub(crate) squash: SquashArg,
    /// User and group that root becomes, or all users with `--squash all`
    #[arg(long, value_name = "UID:GID", value_parser = parse_ids)]
    pub(crate) anonymous: Option<(u32, u32)>,
    /// NFSv3 as well, for clients without NFSv4; needs rpcbind, and v3 clients do not see each
    /// other's locks
    #[arg(long)]
    pub(crate) v3: bool,
    /// With --v3: TCP port of the mount protocol
    #[arg(long, default_value_t = 20048, value_name = "PORT", requires = "v3", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) mount_port: u16,
    /// Seconds that clients have after a restart to claim the files they had open, before others
    /// may open
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(2..=180))]
    pub(crate) grace: u32,
    /// Folder for configuration and process id; otherwise /run/rushes/nfs-NAME-ID, ID being of pool
    /// and folder
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Folder for data that must outlive a reboot: which clients had files open; otherwise
    /// /var/lib/rushes/nfs-NAME-ID
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Print Ganesha's configuration and its command line, and start nothing
    #[arg(long)]
    pub(crate) print: bool,
    /// Print JSON, one line each time clients are answered or have to wait
    #[arg(long, conflicts_with = "print")]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportIscsiArgs {
    /// A file in a mounted pool
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
    /// Create the file, of this size (512GB, 2TiB), if it does not exist yet
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<u64>,
    /// With --size: take room only as the file is written. A full pool then gives disk errors
    #[arg(long, requires = "size")]
    pub(crate) sparse: bool,
    /// Clients that may log in: an address, or a network such as 192.168.7.0/24; may be
    /// repeated
    #[arg(long = "client", value_name = "CLIENT")]
    pub(crate) clients: Vec<String>,
    /// Clients that may log in, instead of --client: the initiator's name (iqn.…), which any
    /// client can claim; may be repeated
    #[arg(long = "initiator", value_name = "IQN")]
    pub(crate) initiators: Vec<String>,
    /// The address of this machine to listen on
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub(crate) listen: IpAddr,
    /// TCP port
    #[arg(long, default_value_t = 3260, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Name of the target; otherwise iqn.2026-01.local.rushes: and the file's name. Two disks need
    /// two
    #[arg(long, value_name = "IQN")]
    pub(crate) target: Option<String>,
    /// Clients may only read
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Folder for tgtd's socket; otherwise /run/rushes/iscsi-NAME-ID, ID being of pool and file
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Print the commands that do the same, and start nothing; the file has to exist
    #[arg(long, conflicts_with = "size")]
    pub(crate) print: bool,
    /// Print JSON, one line each time clients are answered or have to wait
    #[arg(long, conflicts_with = "print")]
    pub(crate) json: bool,
}

fn parse_ids(text: &str) -> Result<(u32, u32), String> {
    text.split_once(':')
        .and_then(|(user, group)| Some((user.parse().ok()?, group.parse().ok()?)))
        .ok_or_else(|| String::from("expected two numbers: UID:GID"))
}

fn parse_size(text: &str) -> Result<u64, String> {
    amount::parse_size(text)
        .ok_or_else(|| String::from("expected a size such as 512GB, 2TiB or a number of bytes"))
}
