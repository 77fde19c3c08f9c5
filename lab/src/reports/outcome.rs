// SPDX-License-Identifier: Apache-2.0
//! The end of every experiment: one JSON object or a table on standard output, then a verdict.

use anyhow::Result;
use serde::Serialize;

/// The result of an experiment. As JSON it is itself.
pub trait Outcome: Serialize {
    /// The table for people, with its line ends.
    fn table(&self) -> Result<String>;

    /// Check the result: wrong bytes and broken promises are failures, late frames are figures.
    ///
    /// Errors   it failed; printed after the report, which has the details
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// An experiment with its options.
pub trait Experiment {
    /// Its result.
    type Outcome: Outcome;

    /// Set everything up, measure, take everything down.
    ///
    /// Errors   the run could not be made
    fn run(&self) -> Result<Self::Outcome>;
}

/// Run an experiment, and print its result as JSON and nothing else, or as a table.
///
/// Errors   the run could not be made, or its result is a failure
pub fn perform(experiment: &impl Experiment, is_json: bool) -> Result<()> {
    let outcome = experiment.run()?;
    print!("{}", printed(&outcome, is_json)?);
    outcome.check()
}

fn printed(outcome: &impl Outcome, is_json: bool) -> Result<String> {
    match is_json {
        true => Ok(serde_json::to_string(outcome)? + "\n"),
        false => outcome.table(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::ensure;

    #[derive(Serialize)]
    struct Sum {
        sum: u64,
    }

    impl Outcome for Sum {
        fn table(&self) -> Result<String> {
            Ok(format!("the sum is {}\n", self.sum))
        }

        fn check(&self) -> Result<()> {
            ensure!(self.sum == 2, "{}, expected 2", self.sum);
            Ok(())
        }
    }

    struct Adding(u64);

    impl Experiment for Adding {
        type Outcome = Sum;

        fn run(&self) -> Result<Sum> {
            Ok(Sum { sum: self.0 + 1 })
        }
    }

    #[test]
    fn an_outcome_is_one_line_of_json_or_a_table() {
        let sum = Sum { sum: 2 };
        assert_eq!(printed(&sum, true).unwrap(), "{\"sum\":2}\n");
        assert_eq!(printed(&sum, false).unwrap(), "the sum is 2\n");
    }

    #[test]
    fn a_failure_is_said_after_the_report() {
        assert!(perform(&Adding(1), false).is_ok());
        let said = perform(&Adding(2), true).unwrap_err().to_string();
        assert_eq!(said, "3, expected 2");
    }
}
