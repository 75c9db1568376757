//! `margay store backup`.

use datastore::Location;
use indicatif::{HumanBytes, HumanCount};
use kv::Range;
use serde::Serialize;

use super::args::Backup;
use crate::answer::Answer;
use crate::backup::{CLUSTER_PREFIXES, Copied, Overwrite, Writer, aside, copy};
use crate::error::Result;

#[derive(Serialize)]
struct Json {
    file: String,
    revision: i64,
    keys: u64,
    bytes: u64,
}

pub(super) async fn run(location: &Location, args: &Backup) -> Result<Answer> {
    let (path, overwrite) = (args.file.clone(), if args.force { Overwrite::Allowed } else { Overwrite::Never });
    let writer = aside(move || Writer::create(&path, overwrite)).await?;
    let ranges = if location.is_shared() { CLUSTER_PREFIXES.map(Range::prefix).to_vec() } else { vec![Range::All] };
    let Copied { revision, keys, bytes } = copy(location, ranges, writer, |_| Ok(())).await?;
    let file = args.file.display().to_string();
    let text = format!(
        "Successfully backed up {location} at revision {revision} to {file}: {} keys, {}",
        HumanCount(keys),
        HumanBytes(bytes)
    );
    Answer::new(text, &Json { file, revision, keys, bytes })
}
