// SPDX-License-Identifier: Apache-2.0
//! Ways of working, as data: a small TOML file each, built in or the user's own, drawn into one
//! [`Script`] for each client.
//!
//! A file has one line `about` and one table, whose name is the way of working. Lengths are drawn
//! between two bounds so that their mean is the one in the file. Nothing here knows of servers,
//! doors or processes.

use super::edl::{self, Event};
use super::media::Original;
use super::script::{Head, Pace, Passes, Run, Script, Source};
use crate::stage::footage::Dice;
use crate::stage::{MATERIAL, Plan};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::Path;

/// The built-in ones: name and text.
const BUILT_IN: [(&str, &str); 12] = [
    ("timeline", include_str!("workloads/timeline.toml")),
    ("linear", include_str!("workloads/linear.toml")),
    ("op-atom", include_str!("workloads/op-atom.toml")),
    ("scrub", include_str!("workloads/scrub.toml")),
    ("shuttle", include_str!("workloads/shuttle.toml")),
    ("loop", include_str!("workloads/loop.toml")),
    ("bin", include_str!("workloads/bin.toml")),
    ("conform", include_str!("workloads/conform.toml")),
    ("render", include_str!("workloads/render.toml")),
    ("grow", include_str!("workloads/grow.toml")),
    ("copy", include_str!("workloads/copy.toml")),
    ("direct", include_str!("workloads/direct.toml")),
];

/// Numbers of clips above those of streams, copiers and tidied files.
const SOUND_BASE: u64 = 1 << 22;
const BIN_BASE: u64 = 1 << 23;
const DPX_BASE: u64 = 1 << 24;
const OUTPUT_BASE: u64 = 1 << 25;
/// Where clients write, below the share.
pub const OUTPUT: &str = "renders";
/// More clips than a bin has would not fit the clip numbers.
const CLIPS_MAX: u64 = 100_000;
const LAYERS_MAX: u64 = 8;
/// Direct I/O is of whole pages. Units: bytes.
const PAGE: u64 = 4096;
const REQUEST_BYTES_MAX: u64 = 1 << 28;

/// A way of working.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// Its description in one line.
    pub about: String,
    kind: Kind,
}

/// A workload's file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Document {
    about: String,
    timeline: Option<Timeline>,
    op_atom: Option<OpAtom>,
    scrub: Option<Scrub>,
    shuttle: Option<Shuttle>,
    r#loop: Option<Loop>,
    bin: Option<Bin>,
    conform: Option<Conform>,
    render: Option<Render>,
    grow: Option<Grow>,
    copy: Option<Copy>,
    direct: Option<Direct>,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Timeline(Timeline),
    OpAtom(OpAtom),
    Scrub(Scrub),
    Shuttle(Shuttle),
    Loop(Loop),
    Bin(Bin),
    Conform(Conform),
    Render(Render),
    Grow(Grow),
    Copy,
    Direct(Direct),
}

