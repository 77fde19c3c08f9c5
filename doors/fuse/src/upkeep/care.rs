// SPDX-License-Identifier: Apache-2.0
//! Looking after the pool while files are in use: members are added, drained and removed, and files
//! are rebalanced.
//!
//! One job at a time, in the thread of the command that asked for it. A file that moves is open in
//! this door like any other open file, so that removals, renames and truncations treat it like one;
//! its layout changes under its lock, for one step at a time. The bytes of a step are read
//! before, without the lock and behind all other reads; core/pool/pace says how long the mover
//! rests after it. Decision: docs/decisions/0030.

use crate::bytes::files::OpenFile;
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::nodes::{Node, status};
use crate::tree::removals::FilesInUse;
use rushes_core::pool::pace::{rest, rest_beside};
use rushes_core::pool::tidy::Wait;
use rushes_core::pool::vain::Rooms;
use rushes_core::units;
use rushes_pool::{
    Access, Asker, ByteCount, Class, Defragged, Drained, Failed, Layout, MemberNumber, MountState,
    Move, Moved, Object, Parting, Pool, PoolError, Request, Told, Users, Work, WorkKind,
    WorkRefusal, each_file_in, names_follow, set_draining,
};
use rushes_sys::priority::{idle_io, ordinary_io};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes moved at a time: for a file that no program has open, and for one that programs have open,
/// which wait for it. Units: bytes.
const STEP: ByteCount = ByteCount::from_mib(4);
const STEP_BESIDE_OTHERS: ByteCount = ByteCount::from_mib(1);
/// Between two reports to the asking command.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// The mover waits so long for a file that the kernel reads by passthrough, when nothing else is
/// left.
const READER_PATIENCE: Duration = Duration::from_secs(30);
/// The rest is taken in parts, so that a command that was cancelled need not wait.
const NAP: Duration = Duration::from_millis(100);
/// A command waits so long for a job whose asker is gone to stop after its step, and looks so
/// often.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
const STOP_LOOK_EVERY: Duration = Duration::from_millis(20);

/// The work under way.
#[derive(Debug, Default)]
pub(crate) struct Care {
    state: Mutex<State>,
    /// The job that was under way has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    going: Option<Going>,
    /// Commands that have come and not begun yet.
    waiting: usize,
}

impl State {
    fn has_command(&self) -> bool {
        self.waiting > 0 || self.going.as_ref().is_some_and(|one| !one.is_tidying)
    }
}

#[derive(Debug)]
struct Going {
    kind: WorkKind,
    member: Option<u16>,
    /// No command asked for it.
    is_tidying: bool,
    since: Instant,
    done: Drained,
    /// The command that waits for it. None: its end cannot be seen.
    asker: Option<Asker>,
}

impl Going {
    /// Whether it stops after its present step.
    fn is_stopping(&self) -> bool {
        self.asker.as_ref().is_some_and(Asker::is_gone)
    }
}

/// While it lives no other job begins.
#[derive(Debug)]
pub(crate) struct Busy<'a>(&'a Care);

impl Busy<'_> {
    /// The job goes on with this kind of work.
    pub(crate) fn turn_to(&self, kind: WorkKind) {
        if let Some(going) = &mut locked(&self.0.state).going {
            going.kind = kind;
            going.done = Drained::default();
        }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        locked(&self.0.state).going = None;
        self.0.ended.notify_all();
    }
}

/// A command has come: while this lives the pool does not begin to tidy itself, and ends tidying
/// that is under way. Not to be dropped with the state locked.
struct Waiting<'a>(&'a Care);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        locked(&self.0.state).waiting -= 1;
    }
}

impl Care {
    fn work(&self) -> Option<Work> {
        locked(&self.state).going.as_ref().map(|going| Work {
            kind: going.kind,
            member: going.member,
            is_tidying: going.is_tidying,
            done: going.done,
            running_s: going.since.elapsed().as_secs(),
        })
    }

    /// Whether a command is under way, or waits for its turn.
    pub(crate) fn has_command(&self) -> bool {
        locked(&self.state).has_command()
    }

