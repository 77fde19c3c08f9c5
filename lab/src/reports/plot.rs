// SPDX-License-Identifier: Apache-2.0
//! Plots by gnuplot, each as SVG and PNG beside its data.

use crate::stage::run;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A line of a plot.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// x, y, and the spread of y: lowest, highest.
    pub points: Vec<(f64, f64, f64, f64)>,
}

/// How points are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// As a line.
    Lines,
    /// As a line with the spread of each point.
    Spread,
    /// Each by itself.
    Dots,
}

impl Marks {
    fn style(self) -> &'static str {
        match self {
            Marks::Lines => "lines lw 2",
            Marks::Spread => "linespoints pt 7 lw 2",
            Marks::Dots => "points pt 7 ps 0.5",
        }
    }
}

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Its title.
    pub title: String,
    /// Label of the x axis.
    pub x_label: String,
    /// Label of the y axis.
    pub y_label: String,
    /// Upper end of y; `None`: by the data.
    pub y_max: Option<f64>,
    /// A level to mark, with its name.
    pub level: Option<(f64, String)>,
    /// The style of points.
    pub marks: Marks,
    /// x counts things: only whole numbers have a tick.
    pub is_counted: bool,
    /// Its lines.
    pub lines: Vec<Line>,
}

const COLOURS: [&str; 6] = [
    "#1b7837", "#b2182b", "#e08214", "#2166ac", "#762a83", "#666666",
];

/// Units: pixels.
const PANEL_HEIGHT: usize = 540;

impl Plot {
    /// Draw it into `folder/name.svg` and `folder/name.png`.
    ///
    /// Errors   gnuplot is missing (package gnuplot-nox) or refuses
    pub fn draw(&self, folder: &Path, name: &str) -> Result<()> {
        draw_panels(std::slice::from_ref(self), folder, name)
    }

    /// `first`: number of its first line in the data.
    fn script(&self, name: &str, first: usize) -> Result<String> {
        let mut text = String::new();
        writeln!(text, "set title \"{}\"", self.title)?;
        writeln!(text, "set xlabel \"{}\"", self.x_label)?;
        writeln!(text, "set ylabel \"{}\"", self.y_label)?;
        writeln!(
            text,
            "set key outside center bottom horizontal\nset grid ytics lc rgb '#dddddd'"
        )?;
        match self.y_max {
            Some(max) => writeln!(text, "set yrange [*:{max}]")?,
            None => writeln!(text, "set yrange [*:*]")?,
        }
        match self.is_counted {
            // Room beside the first and the last point; y begins at 0, since readers compare
            // heights.
            true => writeln!(
                text,
                "set xtics 1\nset offsets 0.2, 0.2, 0, 0\nset yrange [0:*]"
            )?,
            false => writeln!(text, "set xtics autofreq\nset offsets")?,
        }
        let mut parts = Vec::new();
        for (number, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let (index, style) = (first + number, self.marks.style());
            let legend = line.name.replace('_', "-");
            parts.push(format!(
                "'{name}.dat' index {index} using 1:2 with {style} lc rgb '{colour}' title '{legend}'"
            ));
            if self.marks == Marks::Spread {
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
        writeln!(text, "plot {}", parts.join(", \\\n     "))?;
        Ok(text)
    }
}

/// Draw plots below one another into `folder/name.svg` and `folder/name.png`.
///
/// Errors   gnuplot is missing (package gnuplot-nox) or refuses
pub fn draw_panels(panels: &[Plot], folder: &Path, name: &str) -> Result<()> {
    let data = folder.join(format!("{name}.dat"));
    fs::write(&data, data_of(panels)).with_context(|| format!("{}", data.display()))?;
    let script = folder.join(format!("{name}.gnuplot"));
    fs::write(&script, script_of(panels, name)?)?;
    // gnuplot gets relative names, so that the plot can be drawn again after the folder has moved.
    let file = script.file_name().context("the script has no name")?;
    run(Command::new("gnuplot").arg(file).current_dir(folder))
}

fn data_of(panels: &[Plot]) -> String {
    let mut text = String::new();
    for line in panels.iter().flat_map(|panel| &panel.lines) {
        let _ = writeln!(text, "# {}", line.name);
        // gnuplot would not count a block without points.
        if line.points.is_empty() {
            text.push_str("NaN NaN NaN NaN\n");
        }
        for (x, y, low, high) in &line.points {
            let _ = writeln!(text, "{x} {y} {low} {high}");
        }
        text.push_str("\n\n");
    }
    text
}

fn script_of(panels: &[Plot], name: &str) -> Result<String> {
    let mut text = String::new();
    let height = PANEL_HEIGHT * panels.len().max(1);
    for (terminal, suffix) in [("svg", "svg"), ("pngcairo", "png")] {
        writeln!(
            text,
            "set terminal {terminal} size 900,{height} background 'white'\nset output '{name}.{suffix}'"
        )?;
        if panels.len() > 1 {
            writeln!(text, "set multiplot layout {},1", panels.len())?;
        }
        let mut first = 0;
        for panel in panels {
            text.push_str(&panel.script(name, first)?);
            first += panel.lines.len();
        }
        if panels.len() > 1 {
            writeln!(text, "unset multiplot")?;
        }
    }
    Ok(text)
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
        let room = crate::stage::room::Room::create().unwrap();
        let plot = Plot {
            title: "late frames".to_owned(),
            x_label: "streams".to_owned(),
            y_label: "late frames".to_owned(),
            y_max: None,
            level: Some((0.5, "limit".to_owned())),
            marks: Marks::Spread,
            is_counted: true,
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
