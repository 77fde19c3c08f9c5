// SPDX-License-Identifier: Apache-2.0
//! The configuration by example: values that are accepted, and every sentence that an operator may
//! see.

use super::*;

const SHARE: &str = "[[share]]\nname = \"media\"\npath = \"/srv/media\"\n";

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new("rushes.toml"), text, |group| group == "video")
}

fn problems(text: &str) -> Vec<String> {
    match parse(text) {
        Ok(_) => panic!("accepted: {text}"),
        Err(ConfigError::Wrong { problems, .. }) => {
            problems.iter().map(|problem| problem.to_string()).collect()
        }
        Err(other) => panic!("{other}"),
    }
}

/// The defaults in the tables of `[section]` in docs/reference/config.md, as TOML; a key that has
/// none is left out.
fn documented_defaults(section: &str) -> Vec<String> {
    include_str!("../../../../docs/reference/config.md")
        .split("\n## ")
        .find(|part| part.starts_with(&format!("[{section}]\n")))
        .unwrap_or_else(|| panic!("config.md has no section [{section}]"))
        .lines()
        .filter_map(|line| {
            let cell = |index| {
                line.split('|')
                    .nth(index)?
                    .trim()
                    .strip_prefix('`')?
                    .strip_suffix('`')
            };
            Some(format!("{} = {}\n", cell(1)?, cell(2)?))
        })
        .collect()
}

#[test]
fn what_is_left_out_is_as_documented() {
    let (cache, server) = (documented_defaults("cache"), documented_defaults("server"));
    assert!(
        cache.len() == 2 && server.len() >= 8,
        "{cache:?} {server:?}"
    );
    let text = format!(
        "[cache]\n{}[server]\n{}{SHARE}",
        cache.concat(),
        server.concat()
    );
    let written = parse(&text).unwrap_or_else(|error| panic!("{text}\n{error}"));
    let left_out = parse(SHARE).unwrap();
    assert_eq!(format!("{left_out:#?}"), format!("{written:#?}"));
    assert_eq!(left_out.shares[0].name, "media");
    assert!(left_out.metrics_listen.is_none() && left_out.control_group.is_none());
}

#[test]
fn every_key_is_read() {
    let config = parse(
        r#"
        [cache]
        bytes = "256MiB"
        buffer_bytes = 262_144
        [server]
        runtime_dir = "/run//rushes2/"
        state_dir = "/var/lib/rushes2"
        preroll = "250ms"
        pause = "90s"
        margin = "5.5%"
        analyser = true
        contracts_from_cadence = false
        contracts_from_header = false
        coalesce = false
        rehearsal = false
        warm_metadata = false
        control_group = "video"
        metrics_listen = "127.0.0.1:9464"
        [[share]]
        name = "media"
        path = "/srv/media"
        [[share]]
        name = "archive"
        path = "/srv/media2"
        exclusive = true
        [[rule]]
        match = "**/*.dpx"
        share = "ARCHIVE"
        frames_per_second = 23.976
        [[rule]]
        match = "footage/**/*.mov"
        bitrate = "100M"
        "#,
    )
    .unwrap();
    assert_eq!(config.cache_bytes, 256 << 20);
    assert_eq!(config.buffer_bytes, 256 << 10);
    assert_eq!(config.runtime_dir, Path::new("/run/rushes2"));
    assert_eq!(config.policy.preroll, Duration::from_ms(250));
    assert_eq!(config.policy.pause, Duration::from_s(90));
    assert_eq!(config.policy.margin_permille, 55);
    assert!(!config.warm_metadata && !config.policy.coalesce);
    assert!(!config.policy.rehearsal);
    let exclusive = config.shares.iter().map(|share| share.exclusive);
    assert!(exclusive.eq([false, true]));
    assert!(!config.policy.contracts_from_cadence && !config.policy.contracts_from_header);
    assert_eq!(config.control_group.as_deref(), Some("video"));
    assert_eq!(config.metrics_listen.map(|a| a.port()), Some(9464));
    assert_eq!(config.rules.len(), 2);

    let mov = RateHint::Rate(BytesPerSecond(12_500_000), RateSource::Rule);
    let dpx = RateHint::FramesPerKilosecond(23_976, RateSource::Rule);
    for (share, path, expect) in [
        ("media", "footage/a/b/take 1.mov", Some(mov)),
        ("media", "footage/take.mov", Some(mov)),
        ("media", "other/take.mov", None),
        ("media", "footage/take.MOV", None),
        ("archive", "x/shot.0001.dpx", Some(dpx)),
        ("archive", "shot.0001.dpx", Some(dpx)),
        ("media", "x/shot.0001.dpx", None),
    ] {
        assert_eq!(config.rule_for(share, path), expect, "{share} {path}");
    }
}

