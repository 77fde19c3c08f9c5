// SPDX-License-Identifier: Apache-2.0
//! CMX 3600 edit decision lists: which stretch of which clip a timeline shows, one after the other.
//!
//! The parser reads events with picture, such as `V`, `B` and `AA/V`, their reels and the comment
//! `FROM CLIP NAME`, which takes precedence over the reel. It skips sound, effects and the speed in
//! `M2`: their load on a disk is little or unknown. A dissolve or wipe becomes the cut to its new
//! clip. It counts drop-frame time code as if it dropped no frames; that moves places, and changes
//! lengths by next to nothing.

use anyhow::{Context, Result, bail, ensure};

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Index of its clip, in the order in which clips appear; `None`: black.
    pub clip: Option<usize>,
    /// The clip's name.
    pub name: String,
    /// The clip's reel.
    pub reel: String,
    /// Line of the list.
    pub line: usize,
    /// Its first frame in the clip, counted from the clip's earliest frame in the list.
    pub from: u64,
    /// Its length.
    pub frame_count: u64,
}

/// An event before clips are known: frames of time code.
struct Raw {
    line: usize,
    reel: String,
    clip_name: Option<String>,
    source_in: u64,
    frame_count: u64,
}

const BLACK: &str = "BL";
const CLIP_NAME: &str = "FROM CLIP NAME:";
/// No human makes longer lists. Units: lines.
const LINES_MAX: usize = 100_000;

/// Events with picture, in the order of the list.
///
/// Units    rate: time code's frames a second
/// Errors   a line that should be an event and is none, or no event at all: the line, the words
/// found, the form expected, the remedy
pub fn parse(bytes: &[u8], rate: u64) -> Result<Vec<Event>> {
    ensure!(
        !bytes.contains(&0),
        "it has bytes of 0, so it is not text; export a CMX 3600 EDL"
    );
    let text = String::from_utf8_lossy(bytes);
    let mut raws: Vec<Raw> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        ensure!(
            number <= LINES_MAX,
            "it has more than {LINES_MAX} lines; give a shorter one"
        );
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(first) = words.first() else {
            continue;
        };
        if let Some(name) = line
            .trim_start_matches(['*', ' ', '\t'])
            .strip_prefix(CLIP_NAME)
        {
            if let Some(last) = raws.last_mut() {
                last.clip_name = Some(name.trim().to_owned());
            }
            continue;
        }
        if !first.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let found = event(&words, number, rate)
            .with_context(|| format!("line {number}, `{}`", line.trim()))?;
        raws.extend(found);
    }
    ensure!(
        !raws.is_empty(),
        "no event with picture was found in {} lines; expected lines such as \
         `001  A001 V C  01:00:00:00 01:00:03:00 00:00:00:00 00:00:03:00`",
        text.lines().count()
    );
    Ok(name_clips(raws))
}

/// `None`: it has no picture, or no length, like the first half of a dissolve.
fn event(words: &[&str], line: usize, rate: u64) -> Result<Option<Raw>> {
    ensure!(
        words.len() >= 8,
        "{} words were read; expected number, reel, track, transition and four time codes",
        words.len()
    );
    let codes = &words[words.len() - 4..];
    let mut times = [0; 4];
    for (time, code) in times.iter_mut().zip(codes) {
        *time = frames_of(code, rate)?;
    }
    let [source_in, source_out, record_in, record_out] = times;
    ensure!(
        source_in <= source_out && record_in <= record_out,
        "it ends before it begins; expected the later time code behind the earlier one: correct the EDL"
    );
    let track = words[2].to_ascii_uppercase();
    let has_picture = track == "B" || track.contains('V');
    // With a speed the two lengths differ; the viewer sees the timeline's.
    let frame_count = record_out - record_in;
    if !has_picture || frame_count == 0 {
        return Ok(None);
    }
    Ok(Some(Raw {
        line,
        reel: words[1].to_owned(),
        clip_name: None,
        source_in,
        frame_count,
    }))
}

