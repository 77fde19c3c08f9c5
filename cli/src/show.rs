// SPDX-License-Identifier: Apache-2.0
//! Numbers and tables for people.

/// `100_000_000` as "100 Mb/s".
pub(crate) fn bitrate(bits_per_s: u64) -> String {
    scaled(bits_per_s as f64, &["b/s", "kb/s", "Mb/s", "Gb/s"], 1000.0)
}

/// `12_500_000` as "12.5 MB/s".
pub(crate) fn byte_rate(bytes_per_s: u64) -> String {
    scaled_fixed(bytes_per_s as f64, &["B/s", "kB/s", "MB/s", "GB/s"], 1000.0)
}

/// A number with its noun: "1 file", "2 files".
pub(crate) fn count(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// `1_073_741_824` as "1.0 GiB".
pub(crate) fn bytes(count: u64) -> String {
    scaled_fixed(count as f64, &["B", "KiB", "MiB", "GiB", "TiB"], 1024.0)
}

/// `93784` as "1 d 2 h 3 min".
pub(crate) fn uptime(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    let (d, h, m) = (s / 86_400, s / 3600 % 24, s / 60 % 60);
    match (d, h, m) {
        (0, 0, 0) => format!("{s} s"),
        (0, 0, _) => format!("{m} min {} s", s % 60),
        (0, _, _) => format!("{h} h {m} min"),
        _ => format!("{d} d {h} h {m} min"),
    }
}

/// "100 Mb/s", "1.5 Gb/s": a decimal only if it is not zero.
fn scaled(value: f64, units: &[&str], step: f64) -> String {
    let text = scaled_fixed(value, units, step);
    text.replace(".0 ", " ")
}

fn scaled_fixed(mut value: f64, units: &[&str], step: f64) -> String {
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    if unit == 0 {
        format!("{value:.0} {}", units[0])
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

/// A table of left-aligned text and right-aligned numbers, as wide as it needs to be.
pub(crate) struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// `heads`: a leading `>` marks a column that is aligned to the right.
    pub(crate) fn new(heads: &[&str]) -> Table {
        Table {
            right: heads.iter().map(|head| head.starts_with('>')).collect(),
            rows: vec![
                heads
                    .iter()
                    .map(|head| head.trim_start_matches('>').to_string())
                    .collect(),
            ],
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.right.len());
        self.rows
            .push(cells.iter().map(|cell| one_line(cell)).collect());
    }

    /// Each line indented by two.
    pub(crate) fn text(&self) -> String {
        let widths: Vec<usize> = (0..self.right.len())
            .map(|column| {
                self.rows
                    .iter()
                    .map(|row| row[column].chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::from(" ");
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let pad = " ".repeat(width - cell.chars().count());
                line.push(' ');
                line += &if *right {
                    format!("{pad}{cell}")
                } else {
                    format!("{cell}{pad}")
                };
                line.push(' ');
            }
            out += line.trim_end();
            out.push('\n');
        }
        out
    }
}

/// A name in a text: a character that would end a line, or move a terminal's cursor, is escaped as
/// in Rust. JSON has it unchanged.
pub(crate) fn one_line(text: &str) -> String {
    let each = |letter: char| match letter.is_control() {
        true => letter.escape_default().to_string(),
        false => letter.to_string(),
    };
    text.chars().map(each).collect()
}

/// A text in lines of so many columns, broken between words where that is possible.
pub(crate) fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(1);
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split(' ') {
        let mut letters: Vec<char> = word.chars().collect();
        let gap = usize::from(used > 0);
        if used + gap + letters.len() > columns && used > 0 {
            lines.push(String::new());
            used = 0;
        } else if gap > 0 {
            lines.last_mut().expect("there is one").push(' ');
            used += 1;
        }
        // A path may be longer than a line.
        while letters.len() > columns {
            let rest = letters.split_off(columns);
            lines.last_mut().expect("there is one").extend(letters);
            lines.push(String::new());
            letters = rest;
        }
        used += letters.len();
        lines.last_mut().expect("there is one").extend(letters);
    }
    lines
}

/// The end of a long path, which says more than its beginning.
pub(crate) fn tail(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_string();
    }
    let kept: String = text.chars().skip(count - width.saturating_sub(1)).collect();
    format!("…{kept}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(bitrate(100_000_000), "100 Mb/s");
        assert_eq!(bitrate(1_485_000_000), "1.5 Gb/s");
        assert_eq!(byte_rate(12_500_000), "12.5 MB/s");
        assert_eq!(bytes(1 << 30), "1.0 GiB");
        assert_eq!(bytes(12), "12 B");
        assert_eq!(uptime(93_784.5), "1 d 2 h 3 min");
        assert_eq!(uptime(61.0), "1 min 1 s");
        assert_eq!(tail("footage/day1/take.mov", 9), "…take.mov");
    }

    #[test]
    fn a_name_with_a_newline_stays_in_its_line() {
        let mut table = Table::new(&["name", ">n"]);
        table.row(vec![String::from("a\nb\x1b[2J"), String::from("1")]);
        let text = table.text();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("a\\nb\\u{1b}[2J"), "{text}");
        assert_eq!(one_line("Müller — é"), "Müller — é");
    }

    #[test]
    fn a_long_line_is_broken_between_words_and_a_longer_word_within() {
        assert_eq!(wrapped("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrapped("a bcdefg h", 3), ["a", "bcd", "efg", "h"]);
        assert_eq!(wrapped("", 3), [""]);
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["name", ">n"]);
        table.row(vec![String::from("a"), String::from("100")]);
        assert_eq!(table.text(), "  name    n\n  a     100\n");
    }
}