    fn waits(&self) -> Waiting<'_> {
        locked(&self.state).waiting += 1;
        Waiting(self)
    }

    /// Begins a job; no other begins from now on. Waits for tidying to end, and for a job whose
    /// asker is gone.
    fn begin(
        &self,
        kind: WorkKind,
        member: Option<u16>,
        mut asker: Option<Asker>,
    ) -> Result<Busy<'_>, PoolError> {
        let end = Instant::now() + STOP_PATIENCE;
        // Also between two looks at a job that stops.
        let _waiting = self.waits();
        loop {
            let mut state = self.until_untidied();
            let Some(other) = &state.going else {
                state.going = Some(Going::new(kind, member, false, asker.take()));
                return Ok(Busy(self));
            };
            let is_stopping = other.is_stopping();
            if !is_stopping || Instant::now() >= end {
                let (kind, member) = (other.kind, other.member);
                return Err(PoolError::from(match is_stopping {
                    false => WorkRefusal::Busy { kind, member },
                    true => WorkRefusal::Stopping { kind, member },
                }));
            }
            drop(state);
            std::thread::sleep(STOP_LOOK_EVERY);
        }
    }

    /// Begins tidying, if `may` allows it. One step with that question: a command has come before,
    /// and shows in it, or comes after, and waits for the end.
    ///
    /// `may`    gets whether there is a command; it must not call this object
    /// Errors   why not
    pub(crate) fn begin_tidying(
        &self,
        kind: WorkKind,
        may: impl FnOnce(bool) -> Result<(), Wait>,
    ) -> Result<Busy<'_>, Wait> {
        let mut state = locked(&self.state);
        let has_command = state.has_command();
        may(has_command)?;
        if has_command || state.going.is_some() {
            return Err(Wait::Command);
        }
        state.going = Some(Going::new(kind, None, true, None));
        Ok(Busy(self))
    }

    fn until_untidied(&self) -> MutexGuard<'_, State> {
        let mut state = locked(&self.state);
        while state.going.as_ref().is_some_and(|one| one.is_tidying) {
            let waited = self.ended.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Changes the pool's format file, while no command does.
    pub(crate) fn change(
        &self,
        act: impl FnOnce() -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let _waiting = self.waits();
        let state = self.until_untidied();
        if let Some(other) = &state.going {
            return Err(WorkRefusal::Unsettable { kind: other.kind }.into());
        }
        act()
    }

    fn set(&self, done: Drained) {
        if let Some(going) = &mut locked(&self.state).going {
            going.done = done;
        }
    }
}

impl Going {
    fn new(kind: WorkKind, member: Option<u16>, is_tidying: bool, asker: Option<Asker>) -> Going {
        Going {
            kind,
            member,
            is_tidying,
            since: Instant::now(),
            done: Drained::default(),
            asker,
        }
    }
}

/// Reports to the command. False: it is gone.
type Tell<'a> = dyn FnMut(&Told) -> bool + 'a;

/// Both ends are of one version, so an invalid name does not come from our command.
fn class_named(name: &str) -> Result<Class, PoolError> {
    Class::of(name).ok_or_else(|| {
        WorkRefusal::NoClass {
            text: name.to_owned(),
        }
        .into()
    })
}

impl Users for Door {
    fn bury(&self, _pool: &Pool) -> Result<(), PoolError> {
        let _burying = locked(&self.burying);
        self.bury_unless(FilesInUse {
            door: self,
            waits: false,
        })
        .map(|_| ())
    }

    fn log_names(&self, pool: &Pool) -> Result<(), PoolError> {
        self.names.checkpoint_now(pool, || self.take_changed())
    }

    fn are_there(&self) -> bool {
        true
    }
}

impl Door {
    /// Does the work of a command.
    ///
    /// Returns  the last report
    pub(crate) fn look_after(
        &self,
        request: &Request,
        asker: Option<Asker>,
        tell: &mut Tell<'_>,
    ) -> Told {
        let begin = |kind, member| self.care.begin(kind, member, asker);
        let done = match request {
            Request::Add { members, class } => begin(WorkKind::Add, None)
                .and_then(|_busy| self.take_in(members, class.as_deref(), tell)),
            Request::Classes { classes } => self.set_classes(classes),
            Request::Drain { member, cancel } => begin(WorkKind::Drain, Some(*member))
                .and_then(|_busy| self.drain(*member, *cancel, tell)),
            Request::Remove { member, lost } => begin(WorkKind::Remove, Some(*member))
                .and_then(|_busy| self.let_member_go(*member, Parting::of(*lost))),
            Request::Rebalance {} => {
                begin(WorkKind::Rebalance, None).and_then(|_busy| self.rebalance(tell))
            }
            Request::Defrag { paths } => {
                begin(WorkKind::Defrag, None).and_then(|_busy| self.defrag(paths, tell))
            }
            Request::Tidy { schedule } => self.set_schedule(schedule),
            Request::Status {} => Ok(Told::Status {
                work: self.care.work(),
                tidying_waits: self.tidying.waits(),
                mount: Some(MountState {
                    has_keeper: self.table.is_some(),
                    can_pass: self.can_pass.load(Ordering::Acquire),
                    passed_open_count: self.tidying.passed(),
                }),
                failing: self.failing(),
            }),
        };
        done.unwrap_or_else(|error| Told::Refused {
            sentence: error.to_string(),
        })
    }

