// SPDX-License-Identifier: Apache-2.0
//! How a client of the lab reaches files: over SMB with libsmbclient, as many programs do; over NFS
//! with a small client of our own; on the mount itself; through the daemon's own client library; or
//! on the disk past every cache.
//!
//! One process has one door: libsmbclient keeps state for the whole process, so clients are
//! processes.

use crate::clients::direct::DirectFile;
use crate::clients::nfs::{Nfs, NfsFile};
use anyhow::{Context, Result, anyhow, bail, ensure};
use pavao::{SmbClient, SmbCredentials, SmbFile, SmbOpenOptions, SmbOptions};
use rushes_shm::Connect;
use rushes_shm::client::{Client, FileHandle, ReadError};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer than a run ever waits for a server that has collapsed.
const SMB_TIMEOUT: Duration = Duration::from_secs(120);

const READS_ONLY: &str = "the lab only reads on the disk itself";

/// Where the files are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Address {
    /// A share of an SMB server on this machine.
    Smb {
        /// TCP port on 127.0.0.1.
        port: u16,
        /// Name of the share.
        share: String,
        /// Name of the user.
        user: String,
        /// The user's password.
        password: String,
        /// Home folder of the client, so that no settings of a real user leak into the measurement.
        home: PathBuf,
    },
    /// An NFS export of this machine.
    Nfs {
        /// TCP port on 127.0.0.1.
        port: u16,
        /// Its name.
        export: String,
    },
    /// A folder.
    Local(PathBuf),
    /// A folder of the server's own file system, read with O_DIRECT; absolute paths are taken as
    /// they are.
    Disk(PathBuf),
    /// A folder that Rushes serves to programs on its own machine.
    Rushes {
        /// The folder.
        root: PathBuf,
        /// The daemon's session socket.
        socket: PathBuf,
        /// The daemon's name for the folder.
        share: String,
    },
}

/// A connected client.
pub enum Door {
    /// Over SMB.
    Smb(SmbClient),
    /// Over NFS.
    Nfs(Box<RefCell<Nfs>>),
    /// By system calls on the mount.
    Local(PathBuf),
    /// By direct reads.
    Disk(PathBuf),
    /// The daemon's own client library. Its session belongs to one thread.
    Rushes {
        /// The folder.
        root: PathBuf,
        /// The session.
        session: Box<RefCell<Client>>,
    },
}

/// A file that was opened through a [`Door`].
pub enum Opened<'a> {
    /// Over SMB; libsmbclient reads at a position of its own.
    Smb {
        /// Handle.
        file: SmbFile<'a>,
        /// The place at which libsmbclient would read next. Units: bytes.
        position: u64,
    },
    /// Over NFS.
    Nfs {
        /// The connection.
        nfs: &'a RefCell<Nfs>,
        /// Handle and state.
        file: NfsFile,
    },
    /// On the mount.
    Local(File),
    /// On the disk.
    Disk(DirectFile),
    /// Through the daemon, or on the mount where it does not serve the file.
    Rushes(Served<'a>),
}

/// A file that is open at the daemon; dropping it closes it there.
pub struct Served<'a> {
    session: &'a RefCell<Client>,
    handle: Option<FileHandle>,
    file: File,
}

/// Creates or empties a file and opens it for writing.
fn new_by_smb<'a>(client: &'a SmbClient, path: &str) -> pavao::SmbResult<SmbFile<'a>> {
    let options = SmbOpenOptions::default()
        .write(true)
        .create(true)
        .truncate(true);
    client.open_with(format!("/{path}"), options)
}

impl Served<'_> {
    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        if let Some(handle) = self.handle {
            match self.session.borrow_mut().read(handle, buffer, offset) {
                Ok(got) => return Ok(got),
                Err(ReadError::Errno(errno)) => {
                    return Err(std::io::Error::from_raw_os_error(errno as i32));
                }
                Err(ReadError::Plain) => {}
            }
        }
        self.file.read_at(buffer, offset)
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.session.borrow_mut().close(handle);
        }
    }
}

