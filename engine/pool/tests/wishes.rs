// SPDX-License-Identifier: Apache-2.0
//! Files go where the pool's policy says: to members of a class, to the device of which least is
//! promised, and nowhere else than that.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests too say by their line what failed"
)]

mod place;

use place::{Place, Written, pattern};
use rushes_pool::{
    Class, MemberNumber, NameLog, PolicyChange, Pool, PoolError, Rule, RuleChange, Wish,
    change_policy, rescue,
};
use std::fs;
use std::path::PathBuf;

const MIB: usize = 1 << 20;

fn wish(words: &str) -> Option<Wish> {
    Some(Wish::of(words).unwrap())
}

fn classes(given: &[(u16, &str)]) -> Vec<(MemberNumber, Option<Class>)> {
    let of = |&(number, name): &(u16, &str)| (MemberNumber(number), Class::of(name));
    given.iter().map(of).collect()
}

fn rules(said: &[(&str, &str)]) -> RuleChange {
    let rule = |&(pattern, words): &(&str, &str)| Rule::of(pattern, words).unwrap();
    RuleChange {
        said: said.iter().map(rule).collect(),
        ..RuleChange::default()
    }
}

/// The policy that the pool's rules give a new file of this path.
fn said_of(pool: &Pool, path: &str) -> String {
    let wish = pool.rule_for(|| Some(PathBuf::from(path)));
    wish.unwrap_or_default().to_string()
}

/// The pool with this change from now on, opened anew.
fn changed(pool: Pool, change: PolicyChange) -> Pool {
    let catalogue = pool.catalogue().path().to_path_buf();
    change_policy(pool, change).unwrap();
    Pool::serve(&catalogue).unwrap()
}

fn put(pool: &Pool, name: &str, length: usize) -> Result<Vec<u16>, PoolError> {
    let mut file = Written::new(pool, name);
    file.write(pool, 0, &pattern(0, length))?;
    let objects = file.layout.objects();
    Ok(objects.iter().map(|object| object.member.0).collect())
}

fn device(pool: &Pool, number: u16) -> u64 {
    let member = pool.member(MemberNumber(number)).unwrap();
    member.status().device.unwrap()
}

fn format_file(pool: &Pool) -> (PathBuf, String) {
    let path = pool.catalogue().path().join("rushes-pool");
    let text = fs::read_to_string(&path).unwrap();
    (path, text)
}

#[test]
fn a_new_file_goes_to_the_device_of_which_least_is_promised() {
    let Some(mut place) = Place::new() else {
        return;
    };
    // The first has most room.
    let pool = place.pool(&[300, 200, 100]);
    let change = PolicyChange {
        wish: wish("choose=least_loaded"),
        ..PolicyChange::default()
    };
    let pool = changed(pool, change);
    assert_eq!(put(&pool, "unknown", MIB).unwrap(), [0], "by room");
    let devices = [0, 1, 2].map(|number| device(&pool, number));
    let told = |loads: [u64; 3]| pool.set_loads(devices.into_iter().zip(loads));
    told([100_000_000, 300_000_000, 200_000_000]);
    assert_eq!(put(&pool, "second", MIB).unwrap(), [1]);
    told([100_000_000, 0, 200_000_000]);
    assert_eq!(put(&pool, "third", MIB).unwrap(), [2]);
    told([200_000_000, 200_000_000, 210_000_000]);
    assert_eq!(put(&pool, "all alike", MIB).unwrap(), [0], "by room");
    pool.set_loads([(devices[2], 1)]);
    assert_eq!(put(&pool, "one known", MIB).unwrap(), [2]);
}

#[test]
fn files_of_a_class_are_on_its_members_and_the_next_hears_that_they_are_full() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[40, 6, 9]);
    let change = PolicyChange {
        wish: wish("class=ssd"),
        classes: classes(&[(1, "ssd"), (2, "ssd")]),
        ..PolicyChange::default()
    };
    let pool = changed(pool, change);
    let class = |number| {
        let member = pool.member(MemberNumber(number)).unwrap();
        member.class().map(|class| class.name().to_owned())
    };
    assert_eq!(
        [class(0), class(1), class(2)],
        [None, Some(String::from("ssd")), Some(String::from("ssd"))]
    );
    let mut count = 0;
    let end = loop {
        match put(&pool, &format!("file{count}"), MIB) {
            Ok(members) => assert!(!members.contains(&0), "{members:?}"),
            Err(error) => break error,
        }
        count += 1;
        assert!(count < 40, "it never fills");
    };
    assert!(matches!(end, PoolError::ClassFull { .. }), "{end}");
    assert!(count >= 12, "only {count} of 15 MiB were taken");
    // A file without a policy has all the room there is.
    let change = PolicyChange {
        wish: Some(Wish::default()),
        ..PolicyChange::default()
    };
    let pool = changed(pool, change);
    assert_eq!(put(&pool, "other", MIB).unwrap(), [0]);
}

#[test]
fn what_is_said_is_kept_and_what_cannot_be_followed_changes_nothing() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4, 4]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let (path, before) = format_file(&pool);
    assert!(
        !before.contains("wish") && !before.contains("class"),
        "{before}"
    );
    drop(pool);
    for (change, said) in [
        (
            PolicyChange {
                wish: wish("single"),
                classes: classes(&[(0, "ssd"), (7, "ssd")]),
                ..PolicyChange::default()
            },
            "no member 7",
        ),
        (
            PolicyChange {
                wish: wish("class=raid"),
                classes: classes(&[(0, "ssd")]),
                ..PolicyChange::default()
            },
            "they are of ssd",
        ),
    ] {
        let error = change_policy(Pool::serve(&catalogue).unwrap(), change).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
    }
}

