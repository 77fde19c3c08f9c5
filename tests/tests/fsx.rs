// SPDX-License-Identifier: Apache-2.0
//! Random operations through a real smbd, compared with a model of the files; `make fsx` does a
//! million.

use rushes_tests::fsx::{Plan, run, setup};
use rushes_tests::world::{Setup, World};

fn plan(seed: u64, operations: u64, clients: usize) -> Plan {
    Plan {
        workers: 8,
        clients,
        ..Plan::new(seed, operations)
    }
}

fn check(seed: u64, operations: u64, clients: usize, setup: &Setup) {
    let Some(mut world) = World::build(setup) else {
        return;
    };
    let report = run(
        world.smbd.port(),
        world.disk.path(),
        &plan(seed, operations, clients),
    )
    .unwrap_or_else(|divergence| panic!("{divergence}"));
    assert_eq!(report.operations, operations, "{report:?}");
    let status = world
        .daemon()
        .wait_for("nothing is left to be written", |status| {
            status["write"]["used_bytes"] == 0
        });
    assert!(
        status["write"]["write_count"].as_u64() > Some(operations / 10),
        "too few writes went through the daemon: {status}"
    );
}

#[test]
fn files_are_what_a_model_of_them_is() {
    check(1, 4000, 2, &setup("64MiB"));
}

#[test]
fn files_are_what_a_model_of_them_is_when_smbd_waits_for_each_answer() {
    let mut setup = setup("64MiB");
    setup
        .share
        .extend(["aio read size = 0", "aio write size = 0"].map(String::from));
    check(3, 2000, 2, &setup);
}

#[test]
fn files_are_what_a_model_of_them_is_when_the_kernel_moves_their_bytes() {
    let mut setup = setup("64MiB");
    setup
        .global
        .push(String::from("min receivefile size = 16384"));
    setup
        .share
        .extend(["aio read size = 0", "use sendfile = yes"].map(String::from));
    // One client: a client that truncates a file makes others read zeros for a moment, with
    // Samba's own sendfile as well.
    check(2, 2000, 1, &setup);
}
