// SPDX-License-Identifier: Apache-2.0
//! Extended attributes by NFSv4.2 (RFC 8276), for which a client needs a session (RFC 8881);
//! nothing else of them.

use super::{Handle, Nfs4, Status};
use rushes_kit::nfs::{Answer, NO_CALLBACK, Nfs, Ops, PUTFH};

const EXCHANGE_ID: u32 = 42;
const CREATE_SESSION: u32 = 43;
const SEQUENCE: u32 = 53;
const GETXATTR: u32 = 72;
const SETXATTR: u32 = 73;
const LISTXATTRS: u32 = 74;
const REMOVEXATTR: u32 = 75;

/// A client with a session.
#[derive(Debug)]
pub struct Extended {
    nfs: Nfs,
    session: [u8; 16],
    sequence: u32,
}

impl Extended {
    /// Connect as the client of this name. `Err`: the server knows no NFSv4.2.
    pub fn connect(port: u16, name: &str) -> Result<Extended, Status> {
        let mut nfs = Nfs4::connect_from([127, 0, 0, 1].into(), port).nfs;
        nfs.set_minor(2);
        let ops = Ops::default()
            .op(EXCHANGE_ID)
            .u64(1)
            .opaque(name.as_bytes())
            // No flags, no protection of states, nothing about ourselves.
            .u32(0)
            .u32(0)
            .u32(0);
        let mut answer = nfs.result_of(&ops)?;
        let (client, sequence) = (answer.u64()?, answer.u32()?);
        let channel = |ops: Ops| {
            [0, 1 << 20, 1 << 20, 4096, 16, 1, 0]
                .into_iter()
                .fold(ops, Ops::u32)
        };
        let ops = Ops::default()
            .op(CREATE_SESSION)
            .u64(client)
            .u32(sequence)
            .u32(0);
        // Called back by nobody: one flavour, which is none.
        let ops = channel(channel(ops)).u32(NO_CALLBACK).u32(1).u32(0);
        let session = nfs.result_of(&ops)?.fixed()?;
        Ok(Extended {
            nfs,
            session,
            sequence: 0,
        })
    }

    fn at(&mut self, handle: &Handle) -> Ops {
        self.sequence += 1;
        Ops::default()
            .op(SEQUENCE)
            .fixed(&self.session)
            .u32(self.sequence)
            .u32(0)
            .u32(0)
            .u32(0)
            .at(handle)
    }

    fn asked(&mut self, ops: &Ops, operation: u32) -> Result<Answer, Status> {
        let mut answer = self.nfs.ask(ops)?;
        answer.op(SEQUENCE)?;
        // Of the session: its id, and five numbers.
        answer.fixed::<36>()?;
        answer.op(PUTFH)?;
        answer.op(operation)?;
        Ok(answer)
    }

    /// Value of an attribute.
    pub fn get(&mut self, handle: &Handle, name: &str) -> Result<Vec<u8>, Status> {
        let ops = self.at(handle).op(GETXATTR).opaque(name.as_bytes());
        Ok(self.asked(&ops, GETXATTR)?.opaque()?.to_vec())
    }

    /// Make or replace one.
    pub fn set(&mut self, handle: &Handle, name: &str, value: &[u8]) -> Result<(), Status> {
        let ops = self.at(handle).op(SETXATTR).u32(0);
        let ops = ops.opaque(name.as_bytes()).opaque(value);
        self.asked(&ops, SETXATTR).map(drop)
    }

    /// Take one away.
    pub fn remove(&mut self, handle: &Handle, name: &str) -> Result<(), Status> {
        let ops = self.at(handle).op(REMOVEXATTR).opaque(name.as_bytes());
        self.asked(&ops, REMOVEXATTR).map(drop)
    }

    /// Names of all of them.
    pub fn names(&mut self, handle: &Handle) -> Result<Vec<String>, Status> {
        let ops = self.at(handle).op(LISTXATTRS).u64(0).u32(65_536);
        let mut answer = self.asked(&ops, LISTXATTRS)?;
        let _cookie = answer.u64()?;
        let count = answer.u32()?;
        let name = |_| Ok(String::from_utf8_lossy(answer.opaque()?).into_owned());
        (0..count).map(name).collect()
    }
}
