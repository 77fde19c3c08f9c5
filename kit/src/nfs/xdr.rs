// SPDX-License-Identifier: Apache-2.0
//! The operations of a request as XDR (RFC 4506), and an answer that is being read.

use super::NfsError;

/// Operations of a request. Arguments follow the number of their operation.
#[derive(Clone, Debug, Default)]
pub struct Ops {
    pub(super) bytes: Vec<u8>,
    pub(super) numbers: Vec<u32>,
}

impl Ops {
    /// The next operation.
    pub fn op(mut self, number: u32) -> Ops {
        self.numbers.push(number);
        self.u32(number)
    }

    /// A number.
    pub fn u32(mut self, value: u32) -> Ops {
        self.bytes.extend(value.to_be_bytes());
        self
    }

    /// A longer number.
    pub fn u64(mut self, value: u64) -> Ops {
        self.bytes.extend(value.to_be_bytes());
        self
    }

    /// Bytes of a length that both sides know, which four divides.
    pub fn fixed(mut self, bytes: &[u8]) -> Ops {
        self.bytes.extend(bytes);
        self
    }

    /// A length, the bytes, and zeros up to four.
    pub fn opaque(self, bytes: &[u8]) -> Ops {
        let mut ops = self.u32(bytes.len() as u32).fixed(bytes);
        ops.bytes.resize(ops.bytes.len().next_multiple_of(4), 0);
        ops
    }

    /// Arguments that were built apart, as one opaque.
    pub fn wrapped(self, arguments: &Ops) -> Ops {
        self.opaque(&arguments.bytes)
    }

    /// The handle that the next operation is about.
    pub fn at(self, handle: &[u8]) -> Ops {
        self.op(super::PUTFH).opaque(handle)
    }
}

/// An answer that is being read.
#[derive(Debug)]
pub struct Answer {
    pub(super) bytes: Vec<u8>,
    pub(super) at: usize,
}

impl Answer {
    fn take(&mut self, count: usize) -> Result<&[u8], NfsError> {
        let found = self.bytes.get(self.at..self.at + count);
        self.at += count.next_multiple_of(4);
        found.ok_or_else(|| {
            NfsError::Broken("an answer of the NFS server is shorter than it says".to_owned())
        })
    }

    /// Bytes of a length that both sides know.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N], NfsError> {
        let mut found = [0; N];
        found.copy_from_slice(self.take(N)?);
        Ok(found)
    }

    /// A number.
    pub fn u32(&mut self) -> Result<u32, NfsError> {
        Ok(u32::from_be_bytes(self.fixed()?))
    }

    /// A longer number.
    pub fn u64(&mut self) -> Result<u64, NfsError> {
        Ok(u64::from_be_bytes(self.fixed()?))
    }

    /// Bytes behind their length.
    pub fn opaque(&mut self) -> Result<&[u8], NfsError> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    /// A bitmap is passed over.
    pub fn skip_bitmap(&mut self) -> Result<(), NfsError> {
        let words = self.u32()? as usize;
        self.take(4 * words).map(drop)
    }

    /// The next operation's result begins.
    pub fn op(&mut self, number: u32) -> Result<(), NfsError> {
        let found = self.u32()?;
        if found != number {
            return Err(NfsError::Broken(format!(
                "the NFS server answered operation {found}; expected {number}"
            )));
        }
        match self.u32()? {
            0 => Ok(()),
            status => Err(NfsError::Refused {
                operation: number,
                status,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: u32 = 25;
    const OPEN: u32 = 18;

    fn answer(ops: Ops) -> Answer {
        Answer {
            bytes: ops.bytes,
            at: 0,
        }
    }

    #[test]
    fn opaque_bytes_are_padded_to_four_and_read_back() {
        let ops = Ops::default().op(READ).opaque(b"abcde").u64(7);
        assert_eq!((ops.bytes.len(), ops.numbers.len()), (4 + 4 + 8 + 8, 1));
        let mut answer = answer(ops);
        assert_eq!(answer.u32().unwrap(), READ);
        assert_eq!(answer.opaque().unwrap(), b"abcde");
        assert_eq!(answer.u64().unwrap(), 7);
        assert!(answer.u32().is_err(), "there is no more");
    }

    #[test]
    fn a_refusal_names_its_status() {
        let error = answer(Ops::default().u32(OPEN).u32(13)).op(OPEN);
        let said = error.unwrap_err().to_string();
        assert_eq!(said, "the NFS server refused operation 18 with status 13");
    }

    #[test]
    fn an_answer_to_another_operation_is_broken() {
        let error = answer(Ops::default().u32(READ).u32(0)).op(OPEN);
        assert!(matches!(error, Err(NfsError::Broken(_))), "{error:?}");
    }
}