impl Door {
    /// Connect and authenticate.
    ///
    /// Errors   the server cannot be reached or refuses us
    pub fn connect(address: &Address) -> Result<Door> {
        match address {
            Address::Local(root) => {
                ensure!(root.is_dir(), "{} is not a folder", root.display());
                Ok(Door::Local(root.clone()))
            }
            Address::Disk(root) => {
                ensure!(root.is_dir(), "{} is not a folder", root.display());
                Ok(Door::Disk(root.clone()))
            }
            Address::Nfs { port, export } => {
                let nfs = Nfs::connect(*port, export)?;
                Ok(Door::Nfs(Box::new(RefCell::new(nfs))))
            }
            Address::Rushes {
                root,
                socket,
                share,
            } => {
                let who = Connect {
                    door: rushes_core::format::door::LOCAL,
                    share: share.clone(),
                    user: "lab".to_owned(),
                    client: "lab".to_owned(),
                    ..Connect::default()
                };
                let session = Client::connect(socket, &who)
                    .map_err(|error| anyhow!("the daemon refused the session: {error:?}"))?;
                Ok(Door::Rushes {
                    root: root.clone(),
                    session: Box::new(RefCell::new(session)),
                })
            }
            Address::Smb {
                port,
                share,
                user,
                password,
                ..
            } => {
                let credentials = SmbCredentials::default()
                    .server(format!("smb://127.0.0.1:{port}"))
                    .share(format!("/{share}"))
                    .username(user)
                    .password(password)
                    .workgroup("WORKGROUP");
                let options = SmbOptions::default()
                    .case_sensitive(true)
                    .one_share_per_server(true)
                    .no_auto_anonymous_login(true);
                let client = SmbClient::new(credentials, options)
                    .context("libsmbclient could not be set up")?;
                client.set_timeout(SMB_TIMEOUT)?;
                // libsmbclient connects at the first call; a player's first frame must not pay for
                // that.
                client.stat("/").with_context(|| {
                    format!("share {share} on 127.0.0.1:{port} refused the connection")
                })?;
                Ok(Door::Smb(client))
            }
        }
    }

    /// Open a file below the share for reading, with `write` for writing too.
    pub fn open(&self, path: &str, write: bool) -> Result<Opened<'_>> {
        let describe = || format!("{path} cannot be opened");
        match self {
            Door::Smb(client) => {
                let options = SmbOpenOptions::default().read(true).write(write);
                let file = client
                    .open_with(format!("/{path}"), options)
                    .with_context(describe)?;
                Ok(Opened::Smb { file, position: 0 })
            }
            Door::Nfs(nfs) => {
                ensure!(!write, "over NFS the lab writes new files only");
                let file = nfs.borrow_mut().open(path).with_context(describe)?;
                Ok(Opened::Nfs { nfs, file })
            }
            Door::Local(root) => {
                let file = fs::OpenOptions::new()
                    .read(true)
                    .write(write)
                    .open(root.join(path))
                    .with_context(describe)?;
                Ok(Opened::Local(file))
            }
            Door::Disk(root) => {
                ensure!(!write, "{READS_ONLY}");
                let path = root.join(path);
                let file = DirectFile::open(&path).with_context(|| {
                    format!(
                        "{} cannot be opened with O_DIRECT; expected a file system with direct I/O, such as ext4 or XFS: \
                         leave direct readers out, or give another --disk",
                        path.display()
                    )
                })?;
                Ok(Opened::Disk(file))
            }
            Door::Rushes { root, session } => {
                // Writes would go to the file, and this client does not report them to the daemon.
                ensure!(!write, "the lab only reads through the daemon itself");
                let file = File::open(root.join(path)).with_context(describe)?;
                let handle = session.borrow_mut().open(&file, path.as_bytes());
                Ok(Opened::Rushes(Served {
                    session,
                    handle,
                    file,
                }))
            }
        }
    }

    /// Create or empty a file and open it for writing.
    pub fn open_new(&self, path: &str) -> Result<Opened<'_>> {
        let describe = || format!("{path} cannot be created");
        match self {
            Door::Smb(client) => {
                let file = new_by_smb(client, path).with_context(describe)?;
                Ok(Opened::Smb { file, position: 0 })
            }
            Door::Local(root) => {
                let file = File::create(root.join(path)).with_context(describe)?;
                Ok(Opened::Local(file))
            }
            Door::Rushes { .. } => bail!("the lab only reads through the daemon itself"),
            Door::Disk(_) => bail!("{READS_ONLY}"),
            Door::Nfs(nfs) => {
                let file = nfs.borrow_mut().open_new(path).with_context(describe)?;
                Ok(Opened::Nfs { nfs, file })
            }
        }
    }

    /// Create or empty a file and write `content` into it.
    pub fn create(&self, path: &str, content: &[u8]) -> Result<()> {
        let describe = || format!("{path} cannot be created");
        match self {
            Door::Smb(client) => {
                let mut file = new_by_smb(client, path).with_context(describe)?;
                file.write_all(content).with_context(describe)
            }
            Door::Nfs(_) => bail!("over NFS the lab only plays and records"),
            Door::Disk(_) => bail!("{READS_ONLY}"),
            Door::Local(root) | Door::Rushes { root, .. } => {
                fs::write(root.join(path), content).with_context(describe)
            }
        }
    }

    /// Size of a file. Units: bytes.
    pub fn stat(&self, path: &str) -> Result<u64> {
        let describe = || format!("{path} cannot be looked up");
        match self {
            Door::Smb(client) => Ok(client.stat(format!("/{path}")).with_context(describe)?.size),
            Door::Nfs(_) => bail!("over NFS the lab only plays and records"),
            Door::Local(root) | Door::Disk(root) | Door::Rushes { root, .. } => {
                Ok(fs::metadata(root.join(path)).with_context(describe)?.len())
            }
        }
    }

    /// List a folder with sizes and times, as a file browser does; returns the number of entries.
    pub fn list(&self, path: &str) -> Result<usize> {
        let describe = || format!("{path} cannot be listed");
        match self {
            Door::Smb(client) => Ok(client
                .list_dirplus(format!("/{path}"))
                .with_context(describe)?
                .len()),
            Door::Nfs(_) => bail!("over NFS the lab only plays and records"),
            Door::Local(root) | Door::Disk(root) | Door::Rushes { root, .. } => {
                let mut count = 0;
                for entry in fs::read_dir(root.join(path)).with_context(describe)? {
                    entry?.metadata()?;
                    count += 1;
                }
                Ok(count)
            }
        }
    }

    /// Remove a file.
    pub fn remove(&self, path: &str) -> Result<()> {
        let describe = || format!("{path} cannot be removed");
        match self {
            Door::Smb(client) => client.unlink(format!("/{path}")).with_context(describe),
            Door::Nfs(_) => bail!("over NFS the lab only plays and records"),
            Door::Disk(_) => bail!("{READS_ONLY}"),
            Door::Local(root) | Door::Rushes { root, .. } => {
                fs::remove_file(root.join(path)).with_context(describe)
            }
        }
    }
}

