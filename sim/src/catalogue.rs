// SPDX-License-Identifier: Apache-2.0
//! The scenarios and kept seeds that come with the simulator, by name.

use crate::scenario::Scenario;
use crate::swarm;
use serde::{Deserialize, Serialize};

macro_rules! named {
    ($folder:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../", $folder, "/", $name, ".toml")))),*]
    };
}

/// Name and text of every scenario.
pub const SCENARIOS: &[(&str, &str)] = named!("scenarios":
    "client_deaths",
    "cold_opens",
    "conform",
    "copies_alone",
    "copies_come_along",
    "copy_storm",
    "failing_reads",
    "fragmented",
    "frame_sequences",
    "full_cache",
    "ingest_beside",
    "joins_and_leaves",
    "metadata_storm",
    "mixed",
    "multicam",
    "no_analyser",
    "op_atom",
    "op_atom_untold",
    "opens_beside_windows",
    "overload",
    "patterns",
    "pool_sequences",
    "recordings",
    "recordings_beside",
    "recordings_in_trouble",
    "recordings_played",
    "recordings_volatile",
    "ruled_copies",
    "scattered",
    "scrub",
    "scrub_beside",
    "seeks_and_jumps",
    "sequences_by_threads",
    "sequences_that_end",
    "shared_file",
    "silent_strangers",
    "slow_disk",
    "ssd",
    "starts_beside_copies",
    "stalls",
    "steady",
    "thousand_disks",
    "timeline",
    "timeline_closes_first",
    "timeline_full",
    "timeline_again",
    "timeline_again_shared",
    "timeline_changed",
    "together",
    "worn_disk",
    "writers",
);

/// The scenario that differs for every seed.
pub const SWARM: &str = "swarm";

/// A seed that found a bug, with all data to replay it for years.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// The fault.
    pub cause: String,
    /// The seed of the run.
    pub seed: u64,
    /// The scenario as it was then, since a swarm's generator may change.
    pub scenario: Scenario,
}

impl Kept {
    /// As text, with a head as every file has.
    pub fn print(&self) -> String {
        let text =
            toml::to_string(self).unwrap_or_else(|error| format!("# cannot be written: {error}\n"));
        format!("# SPDX-License-Identifier: Apache-2.0\n{text}")
    }
}

/// The scenario of that name, or the one in the file of that name.
///
/// Errors   a sentence: the names that exist, or the fault of the file.
pub fn find(name: &str, seed: u64) -> Result<Scenario, String> {
    if name == SWARM {
        return Ok(swarm::scenario(seed));
    }
    if let Some((_, text)) = SCENARIOS.iter().find(|(known, _)| *known == name) {
        return Scenario::parse(text);
    }
    match std::fs::read_to_string(name) {
        Ok(text) => Scenario::parse(&text).map_err(|error| format!("{name}: {error}")),
        Err(_) => {
            let names: Vec<&str> = SCENARIOS.iter().map(|(name, _)| *name).collect();
            Err(format!(
                "there is no scenario or file \"{name}\"; scenarios: {SWARM} {}",
                names.join(" ")
            ))
        }
    }
}
