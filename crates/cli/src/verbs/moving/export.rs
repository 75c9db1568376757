//! `margay export`.

use std::path::Path;

use async_trait::async_trait;
use indicatif::HumanBytes;
use ipam_operator::moving::Tally;
use serde::Serialize;

use crate::answer::Answer;
use crate::args::Export;
use crate::command::OnStore;
use crate::error::Result;
use crate::store::StoreAt;
use crate::transfer::{Filter, Overwrite, Writer, Written, aside};

#[derive(Serialize)]
struct Json {
    file: String,
    revision: i64,
    bytes: u64,
    #[serde(flatten)]
    tally: Tally,
}

#[async_trait(?Send)]
impl OnStore for Export {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let to_stdout = self.file == Path::new("-");
        let (path, overwrite) = (self.file.clone(), if self.force { Overwrite::Allowed } else { Overwrite::Never });
        let writer =
            if to_stdout { Writer::stdout()? } else { aside(move || Writer::create(&path, overwrite)).await? };
        let Written { revision, tally, bytes, .. } = Written::of(at, Filter::Ipam, writer).await?;
        let file = if to_stdout { "stdout".to_owned() } else { self.file.display().to_string() };
        let text =
            format!("Successfully exported {at} at revision {revision} to {file}: {tally}, {}", HumanBytes(bytes));
        let answer = Answer::new(text, &Json { file, revision: revision.get(), bytes, tally })?;
        Ok(if to_stdout { answer.on_stderr() } else { answer })
    }
}