    /// Files that are written from then on follow it.
    fn set_classes(&self, classes: &[(u16, Option<String>)]) -> Result<Told, PoolError> {
        let read = |(number, class): &(u16, Option<String>)| {
            let class = class.as_deref().map(class_named).transpose()?;
            Ok((MemberNumber(*number), class))
        };
        let classes = classes
            .iter()
            .map(read)
            .collect::<Result<Vec<_>, PoolError>>()?;
        self.care
            .change(|| rushes_pool::change_classes(&self.pool, classes))?;
        self.names.members_changed();
        Ok(done(Vec::new()))
    }

    fn take_in(
        &self,
        members: &[PathBuf],
        class: Option<&str>,
        tell: &mut Tell<'_>,
    ) -> Result<Told, PoolError> {
        let class = class.map(class_named).transpose()?;
        let numbers = rushes_pool::add(&self.pool, members, class.as_ref(), |done, _| {
            // A command that is gone by then repeats it, and learns that it is done.
            tell(&Told::Added { count: done as u64 });
        })?;
        self.members_changed();
        Ok(done(numbers.iter().map(|number| number.0).collect()))
    }

    fn members_changed(&self) {
        if let Err(error) = self.sessions.follow(&self.pool) {
            tracing::warn!("a new member is used without the daemon: {error}");
        }
        self.names.members_changed();
    }

    fn let_member_go(&self, number: u16, parting: Parting) -> Result<Told, PoolError> {
        // A burial may hang in the disk that is given up.
        if parting == Parting::Empty {
            self.bury_removed(true);
        }
        rushes_pool::remove(&self.pool, MemberNumber(number), parting, self)?;
        self.members_changed();
        Ok(done(Vec::new()))
    }

    fn drain(&self, number: u16, cancel: bool, tell: &mut Tell<'_>) -> Result<Told, PoolError> {
        let member = MemberNumber(number);
        set_draining(&self.pool, member, !cancel)?;
        self.names.members_changed();
        if cancel {
            return Ok(done(Vec::new()));
        }
        let mut mover = Mover::new(self, tell);
        mover.all(&Plan::Off(member))?;
        names_follow(&self.pool, member, self)?;
        let is_empty = mover.failed.count == 0;
        Ok(mover.told_at_last(is_empty))
    }

    fn rebalance(&self, tell: &mut Tell<'_>) -> Result<Told, PoolError> {
        locked(&self.tidying.vain).forget();
        let mut mover = Mover::new(self, tell);
        mover.all(&Plan::Spread)?;
        Ok(mover.told_at_last(false))
    }

    fn defrag(&self, paths: &[PathBuf], tell: &mut Tell<'_>) -> Result<Told, PoolError> {
        locked(&self.tidying.vain).forget();
        let mut mover = Mover::new(self, tell);
        mover.all(&Plan::Together(paths.to_vec()))?;
        Ok(mover.told_at_last(false))
    }

    /// One kind of tidying, as long as `goes_on` allows it, of files that no program has open.
    ///
    /// `failed`  has those of the kind before, and gets those of this one
    pub(crate) fn tidy_by(
        &self,
        busy: &Busy<'_>,
        kind: WorkKind,
        failed: &mut Failed,
        goes_on: &mut Tell<'_>,
    ) -> Result<Told, PoolError> {
        busy.turn_to(kind);
        let plan = match kind {
            WorkKind::Defrag => Plan::Together(Vec::new()),
            _ => Plan::Spread,
        };
        let mut mover = Mover::new(self, goes_on);
        mover.is_tidying = true;
        mover.failed = std::mem::take(failed);
        let looked = mover.look(&plan, true).and_then(|_| mover.told(true));
        failed.clone_from(&mover.failed);
        looked.map(|()| mover.told_at_last(false))
    }