#[test]
fn the_first_rule_that_matches_counts() {
    let text = format!(
        "{SHARE}[[rule]]\nmatch = \"proxy/*\"\nbitrate = \"10M\"\n\
         [[rule]]\nmatch = \"**\"\nbitrate = \"80M\"\n"
    );
    let config = parse(&text).unwrap();
    for (path, bytes_per_s) in [("proxy/a", 1_250_000), ("proxy/x/a", 10_000_000)] {
        assert_eq!(
            config.rule_for("media", path),
            Some(RateHint::Rate(
                BytesPerSecond(bytes_per_s),
                RateSource::Rule
            ))
        );
    }
}

#[test]
fn name_that_two_shares_have_is_told_also_when_one_of_them_is_wrong_otherwise() {
    let text =
        "[[share]]\nname = \"b\"\npath = \"srv\"\n[[share]]\nname = \"B\"\npath = \"/srv/b\"\n";
    let problems = problems(text);
    assert_eq!(problems.len(), 2, "{problems:#?}");
    let expect = "line 5: share[2].name = \"B\": the share of line 1 has this name already";
    assert!(problems[1].contains(expect), "{problems:#?}");
}

/// Each: text before and after a valid share, and the full sentence of the one problem.
#[test]
fn every_mistake_is_told_with_line_key_value_and_remedy() {
    for (before, after, expect) in [
        (
            "[cache]\nbytes = \"1GX\"\n",
            "",
            "line 2: cache.bytes = \"1GX\": expected a size in bytes such as 1073741824, \"1GiB\" or \"512MiB\"",
        ),
        (
            "[cache]\nbytes = -5\n",
            "",
            "line 2: cache.bytes = -5: expected a size in bytes",
        ),
        (
            "[cache]\nbytes = \"63MiB\"\n",
            "",
            "line 2: cache.bytes = \"63MiB\": expected at least 64 MiB (64 buffers of 1 MiB)",
        ),
        (
            "[cache]\nbytes = \"3MiB\"\nbuffer_bytes=\"64KiB\"\n",
            "",
            "line 2: cache.bytes = \"3MiB\": expected at least 4 MiB (64 buffers of 64 KiB)",
        ),
        (
            "[cache]\nbytes = \"2TiB\"\n",
            "",
            "line 2: cache.bytes = \"2TiB\": expected at most \"1TiB\"",
        ),
        (
            "[cache]\nbuffer_bytes = 1_000_000\n",
            "",
            "line 2: cache.buffer_bytes = 1_000_000: expected a power of two from \"64KiB\" to \"1MiB\"",
        ),
        (
            "[cache]\nbuffer_bytes = \"2MiB\"\n",
            "",
            "expected a power of two",
        ),
        (
            "[cache]\nbites = 5\n",
            "",
            "line 2: cache.bites: there is no such key; did you mean `bytes`?",
        ),
        (
            "[cash]\nbytes = 5\n",
            "",
            "line 1: cash: there is no such section; did you mean `cache`?",
        ),
        (
            "zebra = 5\n",
            "",
            "line 1: zebra: there is no such key; known here: cache, write, server, share, rule",
        ),
        (
            "cache = 5\n",
            "",
            "line 1: cache = 5: expected a section [cache]",
        ),
        (
            "[server]\npreroll = 500\n",
            "",
            "line 2: server.preroll = 500: expected a time with its unit (ms, s, min or h), such as \"500ms\" or \"2s\"",
        ),
        (
            "[server]\npreroll = \"0ms\"\n",
            "",
            "server.preroll = \"0ms\": expected at least \"100ms\", since a disk may take that long to answer, and at most \"60s\"",
        ),
        ("[server]\npreroll = \"2min\"\n", "", "at most \"60s\""),
        (
            "[server]\npre_roll = \"2s\"\n",
            "",
            "server.pre_roll: there is no such key; did you mean `preroll`?",
        ),
        (
            "[server]\nmargin = 2\n",
            "",
            "line 2: server.margin = 2: expected a share of the device in per cent, such as \"2%\"",
        ),
        (
            "[server]\nmargin = \"51%\"\n",
            "",
            "server.margin = \"51%\": expected at most \"50%\"",
        ),
        (
            "[server]\nanalyser = \"yes\"\n",
            "",
            "server.analyser = \"yes\": expected true or false",
        ),
        (
            "[server]\nanalyser = false\ncontracts_from_header = true\n",
            "",
            "line 3: server.contracts_from_header = true: contradicts server.analyser = false in line 2",
        ),
        (
            "[server]\nruntime_dir = \"run\"\n",
            "",
            "server.runtime_dir = \"run\": expected the full path of a folder",
        ),
        (
            "[server]\nstate_dir = \"/var/../etc\"\n",
            "",
            "server.state_dir = \"/var/../etc\": expected the full path",
        ),
        (
            "[server]\ncontrol_group = \"nogroop\"\n",
            "",
            "line 2: server.control_group = \"nogroop\": there is no such group on this machine; create it (`groupadd --system nogroop`)",
        ),
        (
            "[server]\nmetrics_listen = \"9464\"\n",
            "",
            "server.metrics_listen = \"9464\": expected an address and a port, such as \"127.0.0.1:9464\"",
        ),
        (
            "",
            "[[share]]\nname = \"MEDIA\"\npath = \"/srv/b\"\n",
            "line 5: share[2].name = \"MEDIA\": the share of line 1 has this name already",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\npath = \"/srv//media/\"\n",
            "line 6: share[2].path = \"/srv//media/\": share \"media\" of line 1 has this folder already",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\npath = \"/srv/media/in\"\n",
            "line 6: share[2].path = \"/srv/media/in\": one of this folder and that of share \"media\" (line 1, /srv/media) contains the other",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\npath = \"/srv\"\n",
            "contains the other",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\npath = \"/\"\n",
            "not the root of the machine",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\n",
            "line 4: share[2]: has no path; a share needs name and path",
        ),
        (
            "",
            "[[share]]\npath = \"/b\"\n",
            "line 4: share[2]: has no name; a share needs name and path",
        ),
        (
            "",
            "[[share]]\nname = \"\"\npath = \"/b\"\n",
            "share[2].name = \"\": expected 1 to 63 bytes",
        ),
        (
            "",
            "[[share]]\nname = \"a/b\"\npath = \"/b\"\n",
            "expected a name without /",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\npath = \"b\"\n",
            "share[2].path = \"b\": expected the full path of the share's folder",
        ),
        (
            "",
            "[[share]]\nname = \"b\"\npath = \"/b\"\npaht = \"/c\"\n",
            "line 7: share[2].paht: there is no such key; did you mean `path`?",
        ),
        (
            "",
            "[rule]\nmatch = \"*\"\n",
            "line 4: rule: expected [[rule]] with two brackets, once for each rule",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\n",
            "line 4: rule[1]: has neither of bitrate and frames_per_second; expected one",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\nbitrate = 50000\nframes_per_second = 24\n",
            "line 4: rule[1]: has both of bitrate and frames_per_second",
        ),
        (
            "",
            "[[rule]]\nbitrate = \"100M\"\n",
            "line 4: rule[1]: has no match",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\nbitrate = 100\n",
            "line 6: rule[1].bitrate = 100: expected bits a second, at least \"8k\" and at most \"1000G\"; is a unit missing, as in \"100M\"?",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\nbitrate = \"100MB\"\n",
            "line 6: rule[1].bitrate = \"100MB\": expected bits a second of one stream, such as 100000000, \"100M\"",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\nframes_per_second = 0\n",
            "rule[1].frames_per_second = 0: expected more than 0 and at most 1000",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\nframes_per_second = \"24\"\n",
            "expected frames a second, such as 24 or 23.976",
        ),
        (
            "",
            "[[rule]]\nmatch = \"*\"\nbitrate = 50000\nshare = \"medja\"\n",
            "line 7: rule[1].share = \"medja\": there is no such share; did you mean \"media\"?",
        ),
        (
            "",
            "[[rule]]\nmatch = \"/abs/*\"\nbitrate = 50000\n",
            "line 5: rule[1].match = \"/abs/*\": expected a pattern below the share's root",
        ),
        (
            "",
            "[[rule]]\nmatch = \"a[\"\nbitrate = 50000\n",
            "line 5: rule[1].match = \"a[\": is not a pattern",
        ),
        (
            "",
            "[[rule]]\nmatch = \"\"\nbitrate = 50000\n",
            "expected a pattern such as",
        ),
        (
            "",
            // The matcher would fail on this pattern.
            &format!(
                "[[rule]]\nmatch = \"{}a{}\"\nbitrate = 50000\n",
                "{a,".repeat(127),
                "}".repeat(127)
            ),
            "is a pattern of 509 bytes; expected at most 255",
        ),
        (
            "",
            "[[rule]]\nmatch = \"a\"\nbitrate = 50000\n[[rule]]\nmatch = \"a\"\nbitrate = 60000\n",
            "line 8: rule[2].match = \"a\": this rule never counts: line 4 has the same pattern and comes first",
        ),
    ] {
        let text = format!("{before}{SHARE}{after}");
        let problems = problems(&text);
        assert!(
            problems.len() == 1 && problems[0].contains(expect),
            "{text}\nexpected one problem: {expect}\nread: {problems:#?}"
        );
    }
}

