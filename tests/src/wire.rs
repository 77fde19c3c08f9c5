// SPDX-License-Identifier: Apache-2.0
//! The few requests of SMB 2.1 that no client here can send: file-system controls on an open file.
//!
//! Anonymous, and so without a signature or a password: the share needs `guest ok = yes` and the
//! file must be everybody's to write. Reading and writing are the affair of [`crate::hand`].

use crate::smbd::SHARE;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than anything but a hang takes.
const ANSWER_MAX: Duration = Duration::from_secs(30);

const NEGOTIATE: u16 = 0;
const SESSION_SETUP: u16 = 1;
const TREE_CONNECT: u16 = 3;
const CREATE: u16 = 5;
const IOCTL: u16 = 11;

const STATUS_PENDING: u32 = 0x0000_0103;
const STATUS_MORE_PROCESSING: u32 = 0xc000_0016;

const HEADER_BYTES: usize = 64;
/// Longest chunk of a server-side copy that smbd takes.
const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// A connection with the share.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    message: u64,
    session: u64,
    tree: u32,
}

/// A file opened over it; open until the connection ends.
#[derive(Clone, Copy, Debug)]
pub struct WireFile([u8; 16]);

impl Wire {
    /// Connect with the one share of the smbd at this port of 127.0.0.1.
    pub fn connect(port: u16) -> Wire {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("smbd answers");
        stream
            .set_read_timeout(Some(ANSWER_MAX))
            .expect("a bound above zero is taken");
        let mut wire = Wire {
            stream,
            message: 0,
            session: 0,
            tree: 0,
        };
        let negotiate = bytes(&[&u16s(&[36, 1, 1, 0]), &[0; 28], &u16s(&[0x0210])]);
        wire.must(NEGOTIATE, &negotiate);
        wire.log_in();
        let path = utf16(&format!("\\\\127.0.0.1\\{SHARE}"));
        let tree = bytes(&[&u16s(&[9, 0, 72, path.len() as u16]), &path]);
        let (header, _) = wire.must(TREE_CONNECT, &tree);
        wire.tree = u32_at(&header, 36);
        wire
    }

    /// Open an existing file for reading, writing and its attributes, sharing everything.
    pub fn open(&mut self, name: &str) -> WireFile {
        let name = utf16(name);
        let create = bytes(&[
            &u16s(&[57, 0]),
            &u32s(&[2, 0, 0, 0, 0]),
            // FILE_GENERIC_READ | FILE_GENERIC_WRITE, no attributes, share all, open, no options.
            &u32s(&[0x0012_019f, 0, 7, 1, 0]),
            &u16s(&[120, name.len() as u16]),
            &u32s(&[0, 0]),
            &name,
        ]);
        let (_, body) = self.must(CREATE, &create);
        WireFile(body[64..80].try_into().expect("sixteen bytes"))
    }

    /// FSCTL_SRV_COPYCHUNK: the server copies the first `length` bytes into an existing file.
    pub fn copy_chunks(&mut self, from: WireFile, to: WireFile, length: u64) {
        // FSCTL_SRV_REQUEST_RESUME_KEY
        let key = self.control(from, 0x0014_0078, &[]);
        let starts: Vec<u64> = (0..length).step_by(CHUNK_BYTES_MAX as usize).collect();
        let mut input = bytes(&[&key[..24], &u32s(&[starts.len() as u32, 0])]);
        for start in starts {
            let chunk = (length - start).min(CHUNK_BYTES_MAX) as u32;
            input.extend(bytes(&[&u64s(&[start, start]), &u32s(&[chunk, 0])]));
        }
        let output = self.control(to, 0x0014_40f2, &input);
        assert_eq!(u64::from(u32_at(&output, 8)), length, "bytes copied");
    }

    /// FSCTL_SET_SPARSE.
    pub fn set_sparse(&mut self, file: WireFile) {
        self.control(file, 0x0009_00c4, &[]);
    }

    /// FSCTL_SET_ZERO_DATA.
    pub fn zero(&mut self, file: WireFile, offset: u64, length: u64) {
        self.control(file, 0x0009_80c8, &u64s(&[offset, offset + length]));
    }

    fn control(&mut self, file: WireFile, code: u32, input: &[u8]) -> Vec<u8> {
        let ioctl = bytes(&[
            &u16s(&[57, 0]),
            &u32s(&[code]),
            &file.0,
            // Where the input is and how long, as few bytes of it back, then the same of the
            // output.
            &u32s(&[120, input.len() as u32, 0, 0, 0, 4096, 1, 0]),
            input,
        ]);
        let (_, body) = self.must(IOCTL, &ioctl);
        let start = (u32_at(&body, 32) as usize).saturating_sub(HEADER_BYTES);
        body[start..start + u32_at(&body, 36) as usize].to_vec()
    }

    /// NTLMSSP without a name.
    fn log_in(&mut self) {
        // Unicode, the server's name, NTLM with extended session security; and anonymous.
        const FLAGS: u32 = 0x0008_0205;
        const ANONYMOUS: u32 = 0x0800;
        let first = bytes(&[b"NTLMSSP\0", &u32s(&[1, FLAGS, 0, 32, 0, 32])]);
        let second = bytes(&[
            b"NTLMSSP\0",
            // Six fields, all empty, behind the message's own 64 bytes.
            &u32s(&[3, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64]),
            &u32s(&[FLAGS | ANONYMOUS]),
        ]);
        for (blob, wanted) in [(first, STATUS_MORE_PROCESSING), (second, 0)] {
            let setup = bytes(&[
                &u16s(&[25]),
                &[0, 1],
                &u32s(&[0, 0]),
                &u16s(&[88, blob.len() as u16]),
                &u64s(&[0]),
                &blob,
            ]);
            let (status, header, _) = self.ask(SESSION_SETUP, &setup);
            assert_eq!(status, wanted, "status {status:#x} of the login");
            self.session = u64_at(&header, 40);
        }
    }

    fn must(&mut self, command: u16, body: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (status, header, body) = self.ask(command, body);
        assert_eq!(status, 0, "status {status:#x} of SMB2 command {command}");
        (header, body)
    }

    /// Status, header and body of the answer.
    fn ask(&mut self, command: u16, body: &[u8]) -> (u32, Vec<u8>, Vec<u8>) {
        let request = bytes(&[
            b"\xfeSMB",
            &u16s(&[64, 1, 0, 0, command, 16]),
            &u32s(&[0, 0]),
            &u64s(&[self.message]),
            &u32s(&[0, self.tree]),
            &u64s(&[self.session]),
            &[0; 16],
            body,
        ]);
        self.message += 1;
        self.stream
            .write_all(&(request.len() as u32).to_be_bytes())
            .and_then(|()| self.stream.write_all(&request))
            .expect("smbd listens");
        loop {
            let mut length = [0; 4];
            self.stream.read_exact(&mut length).expect("smbd answers");
            let mut header = vec![0; u32::from_be_bytes(length) as usize];
            self.stream.read_exact(&mut header).expect("smbd answers");
            let body = header.split_off(HEADER_BYTES);
            let status = u32_at(&header, 8);
            if status != STATUS_PENDING {
                return (status, header, body);
            }
        }
    }
}

fn bytes(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
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

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
