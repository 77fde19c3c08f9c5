// SPDX-License-Identifier: Apache-2.0
//! Questions and answers, and how they become lines.

use crate::status::Status;
use serde::{Deserialize, Serialize};

/// Longest question the daemon reads. Units: bytes.
pub const ASK_BYTES_MAX: usize = 64 << 10;

/// Longest answer a client reads (ten thousand streams fit). Units: bytes.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Most streams in one admission question.
pub const ADMIT_COUNT_MAX: u32 = 10_000;

/// A question: `{"ask":"admit","bitrate":100000000,"count":2}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// The daemon's status.
    Status {},
    /// Could so many more streams get contracts?
    Admit {
        /// Units: bits a second, of one stream.
        bitrate: u64,
        /// How many such streams; 1..=[`ADMIT_COUNT_MAX`].
        count: u32,
        /// A path on the device; without it the answer is for every device with a share.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
    },
    /// Read the configuration again.
    Reload {},
    /// End cleanly.
    Stop {},
}

/// An answer: `{"answer":"status", …}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// To [`Ask::Status`].
    Status(Box<Status>),
    /// To [`Ask::Admit`].
    Admit(Admission),
    /// To [`Ask::Reload`] and [`Ask::Stop`]: the changes, in sentences.
    Done {
        /// One sentence each, also for settings that could not be changed.
        notes: Vec<String>,
    },
    /// It was not done.
    Error {
        /// A sentence: the value found, the value expected, the remedy.
        error: String,
    },
}

/// "Can I add two more?"
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    /// Yes on every device of the question.
    pub admitted: bool,
    /// Of one stream, as asked; bits a second.
    pub bitrate: u64,
    /// How many were asked for.
    pub count: u32,
    /// One for each device asked.
    pub devices: Vec<DeviceVerdict>,
}

/// The answer of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceVerdict {
    /// As in [`crate::DeviceStatus::name`].
    pub device: String,
    /// Names of the shares that lie on it.
    #[serde(default)]
    pub shares: Vec<String>,
    /// True: all of them fit.
    pub admitted: bool,
    /// The deciding reason, a sentence.
    pub reason: String,
    /// How many more of that bitrate could be added.
    pub more_count: u32,
    /// The rate that is left for contracts of that bitrate.
    pub left_bytes_per_s: u64,
    /// If no stream of that bitrate fits: the streams that fit at a lower one.
    #[serde(default)]
    pub lower: Option<LowerRate>,
    /// True when the device was never calibrated: the answer rests on a cautious guess.
    pub guessed_model: bool,
}

/// The streams that fit on a device at a bitrate below the one that was asked about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowerRate {
    /// The first that fits, of a half, a quarter, and so on. Units: bits a second.
    pub bitrate: u64,
    /// How many streams of it.
    pub count: u32,
    /// Their rates together.
    pub bytes_per_s: u64,
}

/// Read one question.
///
/// Errors   a sentence with the text that was read and the one expected
pub fn parse_ask(line: &str) -> Result<Ask, String> {
    let ask: Ask = serde_json::from_str(line.trim()).map_err(|error| {
        format!(
            "the daemon does not know this question: {error}; expected one JSON object a line, \
             such as {{\"ask\":\"status\"}}, \
             {{\"ask\":\"admit\",\"bitrate\":100000000,\"count\":2}}, {{\"ask\":\"reload\"}} or \
             {{\"ask\":\"stop\"}}"
        )
    })?;
    if let Ask::Admit { bitrate, count, .. } = &ask {
        if *bitrate == 0 {
            return Err(String::from(
                "bitrate is 0, expected the bits a second of one stream, such as 100000000",
            ));
        }
        if *count == 0 || *count > ADMIT_COUNT_MAX {
            return Err(format!(
                "count is {count}, expected 1 to {ADMIT_COUNT_MAX} streams"
            ));
        }
    }
    Ok(ask)
}

/// One line with its newline.
///
/// Errors   none: JSON can express these types; if one could not be, the line would be an error
/// answer
pub fn line_of<T: Serialize>(message: &T) -> String {
    let mut line = serde_json::to_string(message)
        .unwrap_or_else(|error| format!("{{\"answer\":\"error\",\"error\":\"{error}\"}}"));
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_survive_the_line() {
        for ask in [
            Ask::Status {},
            Ask::Admit {
                bitrate: 100_000_000,
                count: 2,
                path: None,
            },
            Ask::Admit {
                bitrate: 1,
                count: 1,
                path: Some(String::from("/srv/ünicode \"quoted\"")),
            },
            Ask::Reload {},
            Ask::Stop {},
        ] {
            assert_eq!(parse_ask(&line_of(&ask)), Ok(ask));
        }
        assert_eq!(line_of(&Ask::Status {}), "{\"ask\":\"status\"}\n");
    }

    #[test]
    fn bad_questions_get_a_sentence() {
        for (line, expect) in [
            ("", "does not know this question"),
            ("{}", "ask"),
            ("{\"ask\":\"dance\"}", "unknown variant `dance`"),
            ("{\"ask\":\"status\",\"x\":1}", "unknown field `x`"),
            (
                "{\"ask\":\"admit\",\"bitrate\":0,\"count\":1}",
                "bitrate is 0",
            ),
            (
                "{\"ask\":\"admit\",\"bitrate\":1,\"count\":0}",
                "count is 0",
            ),
            (
                "{\"ask\":\"admit\",\"bitrate\":1,\"count\":10001}",
                "count is 10001",
            ),
            (
                "{\"ask\":\"admit\",\"bitrate\":-1,\"count\":1}",
                "does not know this question",
            ),
        ] {
            let error = parse_ask(line).expect_err(line);
            assert!(error.contains(expect), "{line}: {error}");
        }
    }
}