#[test]
fn all_problems_come_at_once_in_order_of_lines() {
    let problems = problems(
        "[cache]\nbytes = \"x\"\n[server]\npreroll = 1\n[[rule]]\nmatch = \"*\"\nbitrate = \"y\"\n",
    );
    assert_eq!(problems.len(), 4, "{problems:#?}");
    assert!(problems[0].contains("share: nothing is served"));
    assert!(problems[1].starts_with("line 2: cache.bytes"));
    assert!(problems[2].starts_with("line 4: server.preroll"));
    assert!(problems[3].starts_with("line 7: rule[1].bitrate"));
}

#[test]
fn text_that_is_no_toml_names_its_line() {
    for (text, expect) in [
        ("[cache\n", "line 1: \"[cache\" is not TOML"),
        ("[cache]\nbytes = \n", "line 2: \"bytes =\" is not TOML"),
        (
            "[cache]\nbytes = 1\nbytes = 2\n",
            "line 3: \"bytes = 2\" is not TOML: duplicate key",
        ),
        ("\u{0}", "is not TOML"),
    ] {
        let problems = problems(text);
        assert!(problems[0].contains(expect), "{text:?}: {problems:?}");
    }
}

#[test]
fn an_absent_file_says_what_to_do() {
    let error = Config::load(Path::new("/nonexistent/rushes.toml")).expect_err("no such file");
    assert!(error.to_string().contains("--config"), "{error}");
}