#[test]
fn a_rescue_knows_classes_rules_and_what_was_wished() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let change = PolicyChange {
        wish: wish("choose=per_user class=raid"),
        classes: classes(&[(1, "raid")]),
        rules: rules(&[("**/*.mov", "striped=2 class=raid")]),
    };
    let pool = changed(pool, change);
    assert_eq!(put(&pool, "clip", MIB).unwrap(), [1]);
    assert!(NameLog::open(&pool).write(&pool, Vec::new));
    let catalogue = pool.catalogue().path().to_path_buf();
    let members = pool.members();
    let members: Vec<PathBuf> = members.iter().map(|member| member.path().into()).collect();
    drop(pool);
    place.unmount(&catalogue);
    place.mount(&catalogue, 16);
    rescue(&catalogue, &members, |_| {}).unwrap();
    let pool = Pool::look(&catalogue).unwrap();
    assert_eq!(pool.wish().to_string(), "choose=per_user class=raid");
    assert_eq!(said_of(&pool, "a/clip.mov"), "striped=2 class=raid");
    let class = |number| {
        pool.member(MemberNumber(number))
            .and_then(|one| one.class().cloned())
    };
    assert_eq!((class(0), class(1)), (None, Class::of("raid")));
}

#[test]
fn rules_are_in_the_format_file_only_where_there_are_some() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4, 4]);
    let (path, never) = format_file(&pool);
    // Without rules the pool does not ask for a path.
    assert_eq!(pool.rule_for(|| panic!("asked for a path")), None);
    let change = PolicyChange {
        rules: rules(&[
            ("keep/**", ""),
            ("**/*.proxy.mov", "class=archive"),
            ("**", "single"),
        ]),
        classes: classes(&[(1, "archive")]),
        ..PolicyChange::default()
    };
    let pool = changed(pool, change);
    for (name, expect) in [
        ("keep/a.proxy.mov", ""),
        ("reel/a.proxy.mov", "class=archive"),
        ("reel/a.mov", "single"),
    ] {
        assert_eq!(said_of(&pool, name), expect, "{name}");
    }
    assert_eq!(pool.rule_for(|| None), None, "a path that is not known");
    // Versions without rules refuse the file: they do not know that field.
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.matches("\"rules\": [").count(), 1, "{text}");
    let patterns = pool.rules();
    let patterns: Vec<&str> = patterns.iter().map(Rule::pattern).collect();
    assert_eq!(patterns, ["keep/**", "**/*.proxy.mov", "**"]);

    // Another change of the pool's policy leaves them alone.
    let change = PolicyChange {
        wish: wish("choose=round_robin"),
        ..PolicyChange::default()
    };
    let pool = changed(pool, change);
    assert_eq!(said_of(&pool, "reel/a.mov"), "single");

    let change = PolicyChange {
        wish: Some(Wish::default()),
        rules: RuleChange {
            is_clear: true,
            ..RuleChange::default()
        },
        classes: vec![(MemberNumber(1), None)],
    };
    let pool = changed(pool, change);
    assert!(pool.rules().is_empty());
    assert_eq!(fs::read_to_string(&path).unwrap(), never);
}

#[test]
fn a_change_of_rules_is_whole_or_not_there() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4, 4]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let first = PolicyChange {
        rules: rules(&[("a/**", "single")]),
        ..PolicyChange::default()
    };
    let pool = changed(pool, first);
    let (path, before) = format_file(&pool);
    drop(pool);
    // A change with a faulty part changes nothing, not even by its sound part.
    let check = |rules: RuleChange, classes: Vec<(MemberNumber, Option<Class>)>, said: &str| {
        let change = PolicyChange {
            wish: wish("choose=per_user"),
            rules,
            classes,
        };
        let error = change_policy(Pool::serve(&catalogue).unwrap(), change).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
    };
    check(
        rules(&[("b/**", "class=raid")]),
        classes(&[(0, "ssd")]),
        "the rule \"b/**\": no member is of the class raid (they are of ssd)",
    );
    check(rules(&[("{b", "single")]), Vec::new(), "is no pattern");
    let gone = RuleChange {
        gone: vec![String::from("b/**")],
        ..RuleChange::default()
    };
    check(gone, Vec::new(), "expected one of \"a/**\"");
    let many: Vec<String> = (0..64).map(|number| format!("{number}/**")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|name| (&**name, "single")).collect();
    check(rules(&many), Vec::new(), "65 rules; expected 64 at most");

    // An interrupted write has left a part of the next file beside it.
    let temporary = path.with_file_name("rushes-pool.tmp");
    fs::write(&temporary, &before.as_bytes()[..before.len() / 2]).unwrap();
    let pool = Pool::serve(&catalogue).unwrap();
    assert_eq!(said_of(&pool, "a/clip"), "single");
    let again = PolicyChange {
        rules: rules(&[("a/**", "striped")]),
        ..PolicyChange::default()
    };
    let pool = changed(pool, again);
    assert_eq!(said_of(&pool, "a/clip"), "striped");
    assert!(!temporary.exists());
    drop(pool);

    // The error for a damaged file names the rule.
    let (damaged, _) = (fs::read_to_string(&path).unwrap(), fs::remove_file(&path));
    fs::write(&path, damaged.replace("\"striped\"", "\"spread\"")).unwrap();
    let error = Pool::serve(&catalogue).unwrap_err().to_string();
    assert!(error.contains("the rule \"a/**\": \"spread\""), "{error}");
}
