//! A store that its driver opens, and what is known of its errors beside what the engine says.

use driver::{Location, OpenOptions, Opened};
use kv::{Error, ErrorKind, Result};

/// Has the driver open a store, for this process alone.
pub(crate) async fn open_here(location: &Location, options: &OpenOptions) -> Result<Box<dyn Opened>> {
    location.driver().open(location.place(), options).await.map_err(|error| explained(location, error))
}

/// Adds to the error of a store in a folder what the engine cannot know: the command that makes a store, or which other engine's
/// files are there.
pub(crate) fn explained(location: &Location, error: Error) -> Error {
    let Some(folder) = location.path() else { return error };
    match (error.kind(), error.detail()) {
        (ErrorKind::Missing, Some(detail)) => {
            let detail = format!("{detail}; `margay --store {} pool create NAME CIDR` makes it", error.store());
            error.with_detail(detail)
        }
        // An engine reads in `store.id` whose store it is; without that file the drivers know.
        (ErrorKind::Unsupported, _) if kv_local::engine_in(folder).is_none() => {
            let mut names = location.drivers().with_files_in(folder).map(|driver| driver.facts().name);
            match names.find(|name| *name != location.facts().name) {
                Some(other) => error.with_detail(kv_local::store_of(folder, other)),
                None => error,
            }
        }
        _ => error,
    }
}
