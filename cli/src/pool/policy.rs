// SPDX-License-Identifier: Apache-2.0
//! `rushes pool policy`: shows or sets where files of a pool go, by the policy of the pool, a rule,
//! a folder or a file. Does not ask the daemon, and moves nothing.

use super::error::CommandError;
use super::opening::serve;
use super::words::{class_of, shown, told};
use crate::args::PoolPolicyArgs;
use crate::ask::{print_json, say};
use crate::show::Table;
use rushes_pool::{
    Class, Door, Place, PolicyChange, Pool, PoolError, Request, Schedule, WISH_ATTRIBUTE,
    WISH_BYTES_MAX, Wish, change_policy,
};
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// Where files go.
#[derive(Debug, Serialize)]
pub(crate) struct PolicyReport {
    pub(crate) catalogue: String,
    pub(crate) path: Option<String>,
    pub(crate) own: Option<String>,
    pub(crate) wish: String,
    pub(crate) policy: &'static str,
    pub(crate) tidy: String,
    pub(crate) is_served: bool,
    pub(crate) rules: Vec<RuleReport>,
    pub(crate) members: Vec<ClassReport>,
}

/// The policy of files that are made under names of a pattern.
#[derive(Debug, Serialize)]
pub(crate) struct RuleReport {
    pub(crate) pattern: String,
    pub(crate) wish: String,
}

/// A member and its class.
#[derive(Debug, Serialize)]
pub(crate) struct ClassReport {
    pub(crate) number: u16,
    pub(crate) path: String,
    pub(crate) assigned_class: Option<String>,
}

