// SPDX-License-Identifier: Apache-2.0
//! `rushes pool ls`: a pool and its members. `create` prints the same of a new pool.

use super::opening::seen;
use super::state::{ShownState, state_of};
use super::words::{class_of, draining_text, shown, size_on, told, with_wish};
use crate::args::PoolLsArgs;
use crate::ask::{print_json, say};
use crate::show::{self, Table};
use rushes_pool::{Duty, MemberStatus, Pool};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// A pool and its members, for `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct PoolReport {
    pub(crate) catalogue: String,
    pub(crate) pool_id: String,
    pub(crate) policy: &'static str,
    pub(crate) wish: String,
    pub(crate) is_resumed: bool,
    pub(crate) bytes_total: u64,
    pub(crate) bytes_free: u64,
    pub(crate) device_count: usize,
    pub(crate) missing_count: usize,
    pub(crate) warnings: Vec<String>,
    pub(crate) members: Vec<MemberReport>,
}

/// A member.
#[derive(Debug, Serialize)]
pub(crate) struct MemberReport {
    pub(crate) number: u16,
    pub(crate) path: String,
    pub(crate) state: ShownState,
    pub(crate) reason: Option<String>,
    pub(crate) duty: &'static str,
    pub(crate) bytes_total: u64,
    pub(crate) bytes_free: u64,
    pub(crate) assigned_class: Option<String>,
    pub(crate) same_device_as: Vec<u16>,
    pub(crate) with_catalogue: bool,
}

pub(crate) fn ls(args: &PoolLsArgs) -> Result<ExitCode, String> {
    let catalogues = catalogues(args)?;
    let reports: Result<Vec<PoolReport>, String> = catalogues
        .iter()
        .map(|catalogue| report(&seen(catalogue)?, false))
        .collect();
    let reports = reports?;
    print_all(&reports, args.json, "ls", text)?;
    let is_whole = reports
        .iter()
        .flat_map(|report| &report.members)
        .all(|member| member.state == ShownState::Present);
    Ok(ExitCode::from(u8::from(!is_whole)))
}

/// Prints the report of `rushes pool COMMAND` on each of these pools.
pub(crate) fn print_all<Report: Serialize>(
    reports: &[Report],
    json: bool,
    command: &str,
    text: impl Fn(&Report) -> String,
) -> Result<(), String> {
    if json {
        return print_json(&reports);
    }
    if reports.is_empty() {
        return say(&format!(
            "No pool is mounted here. `rushes pool {command} CATALOGUE` looks at one that is not.\n"
        ));
    }
    let texts: Vec<String> = reports.iter().map(text).collect();
    say(&texts.join("\n"))
}

/// The catalogue of the pool in the arguments, or of all mounted pools.
pub(crate) fn catalogues(args: &PoolLsArgs) -> Result<Vec<PathBuf>, String> {
    if let Some(path) = &args.path {
        return Ok(vec![rushes_pool::find(path).map_err(told)?.catalogue]);
    }
    let mounted = rushes_pool::mounted().map_err(told)?;
    let mut all: Vec<PathBuf> = mounted.into_iter().map(|one| one.catalogue).collect();
    all.sort();
    all.dedup();
    Ok(all)
}

pub(crate) fn report(pool: &Pool, is_resumed: bool) -> Result<PoolReport, String> {
    let statuses: Vec<MemberStatus> = pool.members().iter().map(|m| m.status()).collect();
    let mut on_device: BTreeMap<u64, Vec<u16>> = BTreeMap::new();
    for (member, status) in pool.members().iter().zip(&statuses) {
        if let Some(device) = status.device {
            on_device.entry(device).or_default().push(member.number().0);
        }
    }
    let catalogue_device = pool.catalogue().device().map_err(told)?;
    let members = pool
        .members()
        .iter()
        .zip(&statuses)
        .map(|(member, status)| {
            let number = member.number().0;
            let (state, reason) = state_of(&status.state);
            let neighbours = status.device.and_then(|device| on_device.get(&device));
            MemberReport {
                number,
                path: shown(member.path()),
                state,
                reason,
                duty: member.duty().name(),
                bytes_total: status.bytes_total.0,
                bytes_free: status.bytes_free.0,
                assigned_class: class_of(member),
                same_device_as: neighbours
                    .into_iter()
                    .flatten()
                    .copied()
                    .filter(|&other| other != number)
                    .collect(),
                with_catalogue: status.device == Some(catalogue_device),
            }
        })
        .collect();
    let usage = pool.usage();
    Ok(PoolReport {
        catalogue: shown(pool.catalogue().path()),
        pool_id: format!("{:032x}", pool.id().0),
        policy: pool.wish().choose.unwrap_or(pool.policy()).name(),
        wish: pool.wish().to_string(),
        is_resumed,
        bytes_total: usage.bytes_total.0,
        bytes_free: usage.bytes_free.0,
        device_count: usage.device_count,
        missing_count: usage.missing_count,
        warnings: pool.place_warnings(),
        members,
    })
}

pub(crate) fn text(report: &PoolReport) -> String {
    let mut table = Table::new(&["member", "path", "state", "size", "free", ""]);
    for member in &report.members {
        let mut remarks: Vec<String> = member.reason.clone().into_iter().collect();
        if member.duty != Duty::Full.name() {
            remarks.push(format!("{}, takes nothing new", member.duty));
        }
        remarks.extend(
            member
                .assigned_class
                .iter()
                .map(|class| format!("class {class}")),
        );
        if !member.same_device_as.is_empty() {
            let others: Vec<String> = member
                .same_device_as
                .iter()
                .map(|other| other.to_string())
                .collect();
            remarks.push(format!("on one device with {}", others.join(", ")));
        }
        if member.with_catalogue {
            remarks.push(String::from("on one device with the catalogue"));
        }
        table.row(vec![
            member.number.to_string(),
            member.path.clone(),
            member.state.word().to_owned(),
            size_on(member.state, member.bytes_total),
            size_on(member.state, member.bytes_free),
            remarks.join("; "),
        ]);
    }
    let devices = match report.device_count {
        1 => String::from("one device"),
        count => format!("{count} devices"),
    };
    let missing = match report.missing_count {
        0 => String::new(),
        count => format!(", {count} of {} members missing", report.members.len()),
    };
    let warnings: String = report
        .warnings
        .iter()
        .map(|warning| format!("Warning: {warning}.\n"))
        .collect();
    let draining = report.members.iter();
    let draining = draining.filter(|member| member.duty == Duty::Draining.name());
    format!(
        "pool {} ({}), {} free of {} on {devices}{missing}\n{}{}{warnings}",
        report.catalogue,
        with_wish(report.policy, &report.wish),
        show::bytes(report.bytes_free),
        show::bytes(report.bytes_total),
        table.text(),
        draining_text(&report.catalogue, draining.map(|member| member.number))
    )
}