/// How long clips are.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lengths {
    min_s: f64,
    mean_s: f64,
    max_s: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Timeline {
    lengths: Lengths,
    layers: u64,
    #[serde(skip)]
    events: Vec<Event>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpAtom {
    lengths: Lengths,
    sounds: u64,
    sound_bytes_per_s: u64,
    sound_every_frames: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Scrub {
    every_ms: u64,
    step_frames_max: u64,
    turn_percent: u64,
    elsewhere_percent: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shuttle {
    frames_per_s_max: f64,
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    speed: f64,
    s: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Loop {
    s: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bin {
    clips: u64,
    clip_bytes: u64,
    end_bytes: u64,
    frames: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Conform {
    folders: u64,
    folder_frames: u64,
    frame_bytes: u64,
    folder_percent: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Render {
    inputs: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grow {
    behind_s: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Copy {}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Direct {
    request_bytes: u64,
}

/// The footage for a client, and how long it works.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// The files on the stage.
    pub plan: &'a Plan,
    /// Real files in place of made-up footage; none: the footage is made up.
    pub originals: &'a [Original],
    /// Length of one pass over a cut list. Units: s.
    pub seconds: f64,
    /// How often clients play cut lists.
    pub passes: Passes,
}

/// One client, and its name in the report.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its number; parts of one client begin together.
    pub client: u64,
    /// The workload's name, with the client's role where the workload has several.
    pub kind: String,
    /// It is a program on the server's machine that reads the disk, not a client of the server.
    pub is_beside: bool,
    /// Its work.
    pub script: Script,
}

impl Workload {
    /// A built-in workload by its name, or one from a file.
    ///
    /// Errors   neither is there, or the file describes no workload: the line, the value found, and
    /// the value expected
    pub fn find(name: &str) -> Result<Workload> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return Workload::parse(name, text);
        }
        let path = Path::new(name);
        let known = || BUILT_IN.map(|(known, _)| known).join(", ");
        ensure!(
            path.is_file(),
            "`{name}` is neither a built-in workload ({}) nor a file that describes one; correct it",
            known()
        );
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        Workload::parse(&stem, &text).with_context(|| {
            format!(
                "{} does not describe a workload; docs/guide/lab.md has examples",
                path.display()
            )
        })
    }

    fn parse(name: &str, text: &str) -> Result<Workload> {
        let document: Document = toml::from_str(text)?;
        let all = [
            document.timeline.map(Kind::Timeline),
            document.op_atom.map(Kind::OpAtom),
            document.scrub.map(Kind::Scrub),
            document.shuttle.map(Kind::Shuttle),
            document.r#loop.map(Kind::Loop),
            document.bin.map(Kind::Bin),
            document.conform.map(Kind::Conform),
            document.render.map(Kind::Render),
            document.grow.map(Kind::Grow),
            document.copy.map(|_| Kind::Copy),
            document.direct.map(Kind::Direct),
        ];
        let mut kinds: Vec<Kind> = all.into_iter().flatten().collect();
        ensure!(
            kinds.len() == 1,
            "{} tables that say how it works were found, expected one, such as [timeline]; leave the others out",
            kinds.len()
        );
        let kind = kinds.remove(0);
        kind.check()?;
        Ok(Workload {
            name: name.to_owned(),
            about: document.about,
            kind,
        })
    }

    /// Gives it so many layers, all cut at once.
    ///
    /// Errors   it has no layers, or the number is out of range
    pub fn set_layers(&mut self, layers: u64) -> Result<()> {
        let Kind::Timeline(timeline) = &mut self.kind else {
            bail!(
                "--layers is of timelines; `{}` has none: leave it out",
                self.name
            );
        };
        timeline.layers = layers;
        self.kind.check()
    }

    /// Takes the cuts of an EDL in place of drawn ones.
    ///
    /// Errors   it is no timeline
    pub fn set_events(&mut self, events: Vec<Event>) -> Result<()> {
        let Kind::Timeline(timeline) = &mut self.kind else {
            bail!(
                "--edl is of timelines; `{}` has no cut list: leave it out",
                self.name
            );
        };
        timeline.events = events;
        Ok(())
    }

    /// Its clients play a list by their own clock, which they can play again.
    pub fn has_list(&self) -> bool {
        matches!(
            self.kind,
            Kind::Timeline(_) | Kind::OpAtom(_) | Kind::Shuttle(_) | Kind::Loop(_)
        )
    }

    /// It has cuts and layers.
    pub fn is_timeline(&self) -> bool {
        matches!(self.kind, Kind::Timeline(_))
    }

    /// Its clients copy whole files, by programs of Samba's.
    pub fn is_copy(&self) -> bool {
        self.kind == Kind::Copy
    }

    /// Its programs read the disk, and are not clients of the server.
    pub fn is_beside(&self) -> bool {
        matches!(self.kind, Kind::Direct(_))
    }

    /// Its clients write.
    pub fn writes(&self) -> bool {
        matches!(self.kind, Kind::Render(_) | Kind::Grow(_))
    }

    /// Files that it needs beside the footage.
    pub fn material(&self, scene: &Scene<'_>) -> Vec<Source> {
        match &self.kind {
            Kind::OpAtom(op_atom) => (0..scene.plan.stream_count)
                .flat_map(|clip| (0..op_atom.sounds).map(move |sound| (clip, sound)))
                .map(|(clip, sound)| op_atom.sound(scene, clip, sound))
                .collect(),
            Kind::Bin(bin) => (0..bin.clips).map(|clip| bin.clip(clip)).collect(),
            Kind::Conform(conform) => conform.frames(),
            _ => Vec::new(),
        }
    }

    /// The work of client `client`: the same for the same dice.
    fn draw(&self, scene: &Scene<'_>, client: u64, dice: &mut Dice) -> Vec<Part> {
        let one = |script: Script| {
            vec![Part {
                client,
                kind: self.name.clone(),
                is_beside: self.is_beside(),
                script,
            }]
        };
        match &self.kind {
            Kind::Timeline(timeline) => one(timeline.draw(scene, client, dice)),
            Kind::OpAtom(op_atom) => one(op_atom.draw(scene, dice)),
            Kind::Scrub(scrub) => one(scrub.draw(scene, dice)),
            Kind::Shuttle(shuttle) => one(shuttle.draw(scene, dice)),
            Kind::Loop(one_loop) => one(one_loop.draw(scene, dice)),
            Kind::Bin(bin) => one(bin.draw(scene, client)),
            Kind::Conform(conform) => one(conform.draw(scene, dice)),
            Kind::Render(render) => one(render.draw(scene, client, dice)),
            Kind::Grow(grow) => grow.draw(scene, client, &self.name),
            Kind::Copy => Vec::new(),
            Kind::Direct(direct) => one(direct.draw(scene, dice)),
        }
    }
}

impl Kind {
    fn check(&self) -> Result<()> {
        match self {
            Kind::Timeline(timeline) => {
                ensure!(
                    (1..=LAYERS_MAX).contains(&timeline.layers),
                    "{} layers, expected 1 to {LAYERS_MAX}; correct --layers or `layers`",
                    timeline.layers
                );
                timeline.lengths.check()
            }
            Kind::OpAtom(op_atom) => {
                ensure!(
                    op_atom.sounds <= 64 && op_atom.sound_every_frames >= 1,
                    "sounds = {}, sound_every_frames = {}; expected at most 64 files of sound, read every frame or more seldom",
                    op_atom.sounds,
                    op_atom.sound_every_frames
                );
                op_atom.lengths.check()
            }
            Kind::Scrub(scrub) => {
                ensure!(
                    scrub.every_ms >= 1
                        && scrub.step_frames_max >= 1
                        && scrub.turn_percent <= 100
                        && scrub.elsewhere_percent <= 100,
                    "every_ms = {}, step_frames_max = {}: expected at least 1; percentages at most 100",
                    scrub.every_ms,
                    scrub.step_frames_max
                );
                Ok(())
            }
            Kind::Shuttle(shuttle) => {
                let is_good = |step: &Step| step.s > 0.0 && step.speed.abs() <= 64.0;
                ensure!(
                    shuttle.frames_per_s_max >= 1.0
                        && !shuttle.steps.is_empty()
                        && shuttle.steps.iter().all(is_good),
                    "expected frames_per_s_max of at least 1, and steps such as {{ speed = -4.0, s = 2.0 }}, none faster than 64 ×"
                );
                Ok(())
            }
            Kind::Loop(one_loop) => {
                ensure!(one_loop.s > 0.0, "s = {}, expected more than 0", one_loop.s);
                Ok(())
            }
            Kind::Bin(bin) => {
                ensure!(
                    (1..=CLIPS_MAX).contains(&bin.clips)
                        && bin.end_bytes >= 1
                        && bin.clip_bytes >= 2 * bin.end_bytes,
                    "clips = {} of {} bytes, expected 1 to {CLIPS_MAX} that hold head and tail of {} bytes each",
                    bin.clips,
                    bin.clip_bytes,
                    bin.end_bytes
                );
                Ok(())
            }
            Kind::Conform(conform) => {
                ensure!(
                    conform.folders >= 1
                        && conform.folder_frames >= 1
                        && conform.folders * conform.folder_frames <= CLIPS_MAX
                        && conform.frame_bytes >= 1
                        && conform.folder_percent <= 100,
                    "folders = {}, folder_frames = {}: expected at least 1 of each, {CLIPS_MAX} frames at most, and folder_percent up to 100",
                    conform.folders,
                    conform.folder_frames
                );
                Ok(())
            }
            Kind::Render(render) => {
                ensure!(
                    (1..=64).contains(&render.inputs),
                    "inputs = {}, expected 1 to 64",
                    render.inputs
                );
                Ok(())
            }
            Kind::Grow(grow) => {
                ensure!(
                    grow.behind_s > 0.0,
                    "behind_s = {}, expected more than 0",
                    grow.behind_s
                );
                Ok(())
            }
            Kind::Copy => Ok(()),
            Kind::Direct(direct) => {
                ensure!(
                    (PAGE..=REQUEST_BYTES_MAX).contains(&direct.request_bytes)
                        && direct.request_bytes.is_multiple_of(PAGE),
                    "request_bytes = {}, expected a multiple of {PAGE} up to {REQUEST_BYTES_MAX}; correct it",
                    direct.request_bytes
                );
                Ok(())
            }
        }
    }
}

impl Lengths {
    fn check(&self) -> Result<()> {
        let Lengths {
            min_s,
            mean_s,
            max_s,
        } = *self;
        ensure!(
            0.0 < min_s && min_s < mean_s && mean_s < max_s,
            "lengths of {min_s} to {max_s} s, {mean_s} s in the mean; expected 0 < min_s < mean_s < max_s"
        );
        Ok(())
    }

    /// Units: s.
    fn draw(&self, dice: &mut Dice) -> f64 {
        // The mean of u^p is 1 / (p + 1).
        let power = (self.max_s - self.min_s) / (self.mean_s - self.min_s) - 1.0;
        self.min_s + (self.max_s - self.min_s) * part(dice).powf(power)
    }
}

/// A number from 0 up to 1.
fn part(dice: &mut Dice) -> f64 {
    (dice.throw() >> 11) as f64 / (1u64 << 53) as f64
}

impl Scene<'_> {
    /// The length of all passes, with the rests between them. Units: s.
    pub fn whole_s(&self) -> f64 {
        self.seconds + self.passes.last_start_ns() as f64 / 1e9
    }

    fn period_ns(&self) -> u64 {
        self.plan.period().as_nanos() as u64
    }

    fn frames_in(&self, seconds: f64) -> u64 {
        let frames = seconds * self.plan.frames_per_kilosecond as f64 / 1000.0;
        (frames.round() as u64).max(1)
    }

    /// The footage that clients play, file by file.
    fn footage(&self) -> Vec<Source> {
        (0..self.plan.stream_count)
            .map(|stream| Source {
                path: self.plan.stream_path(stream),
                number: stream,
                bytes: match self.originals.get(stream as usize) {
                    Some(original) => original.bytes,
                    None => self.plan.frame_offset(self.plan.frame_count),
                },
                keep_open: true,
                is_real: !self.originals.is_empty(),
                grows: false,
            })
            .collect()
    }

    fn frames_of(&self, file: u64) -> u64 {
        match self.originals.get(file as usize) {
            Some(original) => original.bytes / self.plan.frame_bytes().max(1),
            None => self.plan.frame_count,
        }
    }

    /// Plays a file of the footage from a frame on.
    fn head(&self, file: u64, frame: u64) -> Head {
        let bytes = self.plan.frame_bytes();
        Head {
            file: file as usize,
            from: frame * bytes,
            stride: bytes as i64,
            bytes,
            every: 1,
            writes: false,
        }
    }

    /// A first frame after which so many frames fit.
    fn place(&self, frames: u64, dice: &mut Dice) -> u64 {
        dice.below(self.plan.frame_count.saturating_sub(frames) + 1)
    }
}

/// A clock's script: adds runs until the time is up.
fn until_the_end(scene: &Scene<'_>, mut next: impl FnMut() -> Option<Run>) -> Vec<Run> {
    let mut left_ns = scene.frames_in(scene.seconds) * scene.period_ns();
    let mut runs = Vec::new();
    while let Some(mut run) = next() {
        run.frame_count = run.frame_count.min(left_ns / run.period_ns.max(1));
        if run.frame_count == 0 {
            break;
        }
        left_ns -= run.frame_count * run.period_ns;
        runs.push(run);
    }
    runs
}

impl Timeline {
    fn draw(&self, scene: &Scene<'_>, client: u64, dice: &mut Dice) -> Script {
        let files = scene.plan.stream_count;
        let mut number = client as usize;
        let runs = until_the_end(scene, || {
            let event = match self.events.is_empty() {
                true => None,
                false => self.events.get(number % self.events.len()),
            };
            number += 1;
            let wanted = match event {
                Some(event) => event.frame_count,
                None => scene.frames_in(self.lengths.draw(dice)),
            };
            let frame_count = wanted.min(scene.plan.frame_count);
            let heads = match event {
                Some(event) => event
                    .clip
                    .map(|clip| {
                        let file = clip as u64 % files;
                        let room = scene.frames_of(file).saturating_sub(frame_count) + 1;
                        scene.head(file, event.from % room)
                    })
                    .into_iter()
                    .collect(),
                None => self.cut(scene, frame_count, dice),
            };
            Some(Run {
                heads,
                frame_count,
                period_ns: scene.period_ns(),
            })
        });
        Script {
            files: scene.footage(),
            runs,
            ..Script::default()
        }
    }

    /// Gives each layer another file, as far as there are enough.
    fn cut(&self, scene: &Scene<'_>, frame_count: u64, dice: &mut Dice) -> Vec<Head> {
        let files = scene.plan.stream_count;
        let first = dice.below(files);
        (0..self.layers)
            .map(|layer| {
                let place = scene.place(frame_count, dice);
                scene.head((first + layer) % files, place)
            })
            .collect()
    }
}

impl OpAtom {
    fn sound(&self, scene: &Scene<'_>, clip: u64, sound: u64) -> Source {
        let seconds =
            scene.plan.frame_count as f64 * 1000.0 / scene.plan.frames_per_kilosecond as f64;
        let piece = self.piece_bytes(scene);
        let bytes = (self.sound_bytes_per_s as f64 * seconds) as u64;
        Source {
            path: format!("{MATERIAL}/sound/clip{clip:02}.{sound}.mxf"),
            number: SOUND_BASE + clip * 64 + sound,
            bytes: bytes.next_multiple_of(piece) + piece,
            keep_open: true,
            is_real: false,
            grows: false,
        }
    }

    fn piece_bytes(&self, scene: &Scene<'_>) -> u64 {
        let rate = self.sound_bytes_per_s as f64 * 1000.0 / scene.plan.frames_per_kilosecond as f64;
        ((rate * self.sound_every_frames as f64) as u64).max(1)
    }

    fn draw(&self, scene: &Scene<'_>, dice: &mut Dice) -> Script {
        let clips = scene.plan.stream_count;
        let mut files = scene.footage();
        for clip in 0..clips {
            files.extend((0..self.sounds).map(|sound| self.sound(scene, clip, sound)));
        }
        let piece = self.piece_bytes(scene);
        let runs = until_the_end(scene, || {
            let wanted = scene.frames_in(self.lengths.draw(dice));
            let frame_count = wanted.min(scene.plan.frame_count);
            let clip = dice.below(clips);
            let place = scene.place(frame_count, dice);
            let sounds = (0..self.sounds).map(|sound| Head {
                file: (clips + clip * self.sounds + sound) as usize,
                from: place / self.sound_every_frames * piece,
                stride: piece as i64,
                bytes: piece,
                every: self.sound_every_frames,
                writes: false,
            });
            let heads = std::iter::once(scene.head(clip, place)).chain(sounds);
            Some(Run {
                heads: heads.collect(),
                frame_count,
                period_ns: scene.period_ns(),
            })
        });
        Script {
            files,
            runs,
            ..Script::default()
        }
    }
}

impl Scrub {
    fn draw(&self, scene: &Scene<'_>, dice: &mut Dice) -> Script {
        let (files, last) = (scene.plan.stream_count, scene.plan.frame_count - 1);
        let period_ns = self.every_ms * 1_000_000;
        let count = ((scene.seconds * 1e9) as u64).div_ceil(period_ns).max(1);
        let (mut file, mut place) = (dice.below(files), scene.place(1, dice));
        let mut forward = true;
        let runs = (0..count).map(|_| {
            if dice.below(100) < self.elsewhere_percent {
                (file, place) = (dice.below(files), scene.place(1, dice));
            }
            let step = 1 + dice.below(self.step_frames_max);
            forward ^= dice.below(100) < self.turn_percent;
            // At an end the hand turns.
            forward = (forward && place + step <= last) || (!forward && place < step);
            place = match forward {
                true => (place + step).min(last),
                false => place.saturating_sub(step),
            };
            Run {
                heads: vec![scene.head(file, place)],
                frame_count: 1,
                period_ns,
            }
        });
        Script {
            pace: Pace::Hand,
            runs: runs.collect(),
            files: scene.footage(),
            ..Script::default()
        }
    }
}

impl Shuttle {
    fn draw(&self, scene: &Scene<'_>, dice: &mut Dice) -> Script {
        let mut steps = Vec::new();
        let runs = until_the_end(scene, || {
            if steps.is_empty() {
                steps = self.round(scene, dice);
                steps.reverse();
            }
            steps.pop()
        });
        Script {
            files: scene.footage(),
            runs,
            ..Script::default()
        }
    }

    /// All steps once, in a place where they fit.
    fn round(&self, scene: &Scene<'_>, dice: &mut Dice) -> Vec<Run> {
        let rate = scene.plan.frames_per_kilosecond as f64 / 1000.0;
        // Each step: its first frame, from the beginning of the round; frames from one that it
        // shows to the next; how many it shows; the time between two. Units of the last: ns.
        let mut at = 0i64;
        let mut legs = Vec::new();
        for step in &self.steps {
            let speed = step.speed.abs() * rate;
            if speed == 0.0 {
                legs.push((at, 0, scene.frames_in(step.s), scene.period_ns()));
                continue;
            }
            let stride = (speed / self.frames_per_s_max).ceil().max(1.0);
            let shown = ((step.s * speed / stride).round() as u64).max(1);
            let signed = stride as i64 * step.speed.signum() as i64;
            legs.push((at, signed, shown, (1e9 * stride / speed) as u64));
            at += signed * shown as i64;
        }
        let ends = legs
            .iter()
            .flat_map(|(at, stride, shown, _)| [*at, at + stride * (*shown as i64 - 1)]);
        let low = ends.clone().min().unwrap_or(0);
        let high = ends.max().unwrap_or(0);
        let span = (high - low) as u64 + 1;
        let file = dice.below(scene.plan.stream_count);
        let base = scene.place(span, dice) as i64 - low;
        let last = scene.plan.frame_count as i64 - 1;
        let run = |(at, stride, shown, period_ns): (i64, i64, u64, u64)| {
            let from = (base + at).clamp(0, last);
            // In a file that is too short for the step the client stops at its end.
            let left = match stride {
                0 => shown,
                forward if forward > 0 => ((last - from) / forward) as u64 + 1,
                backward => (from / -backward) as u64 + 1,
            };
            let mut head = scene.head(file, from as u64);
            head.stride *= stride;
            Run {
                heads: (stride != 0).then_some(head).into_iter().collect(),
                frame_count: shown.min(left),
                period_ns,
            }
        };
        legs.into_iter().map(run).collect()
    }
}

impl Loop {
    fn draw(&self, scene: &Scene<'_>, dice: &mut Dice) -> Script {
        let frame_count = scene.frames_in(self.s).min(scene.plan.frame_count);
        let file = dice.below(scene.plan.stream_count);
        let head = scene.head(file, scene.place(frame_count, dice));
        let run = Run {
            heads: vec![head],
            frame_count,
            period_ns: scene.period_ns(),
        };
        Script {
            files: scene.footage(),
            runs: until_the_end(scene, || Some(run.clone())),
            ..Script::default()
        }
    }
}

impl Bin {
    fn clip(&self, clip: u64) -> Source {
        Source {
            path: format!("{MATERIAL}/bin/clip{clip:05}.mov"),
            number: BIN_BASE + clip,
            bytes: self.clip_bytes,
            keep_open: false,
            is_real: false,
            grows: false,
        }
    }

    /// Reads of each clip its head, its tail and some frames between: one picture.
    fn draw(&self, scene: &Scene<'_>, client: u64) -> Script {
        let frame = scene.plan.frame_bytes().min(self.clip_bytes);
        let run = |index: u64| {
            let clip = (index + client * 7) % self.clips;
            let piece = |from: u64, bytes: u64| Head {
                file: clip as usize,
                from,
                stride: 0,
                bytes,
                every: 1,
                writes: false,
            };
            let tail = self.clip_bytes - self.end_bytes;
            let room = self.clip_bytes - frame;
            let frames = (1..=self.frames).map(|n| piece(room * n / (self.frames + 1), frame));
            let heads = [piece(0, self.end_bytes), piece(tail, self.end_bytes)]
                .into_iter()
                .chain(frames);
            Run {
                heads: heads.collect(),
                frame_count: 1,
                period_ns: 0,
            }
        };
        Script {
            pace: Pace::Free,
            files: (0..self.clips).map(|clip| self.clip(clip)).collect(),
            runs: (0..self.clips).map(run).collect(),
            ..Script::default()
        }
    }
}

impl Conform {
    fn frames(&self) -> Vec<Source> {
        (0..self.folders * self.folder_frames)
            .map(|frame| Source {
                path: format!(
                    "{MATERIAL}/dpx/reel{:02}/shot.{:05}.dpx",
                    frame / self.folder_frames,
                    frame % self.folder_frames + 1
                ),
                number: DPX_BASE + frame,
                bytes: self.frame_bytes,
                keep_open: false,
                is_real: false,
                grows: false,
            })
            .collect()
    }

    fn draw(&self, scene: &Scene<'_>, dice: &mut Dice) -> Script {
        /// The list has so many frames; after the last it begins again.
        const FRAMES: u64 = 4000;
        let mut files = scene.footage();
        let large = files.len() as u64;
        files.extend(self.frames());
        let runs = (0..FRAMES).map(|_| {
            let head = match dice.below(100) < self.folder_percent {
                true => Head {
                    file: (large + dice.below(self.folders * self.folder_frames)) as usize,
                    from: 0,
                    stride: 0,
                    bytes: self.frame_bytes,
                    every: 1,
                    writes: false,
                },
                false => scene.head(dice.below(large), scene.place(1, dice)),
            };
            Run {
                heads: vec![head],
                frame_count: 1,
                period_ns: 0,
            }
        });
        Script {
            pace: Pace::Free,
            runs: runs.collect(),
            files,
            ..Script::default()
        }
    }
}

/// The file that client `client` writes.
fn output(scene: &Scene<'_>, client: u64, grows: bool) -> Source {
    Source {
        path: format!("{OUTPUT}/client{client:02}.mov"),
        number: OUTPUT_BASE + client,
        bytes: scene.plan.frame_offset(scene.plan.frame_count),
        keep_open: true,
        is_real: false,
        grows,
    }
}

impl Render {
    fn draw(&self, scene: &Scene<'_>, client: u64, dice: &mut Dice) -> Script {
        let mut files = scene.footage();
        let large = files.len() as u64;
        let first = dice.below(large);
        let mut heads: Vec<Head> = (0..self.inputs)
            .map(|input| scene.head((first + input) % large, 0))
            .collect();
        heads.push(Head {
            writes: true,
            ..scene.head(large, 0)
        });
        files.push(output(scene, client, false));
        Script {
            pace: Pace::Free,
            files,
            runs: vec![Run {
                heads,
                frame_count: scene.plan.frame_count,
                period_ns: 0,
            }],
            ..Script::default()
        }
    }
}

impl Grow {
    fn draw(&self, scene: &Scene<'_>, client: u64, name: &str) -> Vec<Part> {
        let frame_count = scene.frames_in(scene.seconds).min(scene.plan.frame_count);
        let script = |writes: bool, delay_ns: u64| Script {
            files: vec![output(scene, client, !writes)],
            runs: vec![Run {
                heads: vec![Head {
                    writes,
                    ..scene.head(0, 0)
                }],
                frame_count,
                period_ns: scene.period_ns(),
            }],
            delay_ns,
            ..Script::default()
        };
        vec![
            Part {
                client,
                kind: format!("{name}-recorder"),
                is_beside: false,
                script: script(true, 0),
            },
            Part {
                client,
                kind: name.to_owned(),
                is_beside: false,
                script: script(false, (self.behind_s * 1e9) as u64),
            },
        ]
    }
}

impl Direct {
    /// Reads file after file from the front, beginning with a drawn one; skips an end shorter than
    /// a request.
    fn draw(&self, scene: &Scene<'_>, dice: &mut Dice) -> Script {
        let files = scene.footage();
        let count = files.len() as u64;
        let first = dice.below(count);
        let runs = (0..count).map(|number| {
            let file = ((first + number) % count) as usize;
            let bytes = self.request_bytes.min(files[file].bytes);
            Run {
                heads: vec![Head {
                    file,
                    from: 0,
                    stride: bytes as i64,
                    bytes,
                    every: 1,
                    writes: false,
                }],
                frame_count: files[file].bytes / bytes.max(1),
                period_ns: 0,
            }
        });
        Script {
            pace: Pace::Free,
            runs: runs.collect(),
            is_sampled: true,
            files,
            ..Script::default()
        }
    }
}

/// Kinds of clients, and how many of each: `timeline=6,scrub=1`.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix(pub Vec<(Workload, u64)>);

impl Mix {
    /// Parses the command line's form.
    ///
    /// Errors   no such workload, or no number
    pub fn parse(text: &str) -> Result<Mix> {
        let one = |word: &str| -> Result<(Workload, u64)> {
            let (name, count) = word.split_once('=').with_context(|| {
                format!("`{word}` is not a part of a mix; expected NAME=COUNT, such as timeline=6")
            })?;
            let count: u64 = count
                .trim()
                .parse()
                .ok()
                .filter(|n| (1..=256).contains(n))
                .with_context(|| {
                    format!("`{count}` of `{word}` is not a number of clients; expected 1 to 256")
                })?;
            Ok((Workload::find(name.trim())?, count))
        };
        Ok(Mix(text.split(',').map(one).collect::<Result<_>>()?))
    }

    /// Clients of all kinds.
    pub fn client_count(&self) -> u64 {
        self.0.iter().map(|(_, count)| count).sum()
    }

    /// Clients that copy whole files.
    pub fn copy_count(&self) -> u64 {
        let copies = self.0.iter().filter(|(workload, _)| workload.is_copy());
        copies.map(|(_, count)| count).sum()
    }

    /// Programs that read the disk, and are not clients of the server.
    pub fn beside_count(&self) -> u64 {
        let beside = self.0.iter().filter(|(workload, _)| workload.is_beside());
        beside.map(|(_, count)| count).sum()
    }

    /// Some of its clients write.
    pub fn writes(&self) -> bool {
        self.0.iter().any(|(workload, _)| workload.writes())
    }

    /// The files that the clients need beside the footage, each once.
    pub fn material(&self, scene: &Scene<'_>) -> Vec<Source> {
        let all = self
            .0
            .iter()
            .flat_map(|(workload, _)| workload.material(scene));
        let mut all: Vec<Source> = all.collect();
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all.dedup_by(|a, b| a.path == b.path);
        all
    }

    /// All clients, kind after kind.
    pub fn draw(&self, scene: &Scene<'_>, seed: u64) -> Vec<Part> {
        let mut client = 0u64;
        let mut parts = Vec::new();
        for (workload, count) in &self.0 {
            // Clients without a list go on until those that repeat theirs are done.
            let (scene, passes) = match workload.has_list() {
                true => (*scene, scene.passes),
                false => {
                    let seconds = scene.whole_s();
                    (Scene { seconds, ..*scene }, Passes::default())
                }
            };
            for _ in 0..*count {
                let mut dice = Dice::new(seed ^ (client + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let mut drawn = workload.draw(&scene, client, &mut dice);
                drawn
                    .iter_mut()
                    .for_each(|part| part.script.passes = passes);
                parts.extend(drawn);
                client += 1;
            }
        }
        parts
    }
}

impl std::fmt::Display for Mix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Vec<String> = self
            .0
            .iter()
            .map(|(workload, count)| format!("{}={count}", workload.name))
            .collect();
        f.pad(&words.join(","))
    }
}

/// Read an EDL for a timeline at this rate. Units: thousandths of a frame a second.
pub fn events_of(path: &Path, frames_per_kilosecond: u64) -> Result<Vec<Event>> {
    let bytes = std::fs::read(path).with_context(|| {
        format!(
            "{} cannot be read; give --edl a CMX 3600 list",
            path.display()
        )
    })?;
    let rate = frames_per_kilosecond.div_ceil(1000);
    edl::parse(&bytes, rate).with_context(|| format!("{} is not a CMX 3600 EDL", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            seed: 1,
            stream_count: 16,
            bitrate: 100_000_000,
            frames_per_kilosecond: 25_000,
            frame_count: 2000,
            sequence: false,
            copy_count: 0,
            copy_bytes: 0,
            entry_count: 0,
        }
    }

    fn drawn(mix: &str, seconds: f64) -> Vec<Part> {
        let plan = plan();
        let scene = Scene {
            plan: &plan,
            originals: &[],
            passes: Passes::default(),
            seconds,
        };
        Mix::parse(mix).unwrap().draw(&scene, 1)
    }

    /// Checks that every piece of all parts lies in its file.
    fn check_places(parts: &[Part]) {
        for part in parts {
            for run in &part.script.runs {
                for head in &run.heads {
                    let file = &part.script.files[head.file];
                    let places = (0..run.frame_count).filter_map(|frame| head.place(frame));
                    for place in places {
                        let end = place + head.bytes;
                        assert!(end <= file.bytes, "{}: {place}, {}", part.kind, file.path);
                    }
                }
            }
        }
    }

    #[test]
    fn every_workload_of_ours_is_read_and_stays_within_its_files() {
        for (name, _) in BUILT_IN {
            let workload = Workload::find(name).unwrap();
            assert!(workload.about.len() > 20, "{name}");
            let parts = drawn(&format!("{name}=3"), 30.0);
            check_places(&parts);
            let is_played = parts.iter().all(|part| part.script.frame_count() > 0);
            assert!(is_played, "{name}");
            assert_eq!(parts.is_empty(), name == "copy");
            assert_eq!(
                parts.iter().any(|part| part.script.writes()),
                workload.writes()
            );
        }
    }

    #[test]
    fn cuts_have_the_lengths_that_the_file_says_and_other_places_for_each_client() {
        let parts = drawn("timeline=8", 600.0);
        assert_eq!(parts.len(), 8);
        let mut lengths = Vec::new();
        for part in &parts {
            assert_eq!(part.script.frame_count(), 15_000);
            // The end of the time cuts the last one short.
            let runs = &part.script.runs[..part.script.runs.len() - 1];
            lengths.extend(runs.iter().map(|run| run.frame_count as f64 / 25.0));
        }
        assert!(lengths.iter().all(|length| (1.48..=6.02).contains(length)));
        let mean = lengths.iter().sum::<f64>() / lengths.len() as f64;
        // 1,600 lengths with a standard deviation of 1.3 s: 0.1 s is three standard errors.
        assert!((2.9..3.1).contains(&mean), "{mean}");
        assert_ne!(parts[0].script.runs, parts[1].script.runs);
        assert_eq!(
            parts[0].script,
            drawn("timeline=1", 600.0)[0].script,
            "the first of eight is the first of one"
        );
    }

    #[test]
    fn layers_are_cut_at_once_and_lie_in_different_files() {
        let mut mix = Mix::parse("timeline=1").unwrap();
        mix.0[0].0.set_layers(3).unwrap();
        let plan = plan();
        let scene = Scene {
            plan: &plan,
            originals: &[],
            passes: Passes::default(),
            seconds: 30.0,
        };
        for run in &mix.draw(&scene, 1)[0].script.runs {
            let mut files: Vec<usize> = run.heads.iter().map(|head| head.file).collect();
            files.sort_unstable();
            files.dedup();
            assert_eq!(files.len(), 3);
        }
        assert!(mix.0[0].0.set_layers(9).is_err());
        let scrub = &mut Mix::parse("scrub=1").unwrap().0[0].0;
        assert!(scrub.set_layers(2).is_err());
    }

    #[test]
    fn lists_are_played_again_and_others_work_on_until_then() {
        let plan = plan();
        let once = Scene {
            plan: &plan,
            originals: &[],
            seconds: 10.0,
            passes: Passes::default(),
        };
        let again = Scene {
            passes: Passes {
                count: 3,
                every_ns: 12_000_000_000,
            },
            ..once
        };
        assert_eq!((once.whole_s(), again.whole_s()), (10.0, 34.0));
        let mix = Mix::parse("timeline=2,scrub=1,grow=1").unwrap();
        let (first, parts) = (mix.draw(&once, 1), mix.draw(&again, 1));
        for (one, part) in first.iter().zip(&parts).take(2) {
            assert_eq!(one.script.runs, part.script.runs, "the list is the same");
            assert_eq!(part.script.passes.count, 3);
            assert_eq!(part.script.length_ns(), 34_000_000_000);
        }
        assert!(parts[2..].iter().all(|part| part.script.passes.count == 1));
        let recorder = &parts[3];
        assert_eq!(recorder.kind, "grow-recorder");
        assert_eq!(recorder.script.length_ns(), 34_000_000_000);
    }

    #[test]
    fn op_atom_reads_one_file_of_picture_and_eight_of_sound() {
        let parts = drawn("op-atom=1", 30.0);
        let heads = &parts[0].script.runs[0].heads;
        assert_eq!(heads.len(), 9);
        assert_eq!((heads[0].bytes, heads[0].every), (500_000, 1));
        assert!(
            heads[1..]
                .iter()
                .all(|head| (head.bytes, head.every) == (144_000, 25))
        );
    }

    #[test]
    fn shuttling_goes_both_ways_and_leaves_frames_out_when_it_is_fast() {
        let parts = drawn("shuttle=1", 15.0);
        let told: Vec<_> = parts[0]
            .script
            .runs
            .iter()
            .map(|run| {
                let stride = run.heads.first().map(|head| head.stride / 500_000);
                (stride, run.frame_count, run.period_ns / 1_000_000)
            })
            .collect();
        assert_eq!(
            told,
            [
                (Some(1), 50, 40),
                (Some(1), 150, 20),
                (Some(2), 100, 20),
                (Some(-1), 50, 40),
                (Some(-2), 100, 20),
                (None, 25, 40),
                (Some(1), 75, 40)
            ]
        );
    }

    #[test]
    fn the_player_of_a_growing_file_comes_behind_its_recorder() {
        let parts = drawn("grow=1", 10.0);
        assert_eq!(parts.len(), 2);
        let (recorder, player) = (&parts[0], &parts[1]);
        assert_eq!((recorder.client, player.client), (0, 0));
        assert!(recorder.script.writes() && !player.script.writes());
        assert_eq!(recorder.script.files[0].path, player.script.files[0].path);
        assert!(player.script.files[0].grows && !recorder.script.files[0].grows);
        assert_eq!(player.script.delay_ns, 2_000_000_000);
    }

    #[test]
    fn a_program_beside_the_server_reads_each_file_in_large_requests() {
        let parts = drawn("timeline=1,direct=2", 30.0);
        let told: Vec<bool> = parts.iter().map(|part| part.is_beside).collect();
        assert_eq!(told, [false, true, true]);
        let script = &parts[1].script;
        assert!(script.is_sampled && script.pace == Pace::Free);
        assert_eq!(script.runs.len(), 16);
        // 2,000 frames of 500,000 bytes are 238 requests and a rest.
        assert_eq!(script.runs[0].frame_count, 238);
        assert_eq!(script.runs[0].heads[0].bytes, 4 << 20);
        let next = (script.runs[0].heads[0].file + 1) % 16;
        assert_eq!(script.runs[1].heads[0].file, next);
        let said = complaint("about = \"x\"\n[direct]\nrequest_bytes = 5000\n");
        assert!(said.contains("5000") && said.contains("multiple of 4096"));
    }

    #[test]
    fn an_edl_is_played_event_by_event() {
        let list = "001 A V C 01:00:00:00 01:00:02:00 00:00:00:00 00:00:02:00\n\
                    002 BL V C 00:00:00:00 00:00:01:00 00:00:02:00 00:00:03:00\n\
                    003 B V C 02:00:00:00 02:00:02:00 00:00:03:00 00:00:05:00\n\
                    004 A V C 01:00:10:00 01:00:13:00 00:00:05:00 00:00:08:00\n";
        let mut mix = Mix::parse("timeline=2").unwrap();
        let events = edl::parse(list.as_bytes(), 25).unwrap();
        mix.0[0].0.set_events(events).unwrap();
        let plan = plan();
        let scene = Scene {
            plan: &plan,
            originals: &[],
            passes: Passes::default(),
            seconds: 7.0,
        };
        let parts = mix.draw(&scene, 1);
        let told = |part: &Part| -> Vec<_> {
            let runs = part.script.runs.iter();
            runs.map(|run| {
                let head = run.heads.first();
                (
                    head.map(|head| (head.file, head.from / 500_000)),
                    run.frame_count,
                )
            })
            .collect()
        };
        assert_eq!(
            told(&parts[0]),
            [
                (Some((0, 0)), 50),
                (None, 25),
                (Some((1, 0)), 50),
                (Some((0, 250)), 50)
            ]
        );
        // The second begins one event later.
        assert_eq!(told(&parts[1])[0], (None, 25));
        assert_eq!(parts[0].script.frame_count(), 150);
    }

    fn complaint(text: &str) -> String {
        format!("{:#}", Workload::parse("x", text).unwrap_err())
    }

    #[test]
    fn what_describes_no_workload_is_refused_with_a_reason() {
        assert!(complaint("about = \"x\"\n").contains("0 tables"));
        assert!(complaint("about = \"x\"\n[copy]\n[loop]\ns = 1.0\n").contains("2 tables"));
        let said = complaint("about = \"x\"\n[loop]\nseconds = 3.0\n");
        assert!(
            said.contains("line 3") && said.contains("seconds"),
            "{said}"
        );
        let said = complaint(
            "about = \"x\"\n[timeline]\nlayers = 1\nlengths = { min_s = 2.0, mean_s = 1.0, max_s = 3.0 }\n",
        );
        assert!(said.contains("min_s < mean_s"), "{said}");
        assert!(complaint("about = \"x\"\n[loop]\ns = 0.0\n").contains("more than 0"));
        let said = format!("{:#}", Workload::find("nonesuch").unwrap_err());
        assert!(
            said.contains("`nonesuch`") && said.contains("op-atom"),
            "{said}"
        );
        for mix in ["timeline", "timeline=0", "timeline=x", "=3", ""] {
            assert!(Mix::parse(mix).is_err(), "{mix}");
        }
    }
}