impl Opened<'_> {
    /// Fill `buffer` from `offset` on; returns the number of bytes before the end of the file.
    pub fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let got = match self {
                Opened::Local(file) => file.read_at(&mut buffer[done..], at)?,
                Opened::Disk(file) => file.read_at(&mut buffer[done..], at)?,
                Opened::Rushes(file) => file.read_at(&mut buffer[done..], at)?,
                Opened::Nfs { nfs, file } => {
                    nfs.borrow_mut().read(file, &mut buffer[done..], at)?
                }
                Opened::Smb { file, position } => {
                    if *position != at {
                        file.seek(SeekFrom::Start(at))?;
                    }
                    let got = file.read(&mut buffer[done..])?;
                    *position = at + got as u64;
                    got
                }
            };
            if got == 0 {
                break;
            }
            done += got;
        }
        Ok(done)
    }

    /// Give a file of the mount this size; over SMB see [`rushes_kit::wire`].
    pub fn set_len(&mut self, bytes: u64) -> Result<()> {
        match self {
            Opened::Local(file) => Ok(file.set_len(bytes)?),
            Opened::Disk(_) | Opened::Rushes(_) | Opened::Smb { .. } | Opened::Nfs { .. } => {
                bail!("this door cannot extend a file")
            }
        }
    }

    /// Close a written file. Over NFS its bytes are on stable storage then, as with the kernel's
    /// client.
    ///
    /// Errors   over NFS alone: the other doors report none
    pub fn finish(self) -> Result<()> {
        if let Opened::Nfs { nfs, file } = self {
            nfs.borrow_mut().commit(&file)?;
            nfs.borrow_mut().close(&file)?;
        }
        Ok(())
    }

    /// Write all of `content` at `offset`.
    pub fn write_at(&mut self, content: &[u8], offset: u64) -> Result<()> {
        match self {
            Opened::Local(file) => file.write_all_at(content, offset)?,
            Opened::Rushes(_) => bail!("the lab only reads through the daemon itself"),
            Opened::Disk(_) => bail!("{READS_ONLY}"),
            Opened::Nfs { nfs, file } => {
                let mut done = 0;
                while done < content.len() {
                    let at = offset + done as u64;
                    done += nfs.borrow_mut().write(file, &content[done..], at)?;
                }
            }
            Opened::Smb { file, position } => {
                if *position != offset {
                    file.seek(SeekFrom::Start(offset))?;
                }
                file.write_all(content)?;
                *position = offset + content.len() as u64;
            }
        }
        Ok(())
    }
}

/// A home folder for SMB clients whose settings are Samba's defaults.
pub fn client_home(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join(".smb"))?;
    let text = "[global]\n    disable netbios = yes\n    name resolve order = host\n";
    fs::write(folder.join(".smb/smb.conf"), text)?;
    Ok(())
}
