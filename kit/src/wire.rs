// SPDX-License-Identifier: Apache-2.0
//! The few requests of SMB 2.1 that no safe binding of libsmbclient can send: set the end of a
//! file, flush it, and the controls of an open file.
//!
//! Anonymous, and so without signature or password: the share then needs `guest ok = yes`, and the
//! file must be everybody's to write, or the share has `force user`. Reading and writing go over
//! libsmbclient.

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than anything but a hang takes: a server may reserve the whole file before it answers.
const ANSWER_MAX: Duration = Duration::from_secs(120);

const NEGOTIATE: u16 = 0;
const SESSION_SETUP: u16 = 1;
const TREE_CONNECT: u16 = 3;
const CREATE: u16 = 5;
const CLOSE: u16 = 6;
const FLUSH: u16 = 7;
const IOCTL: u16 = 11;
const SET_INFO: u16 = 17;

const FSCTL_SET_SPARSE: u32 = 0x0009_00c4;
const FSCTL_SET_ZERO_DATA: u32 = 0x0009_80c8;
const FSCTL_SRV_REQUEST_RESUME_KEY: u32 = 0x0014_0078;
const FSCTL_SRV_COPYCHUNK: u32 = 0x0014_40f2;

const STATUS_PENDING: u32 = 0x0000_0103;
const STATUS_MORE_PROCESSING: u32 = 0xc000_0016;
/// FileEndOfFileInformation.
const END_OF_FILE: u8 = 20;

const HEADER_BYTES: usize = 64;
/// No answer to these requests is near it. Units: bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Of the output of a control. Units: bytes.
const OUTPUT_BYTES_MAX: u32 = 4096;
/// Longest chunk of a server-side copy that smbd takes. Units: bytes.
const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// Make an existing file of the share so long. `path`: below the share, with slashes.
///
/// Errors   the server is not there, lets nobody in without a name, or refuses
pub fn set_end_of_file(port: u16, share: &str, path: &str, bytes: u64) -> Result<()> {
    let mut wire = Wire::connect(port, share)?;
    let file = wire.open(path)?;
    wire.set_end_of_file(file, bytes)?;
    wire.close(file)
}

/// Bring an existing file of the share to the disk, no matter which client wrote it.
///
/// Errors   the same
pub fn flush(port: u16, share: &str, path: &str) -> Result<()> {
    let mut wire = Wire::connect(port, share)?;
    let file = wire.open(path)?;
    wire.flush(file)?;
    wire.close(file)
}

/// A connection with a share.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    message: u64,
    session: u64,
    tree: u32,
}

/// A file opened over it; open until it is closed or the connection ends.
#[derive(Clone, Copy, Debug)]
pub struct WireFile([u8; 16]);

impl Wire {
    /// Connect with a share of the smbd at this port of 127.0.0.1.
    pub fn connect(port: u16, share: &str) -> Result<Wire> {
        let stream = TcpStream::connect(("127.0.0.1", port)).context("smbd does not answer")?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let mut wire = Wire {
            stream,
            message: 0,
            session: 0,
            tree: 0,
        };
        let negotiate = [&u16s(&[36, 1, 1, 0])[..], &[0; 28], &u16s(&[0x0210])].concat();
        wire.must(NEGOTIATE, &negotiate)?;
        wire.log_in()?;
        let path = utf16(&format!("\\\\127.0.0.1\\{share}"));
        let tree = [&u16s(&[9, 0, 72, path.len() as u16])[..], &path].concat();
        let (header, _) = wire.must(TREE_CONNECT, &tree)?;
        wire.tree = u32_at(&header, 36)?;
        Ok(wire)
    }

    /// NTLMSSP without a name.
    fn log_in(&mut self) -> Result<()> {
        // Unicode, the server's name, NTLM with extended session security; and anonymous.
        const FLAGS: u32 = 0x0008_0205;
        const ANONYMOUS: u32 = 0x0800;
        let first = [&b"NTLMSSP\0"[..], &u32s(&[1, FLAGS, 0, 32, 0, 32])].concat();
        // Six fields, all empty, behind the message's own 64 bytes.
        let empty = u32s(&[3, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64]);
        let second = [&b"NTLMSSP\0"[..], &empty, &u32s(&[FLAGS | ANONYMOUS])].concat();
        for (blob, wanted) in [(first, STATUS_MORE_PROCESSING), (second, 0)] {
            let setup = [
                &u16s(&[25])[..],
                &[0, 1],
                &u32s(&[0, 0]),
                &u16s(&[88, blob.len() as u16]),
                &u64s(&[0]),
                &blob,
            ]
            .concat();
            let (status, header, _) = self.ask(SESSION_SETUP, &setup)?;
            ensure!(
                status == wanted,
                "smbd accepts no guest (status {status:#x})"
            );
            self.session = u64::from_le_bytes(part(&header, 40)?);
        }
        Ok(())
    }

    /// Open an existing file for reading, writing and its attributes, sharing everything. `path`:
    /// below the share, with slashes.
    pub fn open(&mut self, path: &str) -> Result<WireFile> {
        let name = utf16(&path.replace('/', "\\"));
        let create = [
            &u16s(&[57, 0])[..],
            &u32s(&[2, 0, 0, 0, 0]),
            // FILE_GENERIC_READ | FILE_GENERIC_WRITE, no attributes, share all, open, no options.
            &u32s(&[0x0012_019f, 0, 7, 1, 0]),
            &u16s(&[120, name.len() as u16]),
            &u32s(&[0, 0]),
            &name,
        ]
        .concat();
        let (_, body) = self.must(CREATE, &create)?;
        part(&body, 64).map(WireFile)
    }

