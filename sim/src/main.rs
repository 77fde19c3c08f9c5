// SPDX-License-Identifier: Apache-2.0
//! The simulator's command line.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};
use rushes_sim::table5::Table5;

#[derive(Parser)]
#[command(name = "rushes-sim", about = "Plays the server in a simulated world.")]
struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The lab's figures on the disk of rt-Samba's Table 5.
    Table5(Table5),
}

fn main() {
    match Command::parse().what {
        What::Table5(table5) => table5.print(),
    }
}
