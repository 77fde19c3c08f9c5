// SPDX-License-Identifier: Apache-2.0
//! The command line of `rushes lab edit`.

use super::edl::Event;
use super::workload::{Mix, Workload, events_of};
use super::{Edit, media};
use crate::cli::{
    GroundArgs, ServerArgs, default_players, no_others, parse_amount, parse_bitrate, parse_seconds,
    parse_span, play_of,
};
use crate::experiments::compare::Contender;
use crate::stage::ground::Layout;
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// `lab edit`.
#[derive(Clone, Debug, Args)]
pub struct EditArgs {
    /// How clients work: timeline, linear, op-atom, scrub, shuttle, loop, bin, conform, render,
    /// grow, copy, direct, or a file that describes it
    #[arg(
        long,
        value_name = "NAME|FILE",
        default_value = "timeline",
        conflicts_with = "mix"
    )]
    pub workload: String,
    /// How many clients, in turn
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "8", conflicts_with = "mix",
          value_parser = clap::value_parser!(u64).range(1..=256))]
    pub clients: Vec<u64>,
    /// Clients of several kinds at once, such as "timeline=6,scrub=1,copy=2"; may be repeated, then
    /// in turn
    #[arg(long, value_name = "NAME=N,…")]
    pub mix: Vec<String>,
    /// Against which servers, in turn: rushes, rushes-no-analyser, stock, stock-tuned,
    /// stock-strict, stock-uring, io_uring, absent
    #[arg(long, value_delimiter = ',', default_value = "rushes")]
    pub server: Vec<Contender>,
    /// How often each, interleaved; each time with other cuts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub runs: u64,
    /// Play each cut list so many times more, and report each pass by itself; caches then hold a
    /// quarter of the lists, unless --cache says otherwise
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=20))]
    pub again: u64,
    /// Rest of all clients between two passes
    #[arg(long, value_name = "SPAN", default_value = "1s", value_parser = parse_span, requires = "again")]
    pub rest: Duration,
    /// Rushes remembers no cuts, and reads ahead across none
    #[arg(long)]
    pub no_rehearsal: bool,
    /// Layers of a timeline, all cut at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=8))]
    pub layers: Option<u64>,
    /// Cuts of a timeline as in this CMX 3600 list; files of the lab stand in for its clips
    #[arg(long, value_name = "FILE")]
    pub edl: Option<PathBuf>,
    /// Files of this folder are the clips of --edl, by clip name or reel, with any extension;
    /// copied onto the disk and played from there
    #[arg(long, value_name = "DIR", requires = "edl", conflicts_with_all = ["mix", "files", "file_bytes", "keep", "layers"])]
    pub media: Option<PathBuf>,
    /// Files that are cut from
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=256))]
    pub files: u64,
    /// Size of each
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_amount)]
    pub file_bytes: u64,
    /// Bits a second of each
    #[arg(long, default_value = "100M", value_parser = parse_bitrate)]
    pub bitrate: u64,
    /// Frames a second
    #[arg(long, default_value_t = 25.0)]
    pub fps: f64,
    /// How long each client works; with --again, how long each pass over its list is
    #[arg(long, default_value = "30", value_parser = parse_seconds)]
    pub seconds: f64,
    /// A frame that comes so long after its time is late
    #[arg(long, value_name = "SPAN", default_value = "500ms", value_parser = parse_span)]
    pub late: Duration,
    /// Between two starts
    #[arg(long, default_value = "250ms", value_parser = parse_span)]
    pub stagger: Duration,
    /// How long a run that collapsed goes on
    #[arg(long, default_value = "10s", value_parser = parse_span)]
    pub grace: Duration,
    /// Names, inodes and extents are cold too, as after a restart of the machine
    #[arg(long)]
    pub cold_metadata: bool,
    /// Keep the modelled disk with its footage in this folder, and use it again when it fits; only
    /// where nobody writes
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Where the report of each run, the table and pictures go
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ground: GroundArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
    /// Put the lateness of every frame into the JSON
    #[arg(long)]
    pub timeline: bool,
}