pub(crate) fn policy(args: &PoolPolicyArgs) -> Result<ExitCode, String> {
    let place = rushes_pool::find(&args.path).map_err(told)?;
    let path = args
        .path
        .canonicalize()
        .map_err(|error| CommandError::at(&args.path, error))?;
    let (report, sentence) = if path == place.catalogue {
        of_pool(args, &place.catalogue)?
    } else {
        of_path(args, &path, &place)?
    };
    if args.json {
        print_json(&report)?;
    } else {
        say(&text(&report))?;
        if args.wish().is_some() || args.is_about_rules() || !args.class.is_empty() {
            say(sentence)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the report after the change, and a sentence on the files to which a change applies
fn of_pool(
    args: &PoolPolicyArgs,
    catalogue: &Path,
) -> Result<(PolicyReport, &'static str), String> {
    let change = PolicyChange {
        wish: args.wish(),
        rules: args.rules()?,
        classes: args.class.clone(),
    };
    if change != PolicyChange::default() {
        set(catalogue, change).map_err(told)?;
    }
    if let Some(schedule) = args.tidy {
        set_tidy(catalogue, schedule)?;
    }
    let pool = Pool::look(catalogue).map_err(told)?;
    let report = report(&pool, None, None, pool.wish())?;
    Ok((
        report,
        if args.is_about_rules() {
            "Rules count for files that are made from now on; others stay as they are, and where they are.\n"
        } else {
            "It counts for files that get their first bytes from now on; others stay where they are.\n"
        },
    ))
}

/// Sets classes by the mount, if one has the pool; all else only if none has.
fn set(catalogue: &Path, change: PolicyChange) -> Result<(), PoolError> {
    let is_of_classes = change
        == PolicyChange {
            classes: change.classes.clone(),
            ..PolicyChange::default()
        };
    match serve(catalogue) {
        Ok(pool) => change_policy(pool, change),
        Err(error @ PoolError::Served { .. }) if is_of_classes => match Door::of(catalogue) {
            Some(door) => {
                let classes = change.classes.iter();
                let named = |class: &Class| class.name().to_owned();
                let classes = classes.map(|(number, class)| (number.0, class.as_ref().map(named)));
                let classes = classes.collect();
                door.ask(&Request::Classes { classes }, |_| {}).map(drop)
            }
            None => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// By the mount, if one has the pool.
fn set_tidy(catalogue: &Path, schedule: Schedule) -> Result<(), String> {
    let asked = match serve(catalogue) {
        Ok(pool) => rushes_pool::set_schedule(&pool, schedule),
        Err(error @ PoolError::Served { .. }) => match Door::of(catalogue) {
            Some(door) => {
                let schedule = schedule.to_string();
                let request = Request::Tidy { schedule };
                door.ask(&request, |_| {}).map(drop)
            }
            None => Err(error),
        },
        Err(error) => Err(error),
    };
    asked.map_err(told)
}

fn of_path(
    args: &PoolPolicyArgs,
    path: &Path,
    place: &Place,
) -> Result<(PolicyReport, &'static str), String> {
    let pool = Pool::look(&place.catalogue).map_err(told)?;
    if args.tidy.is_some() {
        return Err(format!(
            "--tidy is for the whole pool; expected the catalogue, {}",
            place.catalogue.display()
        ));
    }
    if !args.class.is_empty() {
        return Err(format!(
            "--class is for members; expected the catalogue, {}",
            place.catalogue.display()
        ));
    }
    if args.is_about_rules() {
        return Err(format!(
            "rules are for the whole pool; expected the catalogue, {}",
            place.catalogue.display()
        ));
    }
    let kind = path
        .metadata()
        .map_err(|error| CommandError::at(path, error))?;
    if !kind.is_file() && !kind.is_dir() {
        return Err(CommandError::at(
            path,
            "it is neither a file nor a folder; expected one of these, since nothing else has \
             bytes on members",
        )
        .into());
    }
    if let Some(wish) = args.wish() {
        if path.starts_with(&place.catalogue) && pool.catalogue().is_served().map_err(told)? {
            let fault = "it is in the catalogue of a pool that is in use; expected its path below \
                         the mount";
            return Err(CommandError::at(path, fault).into());
        }
        if let Some(lacked) = pool.cannot_meet(&wish) {
            return Err(lacked.to_string());
        }
        set_own(path, &wish)?;
    }
    let own = own(path)?;
    let said = own.as_deref().map(Wish::of);
    let wish = said
        .and_then(Result::ok)
        .unwrap_or_default()
        .or(&pool.wish());
    let report = report(&pool, Some(path), own, wish)?;
    let sentence = if kind.is_dir() {
        "It counts for files and folders that are created in it from now on; existing ones stay as \
         they are.\n"
    } else {
        "It counts when its first bytes are written; bytes that it has stay where they are.\n"
    };
    Ok((report, sentence))
}

fn set_own(path: &Path, wish: &Wish) -> Result<(), CommandError> {
    let done = if *wish == Wish::default() {
        match removexattr(path, WISH_ATTRIBUTE) {
            Err(Errno::NODATA) => Ok(()),
            done => done,
        }
    } else {
        let value = wish.to_string();
        setxattr(path, WISH_ATTRIBUTE, value.as_bytes(), XattrFlags::empty())
    };
    done.map_err(|error| CommandError::at(path, format!("{WISH_ATTRIBUTE} cannot be set: {error}")))
}

/// The policy of a file or folder itself. None: it has none.
fn own(path: &Path) -> Result<Option<String>, CommandError> {
    let mut value = [0; WISH_BYTES_MAX];
    match getxattr(path, WISH_ATTRIBUTE, &mut value[..]) {
        Ok(length) => Ok(Some(String::from_utf8_lossy(&value[..length]).into_owned())),
        Err(Errno::NODATA) => Ok(None),
        Err(Errno::RANGE) => Ok(Some(String::from("…"))),
        Err(error) => Err(CommandError::at(path, error)),
    }
}

fn report(
    pool: &Pool,
    path: Option<&Path>,
    own: Option<String>,
    wish: Wish,
) -> Result<PolicyReport, String> {
    let members = pool.members();
    Ok(PolicyReport {
        catalogue: shown(pool.catalogue().path()),
        path: path.map(shown),
        own,
        policy: wish.choose.unwrap_or(pool.policy()).name(),
        wish: wish.to_string(),
        tidy: pool.schedule().to_string(),
        is_served: pool.catalogue().is_served().map_err(told)?,
        rules: pool
            .rules()
            .iter()
            .map(|rule| RuleReport {
                pattern: rule.pattern().to_owned(),
                wish: rule.wish().to_string(),
            })
            .collect(),
        members: members
            .iter()
            .map(|member| ClassReport {
                number: member.number().0,
                path: shown(member.path()),
                assigned_class: class_of(member),
            })
            .collect(),
    })
}

fn text(report: &PolicyReport) -> String {
    let in_force = match report.wish.as_str() {
        "" => format!("choose={}", report.policy),
        wish if wish.contains("choose=") => wish.to_owned(),
        wish => format!("{wish} choose={}", report.policy),
    };
    let Some(path) = &report.path else {
        let served = if report.is_served {
            "in use"
        } else {
            "not in use"
        };
        return format!(
            "pool {}, {served}: {in_force}; it tidies itself: {}\n{}{}",
            report.catalogue,
            report.tidy,
            classes(&report.members),
            rules(&report.rules)
        );
    };
    match report.own.as_deref().map(Wish::of) {
        None => format!("{path} has no policy of its own; its pool has: {in_force}\n"),
        Some(Ok(_)) => format!("{path}: {in_force}\n"),
        // A program has written it past the mount.
        Some(Err(fault)) => {
            format!("{path} has an invalid policy ({fault}); its pool has: {in_force}\n")
        }
    }
}

fn rules(rules: &[RuleReport]) -> String {
    if rules.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["pattern", "words"]);
    for rule in rules {
        let words = match rule.wish.as_str() {
            "" => "(none; no rule below counts)",
            words => words,
        };
        table.row(vec![rule.pattern.clone(), words.to_owned()]);
    }
    format!(
        "\nFor new files in folders without a policy; the first pattern that matches counts:\n{}",
        table.text()
    )
}

fn classes(members: &[ClassReport]) -> String {
    let mut table = Table::new(&["member", "path", "class"]);
    for member in members {
        table.row(vec![
            member.number.to_string(),
            member.path.clone(),
            member.assigned_class.clone().unwrap_or_default(),
        ]);
    }
    table.text()
}
