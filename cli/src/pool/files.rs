// SPDX-License-Identifier: Apache-2.0
//! `rushes pool where`: the places of a file's bytes.

use super::error::CommandError;
use super::state::{ShownState, state_of};
use super::words::{class_of, shown, told, whole, with_wish};
use crate::args::PoolWhereArgs;
use crate::ask::{print_json, say};
use crate::show::{self, Table};
use rushes_pool::{Layout, MemberState, Object, ObjectName, Pool, PoolError, Shape};
use serde::Serialize;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

/// The places of a file's bytes.
#[derive(Debug, Serialize)]
pub(crate) struct FileReport {
    pub(crate) file: String,
    pub(crate) catalogue: String,
    pub(crate) bytes: u64,
    pub(crate) number: Option<u64>,
    pub(crate) generation: Option<u32>,
    pub(crate) wish: String,
    pub(crate) segments: Vec<SegmentReport>,
}

/// A part of it.
#[derive(Debug, Serialize)]
pub(crate) struct SegmentReport {
    pub(crate) start: u64,
    pub(crate) end: Option<u64>,
    pub(crate) shape: &'static str,
    pub(crate) unit_bytes: Option<u64>,
    pub(crate) objects: Vec<ObjectReport>,
}

/// An object that has its bytes.
#[derive(Debug, Serialize)]
pub(crate) struct ObjectReport {
    pub(crate) member: u16,
    pub(crate) assigned_class: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) state: ShownState,
    pub(crate) reason: Option<String>,
}

pub(crate) fn where_is(args: &PoolWhereArgs) -> Result<ExitCode, String> {
    // One that is wrong keeps nobody from the others.
    let mut reports: Vec<FileReport> = Vec::new();
    let mut faults: Vec<String> = Vec::new();
    for file in &args.files {
        match file_report(file) {
            Ok(report) => reports.push(report),
            Err(fault) => faults.push(fault),
        }
    }
    if args.json {
        print_json(&reports)?;
    } else {
        let texts: Vec<String> = reports.iter().map(file_text).collect();
        say(&texts.join("\n"))?;
    }
    for fault in &faults {
        eprintln!("rushes: {fault}");
    }
    if !faults.is_empty() {
        return Ok(ExitCode::from(2));
    }
    let is_whole = reports
        .iter()
        .flat_map(|report| &report.segments)
        .flat_map(|segment| &segment.objects)
        .all(|object| matches!(object.state, ShownState::Present | ShownState::ReadOnly));
    Ok(ExitCode::from(u8::from(!is_whole)))
}

fn file_report(file: &Path) -> Result<FileReport, String> {
    let place = rushes_pool::find(file).map_err(told)?;
    let pool = Pool::look(&place.catalogue).map_err(told)?;
    let said = |error: PoolError| CommandError::at(file, error);
    let stub = pool
        .catalogue()
        .open_file_below(&place.below)
        .map_err(said)?;
    let bytes = rustix::fs::fstat(&stub)
        .map_err(|error| CommandError::at(file, error))?
        .st_size as u64;
    let layout = pool.layout(stub.as_fd()).map_err(said)?;
    let segments = layout
        .as_ref()
        .map(|layout| segments(&pool, layout))
        .unwrap_or_default();
    Ok(FileReport {
        file: shown(&whole(file)),
        catalogue: shown(pool.catalogue().path()),
        bytes,
        number: layout.as_ref().map(|layout| layout.file.number),
        generation: layout.as_ref().map(|layout| layout.file.generation),
        wish: pool.wish_of(stub.as_fd()).to_string(),
        segments,
    })
}

fn segments(pool: &Pool, layout: &Layout) -> Vec<SegmentReport> {
    layout
        .segments()
        .iter()
        .enumerate()
        .map(|(at, segment)| {
            let end = layout.range_of(at).end();
            SegmentReport {
                start: segment.start.0,
                end: (end != u64::MAX).then_some(end),
                shape: match segment.shape {
                    Shape::Single => "single",
                    Shape::Striped { .. } => "striped",
                    Shape::StripedTwice { .. } => "striped_twice",
                },
                unit_bytes: (segment.shape != Shape::Single).then(|| segment.shape.unit_bytes()),
                objects: segment
                    .objects
                    .iter()
                    .map(|&object| object_report(pool, layout, object))
                    .collect(),
            }
        })
        .collect()
}

fn object_report(pool: &Pool, layout: &Layout, object: Object) -> ObjectReport {
    let member = pool.member(object.member);
    let opened = pool.open_object(layout, object, rushes_pool::Access::Read);
    let (state, reason) = match (member.as_ref().map(|member| member.status().state), opened) {
        (Some(state @ (MemberState::Present | MemberState::ReadOnly)), Ok(_)) => state_of(&state),
        (Some(state @ MemberState::Missing(_)), _) => state_of(&state),
        (None, Err(error @ PoolError::Lost { .. })) => (ShownState::Lost, Some(error.to_string())),
        (None, Err(error)) => (ShownState::Missing, Some(error.to_string())),
        (Some(_), Err(error)) => (ShownState::Unusable, Some(error.to_string())),
        (None, Ok(_)) => (ShownState::Unusable, None),
    };
    ObjectReport {
        member: object.member.0,
        assigned_class: member.as_ref().and_then(|member| class_of(member)),
        path: member.map(|member| shown(&member.path().join(ObjectName::of(object.id).as_str()))),
        state,
        reason,
    }
}

fn file_text(report: &FileReport) -> String {
    let head = with_wish(
        &format!(
            "{}: {}",
            show::one_line(&report.file),
            show::bytes(report.bytes)
        ),
        &report.wish,
    );
    if report.segments.is_empty() {
        return format!("{head}, no member has bytes of it\n");
    }
    let mut table = Table::new(&["from", "to", "member", "object", ""]);
    for segment in &report.segments {
        for object in &segment.objects {
            table.row(vec![
                segment.start.to_string(),
                segment
                    .end
                    .map_or_else(|| String::from("end"), |end| end.to_string()),
                match &object.assigned_class {
                    Some(class) => format!("{} ({class})", object.member),
                    None => object.member.to_string(),
                },
                object.path.clone().unwrap_or_default(),
                match (object.state, &object.reason) {
                    (ShownState::Present, _) => String::new(),
                    (state, None) => state.word().to_owned(),
                    (state, Some(reason)) => format!("{}: {reason}", state.word()),
                },
            ]);
        }
    }
    format!("{head}\n{}", table.text())
}
