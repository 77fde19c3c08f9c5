// SPDX-License-Identifier: Apache-2.0
//! One SMB client led by the hand: a command a line, an answer a line, so that a test can
//! interleave several clients exactly. It is a program because libsmbclient keeps process-wide
//! state.
//!
//! `open r|rw|new NAME` → `ok FILE 0` · `read FILE OFFSET LENGTH` → `ok N N` and N bytes · `write
//! FILE OFFSET LENGTH` and LENGTH bytes → `ok N 0` · `close FILE` · `unlink NAME` · `rename NAME
//! NAME` · `size NAME` → `ok BYTES 0`. Failures are `err KIND: sentence`. Names hold no spaces.

use pavao::{SmbClient, SmbCredentials, SmbFile, SmbOpenOptions, SmbOptions};
use rushes_tests::words::explained;
use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};

type Answer = Result<(u64, Vec<u8>), Box<dyn std::error::Error>>;

const USAGE: &str = "\
One SMB client led by the hand: a command a line on standard input, an answer a line. Started by the tests.

smb-hand smb://HOST:PORT SHARE USER PASSWORD

open r|rw|new NAME          ok FILE 0
read FILE OFFSET LENGTH     ok N N, and N bytes
write FILE OFFSET LENGTH    and LENGTH bytes; ok N 0
close FILE
unlink NAME
rename NAME NAME
size NAME                   ok BYTES 0

What fails is answered with err KIND: sentence. Names hold no spaces.";

fn main() {
    if explained(USAGE) {
        return;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [server, share, user, password] = arguments.as_slice() else {
        eprintln!("usage: smb-hand smb://HOST:PORT SHARE USER PASSWORD; started by the tests");
        std::process::exit(2);
    };
    let credentials = SmbCredentials::default()
        .server(server)
        .share(format!("/{share}"))
        .username(user)
        .password(password)
        .workgroup("WORKGROUP");
    let options = SmbOptions::default()
        .no_auto_anonymous_login(true)
        .one_share_per_server(true);
    let client = match SmbClient::new(credentials, options) {
        Ok(client) => client,
        Err(error) => {
            println!("err client: {error}");
            return;
        }
    };
    let mut hand = Hand {
        client: &client,
        files: BTreeMap::new(),
        next: 0,
    };
    let mut input = io::stdin().lock();
    let mut line = String::new();
    loop {
        line.clear();
        if input.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = hand.obey(&words, &mut input);
        let mut out = io::stdout().lock();
        let sent = match answer {
            Ok((number, bytes)) => {
                writeln!(out, "ok {number} {}", bytes.len()).and_then(|()| out.write_all(&bytes))
            }
            Err(error) => writeln!(out, "err {}", error.to_string().replace('\n', " ")),
        };
        if sent.and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

struct Hand<'a> {
    client: &'a SmbClient,
    files: BTreeMap<u64, SmbFile<'a>>,
    next: u64,
}

impl Hand<'_> {
    fn obey(&mut self, words: &[&str], input: &mut impl Read) -> Answer {
        match words {
            ["open", how, name] => self.open(how, name),
            ["read", file, offset, length] => self.read(file, offset, length),
            ["write", file, offset, length] => {
                // Read the bytes from the pipe first, so that after a failure the next line is a
                // command.
                let mut bytes = vec![0; length.parse()?];
                input.read_exact(&mut bytes)?;
                self.write(file, offset, &bytes)
            }
            ["close", file] => {
                let file: u64 = file.parse()?;
                self.files.remove(&file).ok_or("no such file here")?;
                Ok((0, Vec::new()))
            }
            ["unlink", name] => {
                self.client.unlink(format!("/{name}"))?;
                Ok((0, Vec::new()))
            }
            ["rename", from, to] => {
                self.client.rename(format!("/{from}"), format!("/{to}"))?;
                Ok((0, Vec::new()))
            }
            ["size", name] => Ok((self.client.stat(format!("/{name}"))?.size, Vec::new())),
            _ => Err("no such command".into()),
        }
    }

    fn open(&mut self, how: &str, name: &str) -> Answer {
        let options = SmbOpenOptions::default().read(true);
        let options = match how {
            "r" => options,
            "rw" => options.write(true),
            "new" => options.write(true).create(true).truncate(true),
            _ => return Err("open r, rw or new".into()),
        };
        let file = self.client.open_with(format!("/{name}"), options)?;
        self.next += 1;
        self.files.insert(self.next, file);
        Ok((self.next, Vec::new()))
    }

    fn read(&mut self, file: &str, offset: &str, length: &str) -> Answer {
        let mut bytes = vec![0; length.parse()?];
        let file = find(&mut self.files, file)?;
        file.seek(SeekFrom::Start(offset.parse()?))?;
        let mut done = 0;
        while done < bytes.len() {
            match file.read(&mut bytes[done..])? {
                0 => break,
                count => done += count,
            }
        }
        bytes.truncate(done);
        Ok((done as u64, bytes))
    }

    fn write(&mut self, file: &str, offset: &str, bytes: &[u8]) -> Answer {
        let file = find(&mut self.files, file)?;
        file.seek(SeekFrom::Start(offset.parse()?))?;
        file.write_all(bytes)?;
        Ok((bytes.len() as u64, Vec::new()))
    }
}

fn find<'m, 'c>(
    files: &'m mut BTreeMap<u64, SmbFile<'c>>,
    number: &str,
) -> Result<&'m mut SmbFile<'c>, Box<dyn std::error::Error>> {
    let number: u64 = number.parse()?;
    Ok(files.get_mut(&number).ok_or("no such file here")?)
}