    /// Close it.
    pub fn close(&mut self, file: WireFile) -> Result<()> {
        let close = [&u16s(&[24, 0])[..], &u32s(&[0]), &file.0].concat();
        self.must(CLOSE, &close).map(drop)
    }

    /// Make it so long.
    pub fn set_end_of_file(&mut self, file: WireFile, bytes: u64) -> Result<()> {
        let set = [
            &u16s(&[33])[..],
            &[1, END_OF_FILE],
            &u32s(&[8]),
            &u16s(&[96, 0]),
            &u32s(&[0]),
            &file.0,
            &u64s(&[bytes]),
        ]
        .concat();
        self.must(SET_INFO, &set).map(drop)
    }

    /// Bring it to the disk.
    pub fn flush(&mut self, file: WireFile) -> Result<()> {
        let flush = [&u16s(&[24, 0])[..], &u32s(&[0]), &file.0].concat();
        self.must(FLUSH, &flush).map(drop)
    }

    /// FSCTL_SRV_COPYCHUNK: the server copies the first `length` bytes into an existing file.
    pub fn copy_chunks(&mut self, from: WireFile, to: WireFile, length: u64) -> Result<()> {
        let key: [u8; 24] = part(&self.control(from, FSCTL_SRV_REQUEST_RESUME_KEY, &[])?, 0)?;
        let starts: Vec<u64> = (0..length).step_by(CHUNK_BYTES_MAX as usize).collect();
        let mut input = [&key[..], &u32s(&[starts.len() as u32, 0])].concat();
        for start in starts {
            let chunk = (length - start).min(CHUNK_BYTES_MAX) as u32;
            input.extend(u64s(&[start, start]));
            input.extend(u32s(&[chunk, 0]));
        }
        let copied = u32_at(&self.control(to, FSCTL_SRV_COPYCHUNK, &input)?, 8)?;
        ensure!(
            u64::from(copied) == length,
            "smbd copied {copied} bytes of {length}"
        );
        Ok(())
    }

    /// FSCTL_SET_SPARSE.
    pub fn set_sparse(&mut self, file: WireFile) -> Result<()> {
        self.control(file, FSCTL_SET_SPARSE, &[]).map(drop)
    }

    /// FSCTL_SET_ZERO_DATA.
    pub fn zero(&mut self, file: WireFile, offset: u64, length: u64) -> Result<()> {
        let range = u64s(&[offset, offset + length]);
        self.control(file, FSCTL_SET_ZERO_DATA, &range).map(drop)
    }

    /// The output of a control of an open file.
    fn control(&mut self, file: WireFile, code: u32, input: &[u8]) -> Result<Vec<u8>> {
        let ioctl = [
            &u16s(&[57, 0])[..],
            &u32s(&[code]),
            &file.0,
            // Where the input is and how long, as few bytes of it back, then the same of the
            // output.
            &u32s(&[120, input.len() as u32, 0, 0, 0, OUTPUT_BYTES_MAX, 1, 0]),
            input,
        ]
        .concat();
        let (_, body) = self.must(IOCTL, &ioctl)?;
        let start = (u32_at(&body, 32)? as usize).saturating_sub(HEADER_BYTES);
        let length = u32_at(&body, 36)? as usize;
        let output = body.get(start..start + length);
        Ok(output.context(TOO_SHORT)?.to_vec())
    }

    fn must(&mut self, command: u16, body: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
        let (status, header, body) = self.ask(command, body)?;
        if status != 0 {
            bail!("smbd answered SMB2 command {command} with status {status:#x}");
        }
        Ok((header, body))
    }

    /// Status, header and body of the answer.
    fn ask(&mut self, command: u16, body: &[u8]) -> Result<(u32, Vec<u8>, Vec<u8>)> {
        let request = [
            &b"\xfeSMB"[..],
            &u16s(&[64, 1, 0, 0, command, 16]),
            &u32s(&[0, 0]),
            &u64s(&[self.message]),
            &u32s(&[0, self.tree]),
            &u64s(&[self.session]),
            &[0; 16],
            body,
        ]
        .concat();
        self.message += 1;
        self.stream
            .write_all(&(request.len() as u32).to_be_bytes())?;
        self.stream.write_all(&request)?;
        loop {
            let mut length = [0; 4];
            self.stream.read_exact(&mut length)?;
            let length = u32::from_be_bytes(length) as usize;
            ensure!(
                (HEADER_BYTES..=ANSWER_BYTES_MAX).contains(&length),
                "smbd answered with {length} bytes"
            );
            let mut header = vec![0; length];
            self.stream.read_exact(&mut header)?;
            let body = header.split_off(HEADER_BYTES);
            let status = u32_at(&header, 8)?;
            if status != STATUS_PENDING {
                return Ok((status, header, body));
            }
        }
    }
}

const TOO_SHORT: &str = "an answer of smbd is too short";

fn part<const LENGTH: usize>(bytes: &[u8], at: usize) -> Result<[u8; LENGTH]> {
    bytes
        .get(at..at + LENGTH)
        .and_then(|part| part.try_into().ok())
        .context(TOO_SHORT)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(part(bytes, at)?))
}

fn u16s(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn u64s(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Text as SMB has it.
pub fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_answer_is_an_error() {
        assert_eq!(u32_at(&[0, 1, 0, 0, 0], 1).unwrap(), 1);
        let said = u32_at(&[0; 4], 1).unwrap_err().to_string();
        assert_eq!(said, TOO_SHORT);
    }

    #[test]
    fn numbers_and_text_are_little_endian() {
        assert_eq!(u16s(&[1, 0x0203]), [1, 0, 3, 2]);
        assert_eq!(u64s(&[1]), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(utf16("aß"), [b'a', 0, 0xdf, 0]);
    }
}