#[test]
fn the_sample_that_is_installed_is_right() {
    let text = include_str!("../../../../packaging/rushes.toml");
    let config = parse(text).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config.shares[0].name, "media");
    // The keys that it offers as comments are right as well.
    let offered: String = text
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(key) if key.starts_with("[[") || key.contains(" = \"") || key.contains(" = 2") => {
                format!("{key}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    let config = parse(&offered).unwrap_or_else(|error| panic!("{offered}\n{error}"));
    assert_eq!(config.rules.len(), 2);
    assert!(config.metrics_listen.is_some());
}

#[test]
fn a_rule_matches_a_name_however_its_letters_are_put_together() {
    let one_sign = "Gr\u{fc}n/**/*.mov";
    let two_signs = "Gru\u{308}n/**/*.mov";
    for pattern in [one_sign, two_signs] {
        let text = format!("{SHARE}[[rule]]\nmatch = \"{pattern}\"\nbitrate = \"100M\"\n");
        let config = parse(&text).unwrap();
        for name in ["Gr\u{fc}n/a\u{308}/x.mov", "Gru\u{308}n/\u{e4}/x.mov"] {
            assert!(
                config.rule_for("media", name).is_some(),
                "{pattern:?} {name:?}"
            );
        }
        assert!(config.rule_for("media", "Grun/x.mov").is_none());
    }
    let both = [one_sign, two_signs]
        .map(|pattern| format!("[[rule]]\nmatch = \"{pattern}\"\nbitrate = \"100M\"\n"));
    let said = problems(&format!("{SHARE}{}", both.concat()));
    assert!(said[0].contains("never counts"), "{said:?}");
}