    /// Opens a file by its stub, as if through the mount. None: it has no name any more.
    fn open_stub(&self, stub: &OwnedFd) -> Answer<Option<MovedFile<'_>>> {
        let path = format!("/proc/self/fd/{}", stub.as_raw_fd());
        let fd = open(path.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let (node, _) = self.nodes.enter(fd)?;
        let opened = {
            let _burying = locked(&self.burying);
            match status(stub) {
                Ok(found) if found.stx_nlink == 0 => None,
                _ => Some(self.open_file(&node)),
            }
        };
        match opened {
            Some(Ok(file)) => Ok(Some(MovedFile {
                door: self,
                node,
                file,
            })),
            other => {
                self.forget(node.number, 1);
                other.map_or(Ok(None), |opened| opened.map(|_| None))
            }
        }
    }

    /// Takes one step of a file's move. The only place where the layout of a file in use changes
    /// because its bytes move.
    fn move_step(
        &self,
        held: &MovedFile<'_>,
        one: &mut Move,
        step: ByteCount,
    ) -> Result<Option<Moved>, PoolError> {
        let (node, file) = (&held.node, &held.file);
        let mut state = file.change();
        let Some(mut layout) = state.layout.clone() else {
            return Ok(None);
        };
        // A program may have opened it by passthrough since this file was looked at.
        if one.source(&layout).is_none() || self.check_passed(node, file, &state) {
            return Ok(None);
        }
        // The daemon first writes all it has of the file, and then has none of it in its cache.
        let looked_after = self
            .hold(node, &state, |_| true)
            .map_err(|error| PoolError::from(WorkRefusal::Unwritten { error }))?;
        let moved = one.take_step(&self.pool, file.stub.as_fd(), &mut layout, step);
        if moved.is_err()
            && let Ok(Some(written)) = self.pool.layout(file.stub.as_fd())
        {
            // It may have failed after it changed the layout.
            layout = written;
        }
        self.let_go(&state, &layout);
        self.unsettled.note(node, &layout);
        file.set_layout(&mut state, layout);
        drop(looked_after);
        drop(state);
        self.changed(node);
        moved
    }

    /// Frees the room that an interrupted move had reserved for a file, and that later moves have
    /// not used. It is only room: the next pass retries a failure.
    fn give_back(&self, held: &MovedFile<'_>) {
        let (node, file) = (&held.node, &held.file);
        let state = file.change();
        let Some(layout) = &state.layout else {
            return;
        };
        if self.pool.reserved_bytes(layout) == 0 || self.check_passed(node, file, &state) {
            return;
        }
        // The daemon first writes all it has of the file, and afterwards looks up its blocks again.
        let Ok(_looked_after) = self.hold(node, &state, |_| true) else {
            return;
        };
        match self.pool.give_back(layout) {
            Ok(bytes) => tracing::info!("{}: freed {bytes} reserved bytes", self.name_of(node)),
            Err(error) => tracing::warn!("{}: {error}", self.name_of(node)),
        }
    }

    /// Reads the bytes of a step before it, without the file's lock.
    fn read_before(&self, held: &MovedFile<'_>, one: &Move, step: ByteCount) {
        let state = held.file.state();
        let Some(layout) = state.layout.clone() else {
            return;
        };
        let source = one.source(&layout);
        let fd = source.and_then(|object| {
            let fd = self.object(&held.node, &state, object, Access::Read);
            fd.ok()
        });
        drop(state);
        if let Some(fd) = fd {
            // Not under the lock: a disk may leave idle reads for seconds.
            let _ = idle_io();
            one.read_before(&layout, &fd, step);
            let _ = ordinary_io();
        }
    }

    /// Units    bytes per second, of the busier of both devices. None: not known of one
    fn unpromised(&self, moved: &Moved) -> Option<u64> {
        let of = |object: Object| {
            let device = self.pool.member(object.member)?.status().device?;
            self.pool.unpromised(device)
        };
        let source = of(moved.source);
        match moved.target {
            Some(target) => Some(source?.min(of(target)?)),
            None => source,
        }
    }
}

/// The answer if no bytes were moved.
fn done(numbers: Vec<u16>) -> Told {
    Told::Done {
        numbers,
        all: Drained::default(),
        is_empty: false,
        defragged: Defragged::default(),
        failed: Failed::default(),
    }
}

