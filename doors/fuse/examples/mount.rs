// SPDX-License-Identifier: Apache-2.0
//! Mounts a pool that is there: `mount CATALOGUE FOLDER`. `rushes pool mount` is to take its place.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [catalogue, folder] = arguments.as_slice() else {
        return Err("expected: mount CATALOGUE FOLDER".into());
    };
    let pool = rushes_pool::Pool::serve(catalogue.as_ref())?;
    rushes_fuse::mount(pool, folder.as_ref())?.wait()?;
    Ok(())
}
