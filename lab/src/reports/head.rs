// SPDX-License-Identifier: Apache-2.0
//! The beginning of all reports: which experiment, against which server, on which disks.
//!
//! In the JSON object of a report its fields stand beside those of the report itself. The object
//! leaves out a field that the report does not have.

use crate::servers::server::Way;
use crate::stage::Stage;
use serde::{Deserialize, Serialize};

/// Version of the field names of all reports but that of power cuts.
const REPORT_VERSION: u32 = 1;

/// The head of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Version of the field names.
    pub report_version: u32,
    /// The experiment; a report of `play` leaves it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experiment: Option<String>,
    /// The server; with several in turn each run has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// `smb`, `nfs`, `local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub door: Option<String>,
    /// `table5`, `table5-half`, `table5-quarter`, `table5-eighth`, `ssd`, `memory`, or the folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Number of disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<u64>,
    /// The layer that makes one place of them: `plain`, `pool`, `pool-striped`, `raid0`, `single`,
    /// `mergerfs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// The file system, such as `ext4`; for a folder the one below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
}

impl Head {
    /// The head of an experiment without server and stage.
    pub fn of(experiment: &str) -> Head {
        Head {
            report_version: REPORT_VERSION,
            experiment: Some(experiment.to_owned()),
            ..Head::default()
        }
    }

    /// The same, with the stage.
    pub fn on(self, stage: &Stage) -> Head {
        Head {
            disk: Some(stage.place().to_string()),
            disks: Some(stage.disk_count()),
            layout: Some(stage.layout().name().to_owned()),
            file_system: Some(stage.file_system_name()),
            ..self
        }
    }

    /// The same, with the door.
    pub fn by(self, way: Way) -> Head {
        Head {
            door: Some(way.name().to_owned()),
            ..self
        }
    }

    /// The same, with the server.
    pub fn with_server(self, server: &str) -> Head {
        Head {
            server: Some(server.to_owned()),
            ..self
        }
    }

    /// `rushes over smb on table5`, for tables.
    pub fn words(&self) -> String {
        let word = |word: &Option<String>| word.clone().unwrap_or_default();
        let (server, door, disk) = (word(&self.server), word(&self.door), word(&self.disk));
        format!("{server} over {door} on {disk}")
    }

    /// `smb on 4 × table5`, for tables.
    pub fn words_on_disks(&self) -> String {
        let word = |word: &Option<String>| word.clone().unwrap_or_default();
        let (door, disk) = (word(&self.door), word(&self.disk));
        format!("{door} on {} × {disk}", self.disks.unwrap_or(1))
    }

    /// The layout.
    pub fn layout(&self) -> &str {
        self.layout.as_deref().unwrap_or_default()
    }

    /// The file system.
    pub fn file_system(&self) -> &str {
        self.file_system.as_deref().unwrap_or_default()
    }

    /// The server.
    pub fn server(&self) -> &str {
        self.server.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Serialize, Deserialize)]
    struct Counted {
        #[serde(flatten)]
        head: Head,
        count: u64,
    }

    fn full() -> Head {
        Head {
            disk: Some("table5".to_owned()),
            disks: Some(4),
            layout: Some("pool".to_owned()),
            file_system: Some("ext4".to_owned()),
            ..Head::of("most").by(Way::Smb).with_server("rushes")
        }
    }

    #[test]
    fn its_fields_stand_beside_those_of_the_report_and_others_are_left_out() {
        let (head, count) = (Head::of("strokes"), 7);
        assert_eq!(
            serde_json::to_value(Counted { head, count }).unwrap(),
            json!({"report_version": 1, "experiment": "strokes", "count": 7})
        );
        let (head, count) = (full(), 7);
        let text = serde_json::to_string(&Counted { head, count }).unwrap();
        assert_eq!(
            text,
            "{\"report_version\":1,\"experiment\":\"most\",\"server\":\"rushes\",\"door\":\"smb\",\
             \"disk\":\"table5\",\"disks\":4,\"layout\":\"pool\",\"file_system\":\"ext4\",\"count\":7}"
        );
        let read: Counted = serde_json::from_str(&text).unwrap();
        assert_eq!((read.head, read.count), (full(), 7));
    }

    #[test]
    fn tables_say_where_it_was() {
        assert_eq!(full().words(), "rushes over smb on table5");
        assert_eq!(full().words_on_disks(), "smb on 4 × table5");
    }

    #[test]
    fn every_field_of_the_head_is_described() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/lab-json.md");
        let text = std::fs::read_to_string(path).unwrap();
        let head = serde_json::to_value(full()).unwrap();
        for name in head.as_object().unwrap().keys() {
            assert!(
                text.contains(&format!("`{name}`")),
                "{name} is not in {path}"
            );
        }
    }
}