fn unopened(error: Errno) -> PoolError {
    WorkRefusal::Unopened { error }.into()
}

/// An open file that this thread moves.
struct MovedFile<'a> {
    door: &'a Door,
    node: Arc<Node>,
    file: Arc<OpenFile>,
}

impl MovedFile<'_> {
    /// Checks whether a program reads its object without the door: it must stay where it is.
    fn check_passed(&self) -> bool {
        self.file.may_be_passed()
            && self
                .door
                .check_passed(&self.node, &self.file, &self.file.change())
    }

    /// Whether a program has it open, too.
    fn has_others(&self) -> bool {
        locked(&self.node.file).open_count() > 1
    }
}

impl Drop for MovedFile<'_> {
    fn drop(&mut self) {
        self.door.close(&self.node);
        self.door.forget(self.node.number, 1);
        // It may have lost its name meanwhile, when only this thread had it open.
        self.door.something_removed();
    }
}

/// The bytes to move.
#[derive(Clone, Debug)]
enum Plan {
    /// All bytes of this member.
    Off(MemberNumber),
    /// From fuller members to emptier ones, and to wider stripes.
    Spread,
    /// Files in more segments than need be: these files and those in these folders, or all if there
    /// are none.
    Together(Vec<PathBuf>),
}

/// Moves of a file are made in so many rounds: the second one is known when the first is done.
const ROUNDS: usize = 2;

impl Plan {
    /// By its layout alone: whether it is worth a closer look.
    fn concerns(&self, layout: &Layout) -> bool {
        match self {
            Plan::Off(number) => layout.objects().iter().any(|one| one.member == *number),
            Plan::Spread | Plan::Together(_) => !layout.segments().is_empty(),
        }
    }

    fn moves(&self, round: usize, pool: &Pool, stub: &OwnedFd, layout: &Layout) -> Vec<Move> {
        let stub = stub.as_fd();
        match (self, round) {
            (Plan::Off(number), 0) => vec![Move::off(*number)],
            (Plan::Spread, 0) => Move::spreading(layout),
            (Plan::Spread, 1) => Move::widening(pool, stub, layout).into_iter().collect(),
            (Plan::Together(_), 0) => Move::gathering(pool, stub, layout).into_iter().collect(),
            (Plan::Together(_), 1) => Move::afresh(pool, layout),
            _ => Vec::new(),
        }
    }

    fn paths(&self) -> &[PathBuf] {
        match self {
            Plan::Together(paths) => paths,
            Plan::Off(_) | Plan::Spread => &[],
        }
    }
}

/// Moves files, and reports to the command.
struct Mover<'a, 'b> {
    door: &'a Door,
    tell: &'a mut Tell<'b>,
    told_at: Instant,
    /// Tidying: it asks before each step whether to go on.
    is_tidying: bool,
    /// The command is gone.
    is_unwanted: bool,
    /// A file of the last look that the kernel reads by passthrough.
    passed: Option<PathBuf>,
    done: Drained,
    /// Steps taken so far.
    step_count: u64,
    defragged: Defragged,
    failed: Failed,
}

impl<'a, 'b> Mover<'a, 'b> {
    fn new(door: &'a Door, tell: &'a mut Tell<'b>) -> Mover<'a, 'b> {
        Mover {
            door,
            tell,
            told_at: Instant::now(),
            is_tidying: false,
            is_unwanted: false,
            passed: None,
            done: Drained::default(),
            step_count: 0,
            defragged: Defragged::default(),
            failed: Failed::default(),
        }
    }

    /// Does all of the plan: first the files that no program has open, so that players are
    /// disturbed last. Names come and go meanwhile, so that a look may miss one: a member is empty
    /// when it has no objects, or two looks have found no file with objects there.
    fn all(&mut self, plan: &Plan) -> Result<(), PoolError> {
        let mut is_left = self.look(plan, true)?;
        let (file_count, before) = (self.done.file_count, self.defragged.before);
        match plan {
            Plan::Off(number) => {
                let mut is_sure = false;
                let mut waits_since = None;
                while is_left || (!is_sure && self.has_objects(*number)) {
                    is_sure = !is_left;
                    let moved_count = self.done.moved_count;
                    is_left = self.look(plan, false)?;
                    if self.done.moved_count > moved_count {
                        waits_since = None;
                    }
                    self.wait_for_readers(waits_since.get_or_insert_with(Instant::now))?;
                }
            }
            _ if is_left => drop(self.look(plan, false)?),
            _ => {}
        }
        self.done.file_count = file_count;
        self.defragged.before = before;
        Ok(())
    }