/// Parses `HH:MM:SS:FF`; drop-frame time code has `;` or `.` in place of a colon.
fn frames_of(code: &str, rate: u64) -> Result<u64> {
    let parts: Vec<&str> = code.split([':', ';', '.']).collect();
    let numbers: Option<Vec<u64>> = parts
        .iter()
        .map(|part| part.parse().ok().filter(|_| part.len() == 2))
        .collect();
    let Some([hours, minutes, seconds, frames]) = numbers.as_deref() else {
        bail!("`{code}` is not a time code; expected HH:MM:SS:FF: correct the EDL");
    };
    ensure!(
        *minutes < 60 && *seconds < 60 && *frames < rate,
        "`{code}` is not a time code at {rate} frames a second; expected at most 59:59:{:02} \
         behind the hours: correct the EDL, or give its rate with --fps",
        rate - 1
    );
    Ok(((hours * 60 + minutes) * 60 + seconds) * rate + frames)
}

fn name_clips(raws: Vec<Raw>) -> Vec<Event> {
    // Each clip with its earliest frame in the list.
    let mut clips: Vec<(String, u64)> = Vec::new();
    let mut events = Vec::new();
    for raw in raws {
        let is_black = raw.reel.eq_ignore_ascii_case(BLACK);
        let name = raw.clip_name.unwrap_or_else(|| raw.reel.clone());
        let clip =
            (!is_black).then(
                || match clips.iter_mut().position(|(known, _)| *known == name) {
                    Some(index) => {
                        clips[index].1 = clips[index].1.min(raw.source_in);
                        index
                    }
                    None => {
                        clips.push((name.clone(), raw.source_in));
                        clips.len() - 1
                    }
                },
            );
        events.push(Event {
            clip,
            name,
            reel: raw.reel,
            line: raw.line,
            from: raw.source_in,
            frame_count: raw.frame_count,
        });
    }
    for event in &mut events {
        event.from -= event.clip.map_or(event.from, |clip| clips[clip].1);
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "TITLE: TRAILER\nFCM: NON-DROP FRAME\n\n\
        001  A001C003 V     C        01:00:10:00 01:00:13:00 10:00:00:00 10:00:03:00\n\
        * FROM CLIP NAME: A001C003_220101.MXF\n\
        002  A002C001 AA/V  C        02:00:00:00 02:00:01:12 10:00:03:00 10:00:04:12\n\
        003  A001C003 A     C        01:00:10:00 01:00:13:00 10:00:00:00 10:00:03:00\n\
        004  BL       V     C        00:00:00:00 00:00:01:00 10:00:04:12 10:00:05:12\n\
        005  A001C003 V     D    024 01:00:05:00 01:00:07:00 10:00:05:12 10:00:07:12\n\
        M2   A001C003       050.0                01:00:05:00\n\
        * FROM CLIP NAME: A001C003_220101.MXF\n";

    #[test]
    fn events_with_picture_are_read_with_their_clips_and_places() {
        let events = parse(GOOD.as_bytes(), 25).unwrap();
        let told: Vec<_> = events
            .iter()
            .map(|e| (e.clip, e.name.as_str(), e.from, e.frame_count, e.line))
            .collect();
        assert_eq!(
            told,
            [
                (Some(0), "A001C003_220101.MXF", 125, 75, 4),
                (Some(1), "A002C001", 0, 37, 6),
                (None, "BL", 0, 25, 8),
                (Some(0), "A001C003_220101.MXF", 0, 50, 9),
            ]
        );
    }

    fn complaint(text: &[u8]) -> String {
        format!("{:#}", parse(text, 25).unwrap_err())
    }

    #[test]
    fn what_is_no_list_is_refused_with_line_finding_and_remedy() {
        let line = "001 A V C 00:00:00:00 00:00:03:30 00:00:00:00 00:00:03:00\n";
        let said = complaint(format!("TITLE: X\n{line}").as_bytes());
        assert!(
            said.contains("line 2") && said.contains("`00:00:03:30`"),
            "{said}"
        );
        assert!(said.contains("--fps"), "{said}");
        let said = complaint(b"001 A V C 00:00:00:00 00:00:03:00 soon 00:00:03:00\n");
        assert!(said.contains("`soon` is not a time code"), "{said}");
        let said = complaint(b"001 A V C 00:00:04:00 00:00:03:00 00:00:00:00 00:00:03:00\n");
        assert!(said.contains("ends before it begins"), "{said}");
        let said = complaint(b"001 A V\n");
        assert!(
            said.contains("3 words") && said.contains("four time codes"),
            "{said}"
        );
        let said = complaint(b"Dear Sir,\nhere is the list.\n");
        assert!(
            said.contains("no event") && said.contains("2 lines"),
            "{said}"
        );
        assert!(complaint(b"\x00\x01EDL").contains("bytes of 0"));
        assert!(complaint(b"").contains("no event"));
    }
}
