// SPDX-License-Identifier: Apache-2.0
//! Which device a file lies on, and the model of a device before it has served anything.

use crate::share::Share;
use rushes_core::server::{DeviceModel, ServiceModel};
use rushes_core::units::{ByteCount, BytesPerSecond, DeviceId, Duration};
use rushes_sys::device::{self, DeviceFacts};
use std::collections::HashMap;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelSource {
    /// `rushes calibrate --save`.
    Calibrated,
    /// A cautious guess at a disk with a moving head.
    GuessedRotational,
    /// A cautious guess at a solid-state disk.
    GuessedSolidState,
    /// There is no block device: memory, or a network.
    NoBlockDevice,
}

impl ModelSource {
    pub(crate) fn text(&self) -> &'static str {
        match self {
            ModelSource::Calibrated => "calibrated",
            ModelSource::GuessedRotational => "default (rotational)",
            ModelSource::GuessedSolidState => "default (solid state)",
            ModelSource::NoBlockDevice => "default (no block device)",
        }
    }

    /// True: contracts rest on a guess. In memory there is nothing to measure.
    pub(crate) fn is_guess(&self) -> bool {
        matches!(
            self,
            ModelSource::GuessedRotational | ModelSource::GuessedSolidState
        )
    }
}

/// A device in use.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) id: DeviceId,
    /// Kernel name, or the kind of file system where there is no block device.
    pub(crate) name: String,
    pub(crate) model: DeviceModel,
    pub(crate) source: ModelSource,
    pub(crate) facts: Option<DeviceFacts>,
}

/// Every device in use.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    list: Vec<Device>,
    /// `st_dev` → which, and where the file system starts on it.
    by_st_dev: HashMap<u64, (DeviceId, u64)>,
}

impl Devices {
    /// The device of a share; a new one is second in the answer. Waits for nothing but sysfs.
    pub(crate) fn add(
        &mut self,
        share: &Share,
        calibrated: impl FnOnce(&DeviceFacts) -> Option<DeviceModel>,
    ) -> (DeviceId, bool) {
        let facts = facts_of(share);
        let name = match &facts {
            Some(facts) => facts.disk.clone(),
            None => format!("{}:{:x}", share.file_system, share.st_dev),
        };
        let offset = facts.as_ref().map_or(0, |facts| facts.partition_offset);
        let size = |facts: &Option<DeviceFacts>| facts.as_ref().map(|facts| facts.disk_bytes);
        let is_it = |known: &&Device| known.name == name && size(&known.facts) == size(&facts);
        // A disk that replaces another may get its name and st_dev; the size tells them apart.
        if let Some(known) = self.list.iter().find(is_it) {
            // Another partition of the same disk: one head, one queue.
            let id = known.id;
            self.by_st_dev.insert(share.st_dev, (id, offset));
            return (id, false);
        }
        let (model, source) = match &facts {
            Some(facts) => match calibrated(facts) {
                Some(model) => (model, ModelSource::Calibrated),
                None => guess(facts),
            },
            None => (no_block_device(), ModelSource::NoBlockDevice),
        };
        let id = DeviceId(u16::try_from(self.list.len()).unwrap_or(u16::MAX));
        self.list.push(Device {
            id,
            name,
            model,
            source,
            facts,
        });
        self.by_st_dev.insert(share.st_dev, (id, offset));
        (id, true)
    }

    /// Takes the model of a new measurement.
    ///
    /// Returns  false: it has this model already, or is no block device
    pub(crate) fn measured(&mut self, id: DeviceId, model: DeviceModel) -> bool {
        let known = self.list.get_mut(usize::from(id.0));
        // Where there is no block device no measurement is taken at the start either.
        let Some(known) = known.filter(|known| known.facts.is_some() && known.model != model)
        else {
            return false;
        };
        known.model = model;
        known.source = ModelSource::Calibrated;
        true
    }

    /// The device of a file system and its start there. None, for example, for another subvolume of
    /// a share: the caller then takes the share's own place.
    pub(crate) fn place(&self, st_dev: u64) -> Option<(DeviceId, u64)> {
        self.by_st_dev.get(&st_dev).copied()
    }

    pub(crate) fn get(&self, id: DeviceId) -> Option<&Device> {
        self.list.get(usize::from(id.0))
    }

    pub(crate) fn all(&self) -> &[Device] {
        &self.list
    }
}

/// btrfs and the like have an `st_dev` of their own; their mount names the block device.
pub(crate) fn facts_of(share: &Share) -> Option<DeviceFacts> {
    if let Ok(facts) = device::facts(share.st_dev) {
        return Some(facts);
    }
    let st_dev = device::st_dev_of_mount(share.mount).ok()??;
    device::facts(st_dev).ok()
}

/// Slower than most of its kind: on an unmeasured disk a contract should rather be refused than
/// broken.
fn guess(facts: &DeviceFacts) -> (DeviceModel, ModelSource) {
    let size = ByteCount(facts.disk_bytes);
    if facts.rotational {
        let service = ServiceModel {
            fixed: Duration::from_ms(8),
            span: Duration::from_ms(14),
            rate: BytesPerSecond(100_000_000),
        };
        (both(service, size), ModelSource::GuessedRotational)
    } else {
        let service = ServiceModel {
            fixed: Duration::from_us(300),
            span: Duration::ZERO,
            rate: BytesPerSecond(300_000_000),
        };
        (both(service, size), ModelSource::GuessedSolidState)
    }
}

fn no_block_device() -> DeviceModel {
    let service = ServiceModel {
        fixed: Duration::from_us(50),
        span: Duration::ZERO,
        rate: BytesPerSecond(1_000_000_000),
    };
    both(service, ByteCount(1 << 40))
}

fn both(service: ServiceModel, size: ByteCount) -> DeviceModel {
    DeviceModel {
        read: service,
        write: service,
        size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ShareConfig;

    #[test]
    fn two_shares_of_one_file_system_are_one_device() {
        let base = std::env::temp_dir().join(format!("rushes-device-{}", std::process::id()));
        let share = |name: &str| {
            let path = base.join(name);
            std::fs::create_dir_all(&path).unwrap();
            Share::open(&ShareConfig {
                name: name.to_string(),
                path,
                exclusive: false,
            })
            .unwrap()
        };
        let mut devices = Devices::default();
        let (first, new) = devices.add(&share("a"), |_| None);
        assert!(new);
        assert_eq!(devices.add(&share("b"), |_| None), (first, false));
        assert_eq!(devices.all().len(), 1);
        assert!(devices.place(share("a").st_dev).is_some());
        std::fs::remove_dir_all(base).unwrap();
    }
}