    /// The report on all its work; `is_empty`: for a drain that has left nothing.
    fn told_at_last(self, is_empty: bool) -> Told {
        Told::Done {
            numbers: Vec::new(),
            all: self.done,
            is_empty,
            defragged: self.defragged,
            failed: self.failed,
        }
    }

    /// A program that reads a file by passthrough is not disturbed, and the wait for it is bounded.
    fn wait_for_readers(&mut self, since: &Instant) -> Result<(), PoolError> {
        let Some(path) = &self.passed else {
            return Ok(());
        };
        if since.elapsed() > READER_PATIENCE {
            return Err(WorkRefusal::Passed { path: path.clone() }.into());
        }
        std::thread::sleep(NAP);
        self.told(false)
    }

    fn has_objects(&self, number: MemberNumber) -> bool {
        let member = self.door.pool.member(number);
        member.is_some_and(|member| member.object_count().is_ok_and(|count| count > 0))
    }

    /// Returns whether it found a file
    fn look(&mut self, plan: &Plan, spare_open: bool) -> Result<bool, PoolError> {
        let mut is_found = false;
        let door = self.door;
        self.defragged = Defragged::default();
        self.passed = None;
        if let Plan::Off(_) = plan {
            // After several looks, the last one counts the files that are left.
            self.failed = Failed::default();
        }
        door.bury_removed(true);
        each_file_in(&door.pool, plan.paths(), |path, stub| {
            self.done.file_count += 1;
            let found = stub.and_then(|stub| self.file(path, &stub, plan, spare_open));
            is_found |= self.noted(path, found)?;
            self.told(false)
        })?;
        if let Plan::Off(_) = plan {
            // Files that are open and have no name any more.
            door.pool.each_removed(|path, stub| {
                let found = self.file(path, stub, plan, spare_open);
                is_found |= self.noted(path, found)?;
                Ok(())
            })?;
        }
        Ok(is_found)
    }

    /// The result for one file. A file that cannot be read or moved does not stop the others.
    fn noted(&mut self, path: &Path, found: Result<bool, PoolError>) -> Result<bool, PoolError> {
        match found {
            Err(error) if self.check_wanted().is_ok() => {
                self.failed.note(path, &error);
                Ok(false)
            }
            found => found,
        }
    }

    /// Returns whether the file needed work, which is done or put off
    fn file(
        &mut self,
        path: &Path,
        stub: &OwnedFd,
        plan: &Plan,
        spare_open: bool,
    ) -> Result<bool, PoolError> {
        // Without the file's lock: the places that its layout has on a member that takes no new
        // bytes stay true. A file that got its first bytes at this moment has a layout by now.
        let pool = &self.door.pool;
        let layout = pool.layout(stub.as_fd());
        let layout = layout.or_else(|_| pool.layout(stub.as_fd()))?;
        let Some(layout) = layout.filter(|layout| plan.concerns(layout)) else {
            return Ok(false);
        };
        let is_emptied = matches!(plan, Plan::Off(_));
        // An operator must act, and has got the message.
        if !is_emptied && pool.has_lost(&layout) {
            return Ok(false);
        }
        if !is_emptied && pool.check_objects(&layout).is_err() {
            self.check_opens(stub)?;
        }
        if !matches!(plan, Plan::Together(_)) {
            return self.beside_others(path, stub, plan, spare_open);
        }
        let fragments = pool.fragments(&layout);
        let is_left = (0..ROUNDS).any(|round| !self.moves(plan, round, stub, &layout).is_empty())
            || pool.reserved_bytes(&layout) > 0;
        let found = match is_left {
            true => self.beside_others(path, stub, plan, spare_open),
            false => Ok(false),
        };
        self.defragged.before.add(fragments);
        self.defragged.after.add(match pool.layout(stub.as_fd()) {
            Ok(Some(now)) if now != layout => pool.fragments(&now),
            _ => fragments,
        });
        found
    }

