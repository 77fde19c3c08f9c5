// SPDX-License-Identifier: Apache-2.0
//! The lab's commands and options, for completions: from `rushes-lab words` (`lab/src/words.rs`),
//! since `rushes` does not link the lab.

use clap::{Arg, ArgAction, Command, ValueHint};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub(crate) struct Words {
    name: String,
    about: String,
    options: Vec<Word>,
    commands: Vec<Words>,
}

#[derive(Debug, Deserialize)]
struct Word {
    long: Option<String>,
    short: Option<char>,
    name: String,
    help: String,
    takes_value: bool,
    values: Vec<String>,
    is_path: bool,
    may_repeat: bool,
}

/// clap needs names that live as long as the program, which ends when it has printed them.
fn kept(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

impl Words {
    pub(crate) fn read(text: &[u8]) -> Result<Words, String> {
        serde_json::from_slice(text).map_err(|error| error.to_string())
    }

    /// As a command of `rushes`, under the name `lab`.
    pub(crate) fn command(self) -> Command {
        let mut lab = self.below();
        lab.set_bin_name("rushes lab");
        lab.name("lab")
    }

    fn below(self) -> Command {
        let mut command = Command::new(kept(self.name)).about(kept(self.about));
        for word in self.options {
            // clap adds these to each command.
            if matches!(word.long.as_deref(), Some("help" | "version")) {
                continue;
            }
            command = command.arg(word.arg());
        }
        for words in self.commands {
            // This, too.
            if words.name != "help" {
                command = command.subcommand(words.below());
            }
        }
        command
    }
}

impl Word {
    fn arg(self) -> Arg {
        let mut arg = Arg::new(kept(self.name)).help(kept(self.help));
        if let Some(long) = self.long {
            arg = arg.long(kept(long));
        }
        if let Some(short) = self.short {
            arg = arg.short(short);
        }
        arg = arg.action(match (self.takes_value, self.may_repeat) {
            (false, _) => ArgAction::SetTrue,
            (true, false) => ArgAction::Set,
            (true, true) => ArgAction::Append,
        });
        if !self.values.is_empty() {
            let values: Vec<&'static str> = self.values.into_iter().map(kept).collect();
            arg = arg.value_parser(values);
        }
        match self.is_path {
            true => arg.value_hint(ValueHint::AnyPath),
            false => arg,
        }
    }
}
