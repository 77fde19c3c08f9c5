// SPDX-License-Identifier: Apache-2.0
//! Plots by gnuplot, each as SVG and PNG beside the data it was drawn from.

use crate::stage::run;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A line of a plot.
#[derive(Clone, Debug)]
pub struct Line {
    /// For the legend.
    pub name: String,
    /// x, y, and the spread of y (lowest, highest).
    pub points: Vec<(f64, f64, f64, f64)>,
}

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Above it.
    pub title: String,
    /// Below it.
    pub x_label: String,
    /// Beside it.
    pub y_label: String,
    /// Upper end of y, when the data's own would hide what matters.
    pub y_max: Option<f64>,
    /// A level to mark, with its name.
    pub level: Option<(f64, String)>,
    /// Show the spread of each point.
    pub spread: bool,
    /// What is drawn.
    pub lines: Vec<Line>,
}

const COLOURS: [&str; 6] = [
    "#1b7837", "#b2182b", "#e08214", "#2166ac", "#762a83", "#666666",
];

impl Plot {
    /// Draw it into `folder/name.svg` and `folder/name.png`.
    ///
    /// Errors   gnuplot is missing (package gnuplot-nox) or refuses
    pub fn draw(&self, folder: &Path, name: &str) -> Result<()> {
        let data = folder.join(format!("{name}.dat"));
        fs::write(&data, self.data()).with_context(|| format!("{}", data.display()))?;
        let script = folder.join(format!("{name}.gnuplot"));
        fs::write(&script, self.script(name)?)?;
        // gnuplot finds its data by relative names, so the folder can be moved and drawn again.
        let file = script.file_name().context("the script has no name")?;
        run(Command::new("gnuplot").arg(file).current_dir(folder))
    }

    fn data(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            let _ = writeln!(text, "# {}", line.name);
            for (x, y, low, high) in &line.points {
                let _ = writeln!(text, "{x} {y} {low} {high}");
            }
            text.push_str("\n\n");
        }
        text
    }

    fn script(&self, name: &str) -> Result<String> {
        let mut text = String::new();
        writeln!(text, "set title \"{}\"", self.title)?;
        writeln!(text, "set xlabel \"{}\"", self.x_label)?;
        writeln!(text, "set ylabel \"{}\"", self.y_label)?;
        writeln!(
            text,
            "set key outside center bottom horizontal\nset grid ytics lc rgb '#dddddd'"
        )?;
        if let Some(max) = self.y_max {
            writeln!(text, "set yrange [*:{max}]")?;
        }
        let mut parts = Vec::new();
        for (index, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let legend = line.name.replace('_', "-");
            parts.push(format!(
                "'{name}.dat' index {index} using 1:2 with {} lw 2 lc rgb '{colour}' title '{legend}'",
                if self.spread { "linespoints pt 7" } else { "lines" }
            ));
            if self.spread {
                parts.push(format!(
                    "'{name}.dat' index {index} using 1:2:3:4 with yerrorbars pt 0 lc rgb '{colour}' notitle"
                ));
            }
        }
        if let Some((level, legend)) = &self.level {
            parts.push(format!(
                "{level} with lines dt 2 lc rgb 'black' title '{legend}'"
            ));
        }
        for (terminal, suffix) in [
            ("svg size 900,540 background 'white'", "svg"),
            ("pngcairo size 900,540", "png"),
        ] {
            writeln!(
                text,
                "set terminal {terminal}\nset output '{name}.{suffix}'"
            )?;
            writeln!(text, "plot {}", parts.join(", \\\n     "))?;
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_pictures_are_drawn() {
        if Command::new("gnuplot").arg("--version").output().is_err() {
            assert!(
                std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
                "no gnuplot (apt-get install gnuplot-nox)"
            );
            eprintln!("SKIPPED both_pictures_are_drawn: no gnuplot (apt-get install gnuplot-nox)");
            return;
        }
        let room = crate::room::Room::create().unwrap();
        let plot = Plot {
            title: "late frames".to_owned(),
            x_label: "streams".to_owned(),
            y_label: "late frames".to_owned(),
            y_max: None,
            level: Some((0.5, "limit".to_owned())),
            spread: true,
            lines: vec![Line {
                name: "stock_tuned".to_owned(),
                points: vec![(1.0, 0.0, 0.0, 0.0), (2.0, 5.0, 4.0, 6.0)],
            }],
        };
        plot.draw(room.path(), "late").unwrap();
        let svg = fs::read_to_string(room.path().join("late.svg")).unwrap();
        assert!(svg.contains("stock-tuned"));
        assert!(fs::metadata(room.path().join("late.png")).unwrap().len() > 1000);
    }
}