    /// Checks that each object opens while no thread changes the file: without its lock the
    /// file may have other objects by now.
    fn check_opens(&self, stub: &OwnedFd) -> Result<(), PoolError> {
        let held = match self.door.open_stub(stub) {
            Ok(held) => held,
            Err(error) => return Err(unopened(error)),
        };
        let Some(held) = held else {
            return Ok(());
        };
        let state = held.file.state();
        let all = state.layout.as_ref();
        all.map_or(Ok(()), |layout| self.door.pool.check_objects(layout))
    }

    /// As [`Mover::file`], for a file that needs work.
    fn beside_others(
        &mut self,
        path: &Path,
        stub: &OwnedFd,
        plan: &Plan,
        spare_open: bool,
    ) -> Result<bool, PoolError> {
        let held = match self.door.open_stub(stub) {
            Ok(Some(held)) => held,
            Ok(None) | Err(Errno::XDEV) => return Ok(false),
            Err(error) => return Err(unopened(error)),
        };
        if spare_open && held.has_others() {
            return Ok(true);
        }
        if held.check_passed() {
            self.passed = Some(path.to_path_buf());
            return Ok(true);
        }
        let before = self.step_count;
        let done = self.open_file(&held, plan);
        if matches!(plan, Plan::Together(_)) && self.check_wanted().is_ok() && !held.has_others() {
            self.door.give_back(&held);
        }
        let is_moved = self.step_count > before;
        self.done.moved_count += u64::from(is_moved);
        done.map(|()| is_moved)
    }

    fn open_file(&mut self, held: &MovedFile<'_>, plan: &Plan) -> Result<(), PoolError> {
        for round in 0..ROUNDS {
            let layout = held.file.state().layout.clone();
            let moves = layout.map(|now| self.moves(plan, round, &held.file.stub, &now));
            for (one, rooms) in moves.unwrap_or_default() {
                self.take_steps(held, one, rooms)?;
            }
        }
        Ok(())
    }

    /// The moves of a round that were not tried in vain, each with its room.
    fn moves(
        &self,
        plan: &Plan,
        round: usize,
        stub: &OwnedFd,
        layout: &Layout,
    ) -> Vec<(Move, Rooms)> {
        let pool = &self.door.pool;
        let is_new = |one: Move| {
            let Some(how) = one.how() else {
                return Some((one, Rooms::new()));
            };
            let rooms = pool.rooms_for(how, layout);
            let stamp = pool.stamp(layout);
            let mut vain = locked(&self.door.tidying.vain);
            let is_known = |stamp| vain.is_known(layout.file, how, stamp, &rooms);
            let is_vain = stamp.is_some_and(is_known);
            (!is_vain).then_some((one, rooms))
        };
        let all = plan.moves(round, pool, stub, layout).into_iter();
        all.filter_map(is_new).collect()
    }

    /// Remembers a move that failed, until the file or the room changes.
    fn remember(&self, held: &MovedFile<'_>, one: &Move, rooms: Rooms) {
        let state = held.file.state();
        let Some((how, layout)) = one.how().zip(state.layout.as_ref()) else {
            return;
        };
        if let Some(stamp) = self.door.pool.stamp(layout) {
            let mut vain = locked(&self.door.tidying.vain);
            vain.remember(layout.file, how, stamp, rooms);
        }
    }

    fn take_steps(
        &mut self,
        held: &MovedFile<'_>,
        mut one: Move,
        rooms: Rooms,
    ) -> Result<(), PoolError> {
        loop {
            match self.is_tidying {
                // A program that opened the file since the last look must not wait for a step that
                // has not begun.
                true => self.told(true)?,
                false => self.check_wanted()?,
            }
            let begun = Instant::now();
            let step = match held.has_others() {
                true => STEP_BESIDE_OTHERS,
                false => STEP,
            };
            self.door.read_before(held, &one, step);
            let waited = begun.elapsed();
            let Some(moved) = self.door.move_step(held, &mut one, step)? else {
                if one.was_vain() {
                    self.remember(held, &one, rooms);
                }
                return Ok(());
            };
            self.step_count += 1;
            self.done.moved_bytes += moved.copied;
            self.told(true)?;
            self.rest(&moved, waited, begun.elapsed())?;
        }
    }

