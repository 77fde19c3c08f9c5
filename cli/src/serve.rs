// SPDX-License-Identifier: Apache-2.0
//! `rushes serve`: the daemon in the foreground.

use crate::args::ServeArgs;
use crate::recover::ended;
use rushes_daemon::config::Config;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode, String> {
    log_to_stderr(&args.log)?;
    let config = Config::load(&args.config.config).map_err(|error| error.to_string())?;
    ended(rushes_daemon::serve(config))
}

/// Under systemd the journal adds the time.
pub(crate) fn log_to_stderr(filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        format!(
            "--log {filter:?} is not a filter ({error}); expected error, warn, info, debug, trace, \
             or such as info,rushes_daemon=debug"
        )
    })?;
    let format = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal());
    if std::env::var_os("JOURNAL_STREAM").is_some() {
        format.without_time().init();
    } else {
        format.init();
    }
    Ok(())
}
