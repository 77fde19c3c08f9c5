// SPDX-License-Identifier: Apache-2.0
//! Progress bars of commands that change or check a pool.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// A bar for work of unknown length.
pub(crate) fn counter(template: &str) -> ProgressBar {
    let bar = ProgressBar::no_length();
    bar.set_style(
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    bar
}

/// A bar for work without progress reports: shows that it goes on, and its name.
pub(crate) fn waiting(message: &'static str) -> ProgressBar {
    let bar = counter("{spinner} {msg} ({elapsed})");
    bar.set_message(message);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
