//! `margay store backup`.

use std::path::PathBuf;

use async_trait::async_trait;
use clap::Args;
use indicatif::{HumanBytes, HumanCount};
use serde::Serialize;

use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::Result;
use crate::store::StoreAt;
use crate::transfer::{Filter, Overwrite, Writer, Written, aside};

#[derive(Debug, Args)]
pub(crate) struct Backup {
    /// The file to write
    pub(crate) file: PathBuf,

    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Serialize)]
struct Json {
    file: String,
    revision: i64,
    keys: u64,
    bytes: u64,
}

#[async_trait(?Send)]
impl OnStore for Backup {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let (path, overwrite) = (self.file.clone(), if self.force { Overwrite::Allowed } else { Overwrite::Never });
        let writer = aside(move || Writer::create(&path, overwrite)).await?;
        let Written { revision, keys, bytes, .. } = Written::of(at, Filter::All, writer).await?;
        let file = self.file.display().to_string();
        let text = format!(
            "Successfully backed up {at} at revision {revision} to {file}: {} keys, {}",
            HumanCount(keys),
            HumanBytes(bytes)
        );
        Answer::new(text, &Json { file, revision: revision.get(), keys, bytes })
    }
}
