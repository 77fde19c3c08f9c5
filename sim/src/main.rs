// SPDX-License-Identifier: Apache-2.0
//! The simulator's command line.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use rushes_sim::admission::Admission;
use rushes_sim::recording::Recording;
use rushes_sim::run::{Replay, Run};
use rushes_sim::table5::Table5;
use rushes_sim::torture::Torture;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "rushes-sim", about = "Plays the server in a simulated world.")]
struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// A scenario, with one seed or many.
    Run(Run),
    /// One run again.
    Replay(Replay),
    /// Many questions of admission, compared with an oracle.
    Admission(Admission),
    /// The lab's figures on the disk of rt-Samba's Table 5.
    Table5(Table5),
    /// Recordings on the same disk, from flags instead of a scenario.
    Record(Recording),
    /// Everything at once that may go wrong, for hours, with every byte followed.
    Torture(Torture),
}

/// A reader of the output may stop when it has seen enough (`| head`): that is no error, and no
/// work is left.
fn end_with_the_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let said = panic.payload().downcast_ref::<String>();
        // The text of println!.
        let is_it = |said: &String| {
            said.starts_with("failed printing to stdout") && said.contains("Broken pipe")
        };
        if said.is_some_and(is_it) {
            std::process::exit(0);
        }
        usual(panic);
    }));
}

fn main() -> ExitCode {
    end_with_the_reader();
    let result = match Command::parse().what {
        What::Run(run) => run.run(),
        What::Replay(replay) => replay.run(),
        What::Admission(admission) => Ok(admission.print()),
        What::Torture(torture) => torture.run(),
        What::Record(recording) => Ok(recording.print()),
        What::Table5(table5) => {
            table5.print();
            Ok(true)
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(sentence) => {
            eprintln!("rushes-sim: {sentence}");
            ExitCode::from(2)
        }
    }
}