    /// `waited`  the part of `took` spent behind all other reads
    fn rest(&mut self, moved: &Moved, waited: Duration, took: Duration) -> Result<(), PoolError> {
        let of =
            |time: Duration| units::Duration(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let worked = of(took.saturating_sub(waited));
        let (copied, took) = (ByteCount(moved.copied), of(took));
        let unpromised = self.door.unpromised(moved);
        let due = match self.is_tidying && self.door.tidying.is_beside_others() {
            true => rest_beside(copied, (took, worked), unpromised),
            false => rest(copied, took, unpromised),
        };
        let mut left = Duration::from_nanos(due.0);
        while left > Duration::ZERO {
            let nap = left.min(NAP);
            std::thread::sleep(nap);
            left -= nap;
            self.told(false)?;
        }
        Ok(())
    }

    /// Reports the progress, unless it did so just now.
    fn told(&mut self, is_new: bool) -> Result<(), PoolError> {
        if is_new || self.told_at.elapsed() >= TELL_EVERY {
            self.told_at = Instant::now();
            self.door.care.set(self.done);
            self.is_unwanted |= !(self.tell)(&Told::Moved { now: self.done });
        }
        self.check_wanted()
    }

    /// Refuses to go on when the mount ends, or the work is not wanted any more.
    fn check_wanted(&self) -> Result<(), PoolError> {
        if self.door.closing.load(Ordering::Acquire) {
            return Err(WorkRefusal::Unmounting.into());
        }
        if self.is_unwanted {
            return Err(WorkRefusal::Unwanted.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    fn may(has_command: bool) -> Result<(), Wait> {
        match has_command {
            true => Err(Wait::Command),
            false => Ok(()),
        }
    }

    fn until(what: &str, is_so: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < end, "never {what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_command_that_comes_while_it_is_looked_at_waits_and_ends_the_tidying() {
        let care = Care::default();
        let is_begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (care, is_begun) = (&care, &is_begun);
            let (come, comes) = std::sync::mpsc::channel();
            let command = scope.spawn(move || {
                comes.recv().expect("it is told");
                let busy = care.begin(WorkKind::Drain, Some(1), None);
                is_begun.store(true, Ordering::Release);
                busy.map(drop)
            });
            let tidying = care.begin_tidying(WorkKind::Rebalance, |has_command| {
                // From here on the command may come at any instant: nothing lies between the look
                // and the beginning.
                come.send(()).expect("it listens");
                std::thread::sleep(Duration::from_millis(20));
                may(has_command)
            });
            let tidying = tidying.expect("nobody had come");
            until("seen", || care.has_command());
            // Nor does it slip in between two kinds of tidying.
            tidying.turn_to(WorkKind::Defrag);
            assert_eq!(
                care.work().map(|work| (work.kind, work.is_tidying)),
                Some((WorkKind::Defrag, true))
            );
            assert!(!is_begun.load(Ordering::Acquire));
            drop(tidying);
            command.join().expect("it ends").expect("it is not refused");
        });
        assert!(!care.has_command() && care.work().is_none());
    }

    #[test]
    fn a_command_that_is_there_is_told_to_who_looks_and_nothing_is_begun_beside_it() {
        let care = Care::default();
        let command = care.begin(WorkKind::Drain, Some(1), None).expect("free");
        let mut told = None;
        let refused = care.begin_tidying(WorkKind::Rebalance, |has_command| {
            told = Some(has_command);
            Ok(())
        });
        assert_eq!(refused.err(), Some(Wait::Command));
        assert_eq!(told, Some(true));
        drop(command);
        // A refusal leaves no state behind.
        let refused = care.begin_tidying(WorkKind::Rebalance, |_| Err(Wait::Asked));
        assert_eq!(refused.err(), Some(Wait::Asked));
        assert!(care.work().is_none());
    }

    #[test]
    fn commands_are_neither_refused_by_tidying_nor_beside_it() {
        const COMMANDS: usize = 2000;
        let care = Care::default();
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let (busy_count, is_done) = (AtomicUsize::new(0), AtomicBool::new(false));
        let alone = || {
            assert_eq!(busy_count.fetch_add(1, Ordering::AcqRel), 0, "two at once");
            std::thread::yield_now();
            busy_count.fetch_sub(1, Ordering::AcqRel);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Acquire) {
                    if let Ok(busy) = care.begin_tidying(WorkKind::Rebalance, may) {
                        alone();
                        busy.turn_to(WorkKind::Defrag);
                        alone();
                    }
                }
            });
            // Also by a panic.
            let _ends = Ends(&is_done);
            for _ in 0..COMMANDS {
                let busy = care.begin(WorkKind::Drain, Some(0), None);
                alone();
                drop(busy.expect("nobody else commands"));
            }
        });
    }
}