impl EditArgs {
    /// The edit that the arguments describe.
    ///
    /// Errors   no such workload or list, or a file that is neither; arguments that exclude each
    /// other
    pub fn edit(&self) -> Result<Edit> {
        let frames_per_kilosecond = (self.fps * 1000.0).round().max(1.0) as u64;
        let events = match &self.edl {
            Some(path) => Some(events_of(path, frames_per_kilosecond)?),
            None => None,
        };
        let mixes = self.mixes(events.as_deref())?;
        let mut players = default_players();
        players.bitrate = self.bitrate;
        players.preroll = self.late;
        let kind = self.server[0].kind;
        let play = play_of(
            kind,
            0,
            &players,
            &no_others(),
            &self.setup,
            self.ground.seed,
        );
        let mut edit = Edit {
            server: play.server,
            contenders: self.server.clone(),
            mixes,
            rounds: self.runs,
            file_count: self.files,
            file_bytes: self.file_bytes,
            bitrate: self.bitrate,
            frames_per_kilosecond,
            seconds: self.seconds,
            again: self.again,
            rest: match self.again {
                0 => Duration::ZERO,
                _ => self.rest,
            },
            cache_told: self.setup.cache,
            late: self.late,
            stagger: self.stagger,
            grace: self.grace,
            cold_metadata: self.cold_metadata,
            timeline: self.timeline,
            seed: self.ground.seed,
            originals: Vec::new(),
            out: self.out.clone(),
        };
        if let (Some(folder), Some(events)) = (&self.media, &events) {
            let list = self.edl.as_deref().unwrap_or(folder);
            edit.originals = media::find(events, folder, edit.plan().frame_bytes())
                .with_context(|| list.display().to_string())?;
            edit.file_count = edit.originals.len() as u64;
            let largest = edit.originals.iter().map(|original| original.bytes).max();
            edit.file_bytes = largest.unwrap_or(0);
        }
        if self.no_rehearsal {
            let switch = ("rehearsal".to_owned(), "false".to_owned());
            edit.server.rushes_options.push(switch);
        }
        if edit.writes() {
            self.ground.buffer(&mut edit.server);
        }
        ensure!(
            self.keep.is_none() || edit.room_bytes() == 0,
            "--keep is for runs that only read footage, and this run writes files; leave it out"
        );
        edit.check_lists()?;
        ensure!(
            !edit.has_beside() || self.ground.array.layout != Layout::PoolStriped,
            "programs that read the disk themselves (direct) were given with --layout pool-striped, where no file is on one disk; \
             expected plain or pool: leave out direct, or take one of these"
        );
        Ok(edit)
    }

    fn mixes(&self, events: Option<&[Event]>) -> Result<Vec<Mix>> {
        let mut mixes: Vec<Mix> = if self.mix.is_empty() {
            let workload = Workload::find(&self.workload)?;
            let one = |count: &u64| Mix(vec![(workload.clone(), *count)]);
            self.clients.iter().map(one).collect()
        } else {
            let parsed = self.mix.iter().map(|text| Mix::parse(text));
            parsed.collect::<Result<_>>()?
        };
        // In a mix, layers and the EDL apply to its timelines alone.
        let is_mix = !self.mix.is_empty();
        let all = mixes.iter_mut().flat_map(|mix| &mut mix.0);
        for (workload, _) in all.filter(|(workload, _)| !is_mix || workload.is_timeline()) {
            if let Some(layers) = self.layers {
                workload.set_layers(layers)?;
            }
            if let Some(events) = events {
                workload.set_events(events.to_vec())?;
            }
        }
        for mix in mixes.iter().filter(|_| self.again > 0) {
            ensure!(
                mix.0.iter().any(|(workload, _)| workload.has_list()),
                "--again was given, and no client of {mix} has a cut list; expected timeline, op-atom, shuttle or loop among them: take one, or leave it out"
            );
        }
        Ok(mixes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parsed(line: &str) -> Result<EditArgs, clap::Error> {
        let words = ["rushes-lab", "edit"].into_iter();
        let cli = Cli::try_parse_from(words.chain(line.split_whitespace()))?;
        match cli.command {
            Command::Edit(args) => Ok(*args),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn complaint(line: &str) -> String {
        format!("{:#}", parsed(line).unwrap().edit().unwrap_err())
    }

    #[test]
    fn a_list_is_played_once_unless_more_is_asked_for() {
        let edit = parsed("--clients 2").unwrap().edit().unwrap();
        assert_eq!((edit.again, edit.rest), (0, Duration::ZERO));
        let line = "--clients 8 --again 2 --rest 3s --seconds 25";
        let edit = parsed(line).unwrap().edit().unwrap();
        assert_eq!((edit.again, edit.rest), (2, Duration::from_secs(3)));
        assert!(parsed("--rest 3s").is_err(), "--rest is of --again");
        assert!(parsed("--again 21").is_err());
    }

    #[test]
    fn the_daemon_rehearses_unless_told_otherwise() {
        let options = |line| parsed(line).unwrap().edit().unwrap().server.rushes_options;
        assert_eq!(options("--clients 2"), []);
        let off = [("rehearsal".to_owned(), "false".to_owned())];
        assert_eq!(options("--clients 2 --no-rehearsal"), off);
    }

    #[test]
    fn only_lists_are_played_again() {
        let said = complaint("--workload scrub --again 1");
        for part in ["scrub=8", "op-atom", "leave it out"] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
        let line = "--mix timeline=6,copy=2 --again 1";
        assert!(parsed(line).unwrap().edit().is_ok());
    }

    #[test]
    fn programs_beside_the_server_need_whole_files() {
        let said = complaint("--mix timeline=2,direct=1 --disks 2 --layout pool-striped");
        assert!(
            said.contains("pool-striped") && said.contains("leave out direct"),
            "{said}"
        );
        let line = "--mix timeline=2,direct=1 --disks 2 --layout pool";
        assert!(parsed(line).unwrap().edit().unwrap().has_beside());
    }

    #[test]
    fn a_cache_that_holds_the_lists_is_refused() {
        let said = complaint("--clients 2 --seconds 12 --again 1 --cache 1GiB");
        for part in ["timeline=2", "1024 MiB", "give --cache 1"] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
        let line = "--clients 2 --seconds 12 --again 1 --cache 100MiB";
        assert!(parsed(line).unwrap().edit().is_ok());
        let said = complaint("--clients 1 --seconds 5 --again 1");
        assert!(said.contains("more --seconds"), "{said}");
    }
}
