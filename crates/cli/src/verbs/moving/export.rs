//! `margay export`.

use std::path::Path;

use datastore::Location;
use indicatif::HumanBytes;
use ipam_operator::moving::{Tally, mark_key, ranges};
use serde::Serialize;

use crate::answer::Answer;
use crate::args::Export;
use crate::backup::{Copied, Overwrite, Writer, aside, copy};
use crate::error::Result;
use crate::transfer::marked;

#[derive(Serialize)]
struct Json {
    file: String,
    revision: i64,
    bytes: u64,
    #[serde(flatten)]
    tally: Tally,
}

pub(super) async fn run(location: &Location, args: &Export) -> Result<Answer> {
    let to_stdout = args.file == Path::new("-");
    let (path, overwrite) = (args.file.clone(), if args.force { Overwrite::Allowed } else { Overwrite::Never });
    let writer = if to_stdout { Writer::stdout()? } else { aside(move || Writer::create(&path, overwrite)).await? };
    let mut tally = Tally::default();
    let mut counted_to = None;
    let copied = copy(location, ranges(), writer, |kv| {
        if kv.key == mark_key() {
            return Err(marked(&location.to_string()));
        }
        // A key that is not larger shows that the copy has begun anew.
        if counted_to.as_ref().is_some_and(|last| kv.key <= *last) {
            tally = Tally::default();
        }
        tally.add(&kv.key, kv.value.as_bytes());
        counted_to = Some(kv.key.clone());
        Ok(())
    });
    let Copied { revision, bytes, .. } = copied.await?;
    let file = if to_stdout { "stdout".to_owned() } else { args.file.display().to_string() };
    let text =
        format!("Successfully exported {location} at revision {revision} to {file}: {tally}, {}", HumanBytes(bytes));
    let answer = Answer::new(text, &Json { file, revision, bytes, tally })?;
    Ok(if to_stdout { answer.on_stderr() } else { answer })
}
