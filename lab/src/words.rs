// SPDX-License-Identifier: Apache-2.0
//! Every word that the lab understands, as JSON, for `rushes completions`: `rushes` does not link
//! the lab.
//!
//! Its reader is `cli/src/lab_words.rs`.

use clap::{Arg, Command, ValueHint};
use serde::Serialize;

/// A command.
#[derive(Debug, Serialize)]
pub struct Words {
    name: String,
    about: String,
    options: Vec<Word>,
    commands: Vec<Words>,
}

/// An option or a positional argument.
#[derive(Debug, Serialize)]
struct Word {
    /// `None`: it is positional.
    long: Option<String>,
    short: Option<char>,
    /// Its name in help.
    name: String,
    help: String,
    takes_value: bool,
    /// All values that it takes; empty: any.
    values: Vec<String>,
    is_path: bool,
    may_repeat: bool,
}

/// The words of a command and those below it, without the hidden ones for the lab itself.
pub fn of(command: &Command) -> Words {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let below = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    Words {
        name: command.get_name().to_owned(),
        about: (command.get_about()).map_or_else(String::new, ToString::to_string),
        options: shown.map(word).collect(),
        commands: below.map(of).collect(),
    }
}

fn word(arg: &Arg) -> Word {
    let takes_value = arg.get_action().takes_values();
    let values = match takes_value {
        true => arg.get_possible_values(),
        false => Vec::new(),
    };
    let paths = [
        ValueHint::AnyPath,
        ValueHint::FilePath,
        ValueHint::DirPath,
        ValueHint::ExecutablePath,
    ];
    let many = arg
        .get_num_args()
        .is_some_and(|count| count.max_values() > 1);
    Word {
        long: arg.get_long().map(str::to_owned),
        short: arg.get_short(),
        name: arg.get_id().to_string(),
        help: (arg.get_help()).map_or_else(String::new, ToString::to_string),
        takes_value,
        values: values
            .iter()
            .map(|value| value.get_name().to_owned())
            .collect(),
        is_path: paths.contains(&arg.get_value_hint()),
        may_repeat: many || matches!(arg.get_action(), clap::ArgAction::Append),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_option_that_help_shows_is_among_the_words() {
        let mut command = crate::cli::Cli::command();
        command.build();
        let words = of(&command);
        let find = |name: &str| {
            let found = words.commands.iter().find(|words| words.name == name);
            found.unwrap_or_else(|| panic!("{name}"))
        };
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let words = find(sub.get_name());
            let help = sub.clone().render_long_help().to_string();
            let told = help.lines().filter_map(|line| {
                let line = line.trim_start();
                let from = line.find("--")?;
                // An option's own line, not a word of its description.
                let is_own = from == 0 || line.starts_with('-');
                let end = line[from..].find([' ', '=', '[', ',']);
                is_own.then(|| line[from..].split_at(end.unwrap_or(line.len() - from)).0)
            });
            for option in told {
                let option = option.trim_start_matches("--");
                let is_known = |word: &Word| word.long.as_deref() == Some(option);
                assert!(
                    words.options.iter().any(is_known),
                    "{}: --{option}",
                    words.name
                );
            }
        }
        let play = find("play");
        let server = play
            .options
            .iter()
            .find(|word| word.long.as_deref() == Some("server"));
        assert!(server.is_some_and(|word| word.values.iter().any(|value| value == "stock")));
        assert!(words.commands.iter().all(|words| words.name != "player"));
    }
}
